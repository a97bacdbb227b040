"""Decoding with early exits: one engine of slots, its scheduler, and generators for a few texts."""

from eejax.inference.auto import AutoGenerator
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.generate import Generator
from eejax.inference.options import EngineOptions
from eejax.inference.pipelined import PipelinedGenerator
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest, FinishReason, RequestOutput
from eejax.inference.result import GenerationResult
from eejax.inference.sampling import SamplingParams
from eejax.inference.scheduler import Scheduler
from eejax.inference.state import RequestRows

__all__ = [
    "AutoGenerator",
    "EarlyExitEngine",
    "EngineOptions",
    "EngineRequest",
    "ExitPolicy",
    "FinishReason",
    "GenerationResult",
    "Generator",
    "PipelinedGenerator",
    "RequestOutput",
    "RequestRows",
    "SamplingParams",
    "Scheduler",
]
