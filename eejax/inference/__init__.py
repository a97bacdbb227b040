"""Decoding engines: full depth, the post-hoc oracle, early exit and self-speculation."""

from eejax.inference.auto import AutoGenerator
from eejax.inference.generate import Generator
from eejax.inference.options import EngineOptions
from eejax.inference.pipelined import PipelinedGenerator
from eejax.inference.policy import ExitPolicy
from eejax.inference.result import GenerationResult
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows

__all__ = [
    "AutoGenerator",
    "EngineOptions",
    "ExitPolicy",
    "Generator",
    "PipelinedGenerator",
    "RequestRows",
    "GenerationResult",
    "SamplingParams",
]
