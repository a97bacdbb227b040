"""Decoding engines: full depth, the post-hoc oracle, early exit and self-speculation."""

from eejax.inference.auto import AutoGenerator
from eejax.inference.generate import Generator
from eejax.inference.pipelined import PipelinedGenerator
from eejax.inference.policy import ExitPolicy
from eejax.inference.result import Result
from eejax.inference.sampling import Sampling
from eejax.inference.state import EngineOptions, Request

__all__ = [
    "AutoGenerator",
    "EngineOptions",
    "ExitPolicy",
    "Generator",
    "PipelinedGenerator",
    "Request",
    "Result",
    "Sampling",
]
