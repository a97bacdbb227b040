"""A model to serve, described so that another process can build its engine."""

from __future__ import annotations

import dataclasses

from eejax.checkpoint.language_model import load
from eejax.common.errors import require, require_count
from eejax.data import chat
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.models.config import ModelConfig
from eejax.serving.messages import BuiltEngine
from eejax.sharding.mesh import MeshConfig, make_mesh

MANY_LAYERS = 12
"""Layers from which on one slot serves first, while the programs of all slots compile: those of
SmolLM2's 30 layers take 50 s of a core for 16 slots and 10 s for one."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model to serve; calling it builds the engine, which takes a while.

    Attributes:
      source: a run's workdir, a Hugging Face folder, a GGUF file or a name.
      tokenizer: "bytes", a file or a folder, for a model without a tokenizer.
      dtype: dtype in which a pretrained model computes, float32 by default.
      slots: requests that a model works on at a time.
      context: maximum tokens of a request, by default the model's.
      drafts: maximum tokens of a request that an exit drafts past an undecided one.
      lookup: maximum tokens of a request that its text drafts itself; as in `EngineOptions`.
      chunk: as in `EngineOptions`.
      mesh: devices over which the model is sharded.
    """

    source: str
    tokenizer: str | None = None
    dtype: str | None = None
    slots: int = 16
    context: int | None = None
    drafts: int = 0
    lookup: int = 0
    chunk: int | None = None
    mesh: MeshConfig | None = None

    def __post_init__(self):
        require(bool(self.source), "source", self.source, "must name a model")
        require_count("drafts", self.drafts, minimum=0)
        require_count("lookup", self.lookup, minimum=0)
        require_room(self.slots, self.context)

    @property
    def draft_rows(self) -> int:
        """Maximum drafts of a request, by an exit or from its text."""
        return max(self.drafts, self.lookup)

    def __call__(self) -> BuiltEngine:
        mesh = None if self.mesh is None else make_mesh(self.mesh)
        opened = load(self.source, tokenizer=self.tokenizer, dtype=self.dtype, mesh=mesh)
        config = opened.config
        options = batch_options(config, self.chunk, self.drafts, self.lookup)
        engine = EarlyExitEngine.make(
            opened.params, config, options, slots=self.slots, context=self.context, mesh=mesh
        )
        template = chat.find(opened.source, opened.tokenizer)
        if template is not None:
            chat.ChatTemplate(*template)  # reject an invalid template before the first request
        soon = self.slots > 1 and mesh is None and config.n_layers >= MANY_LAYERS
        first = engine.with_slots(1) if soon else None
        return BuiltEngine(engine, config, opened.tokenizer, template, first=first)


def require_room(slots: int, context: int | None) -> None:
    """Raise `ConfigError` unless the slots and the context are possible numbers."""
    require_count("slots", slots)
    if context is not None:
        require_count("context", context, minimum=2)


def batch_options(
    config: ModelConfig, chunk: int | None, drafts: int = 0, lookup: int = 0
) -> EngineOptions:
    """Return engine options for all requests to a server, as far as the model has room."""
    most = config.context_length
    chunk = None if chunk is None else min(chunk, most)
    return EngineOptions(
        drafts=min(drafts, most) if config.n_exits else 0,
        lookup=min(lookup, most - 1),
        chunk=chunk,
        cap=min(max(EngineOptions.cap, lookup + 1), most),
        logits_params=True,
    )
