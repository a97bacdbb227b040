"""A model's segments for decoding: the layers between two exits, and the exit above them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference.policy import Emission, ExitInput, emit_early, emit_final
from eejax.inference.state import RequestRows, Weights
from eejax.models import cache, exits, transformer
from eejax.models.attention import PackedRows
from eejax.models.cache import KeyValue, varying
from eejax.models.config import ModelConfig

SegmentOutput = tuple[jax.Array, jax.Array, tuple[KeyValue, ...], KeyValue | None]
"""States at the boundary and behind the exit's block, and the segment's written keys and values:
of its layers, and of the block."""


@dataclasses.dataclass(frozen=True)
class SegmentRunner:
    """Runner of rows through segments and exits; every engine's step is made of its calls.

    It lives inside a compiled program. Segment e has the keys and values `kvs` of its layers and
    `block` of its exit's block (`KVCache.segments[e]`, `KVCache.blocks[e]`).

    Attributes:
      weights: a model's prepared weights; on a mesh, one device's share.
      config: the model's.
    """

    weights: Weights
    config: ModelConfig

    @property
    def last(self) -> int:
        """Number of the last segment, and of the exit above it."""
        return self.weights.last

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens [b, w] at positions [b or 1, w]: [b, w, d]."""
        return transformer.embed(
            self.weights.params, self.config, tokens, positions, self.weights.axes
        )

    def run(
        self,
        e: int,
        x: jax.Array,
        start: jax.Array,
        kvs: tuple[KeyValue, ...],
        block: KeyValue | None,
        *,
        active: jax.Array | None = None,
        seen: jax.Array | None = None,
    ) -> SegmentOutput:
        """Run rows x [b, w, d] at positions start [b] onward (`models.cache.run_segment`)."""
        return cache.run_segment(
            self.weights.params,
            self.weights.segments[e],
            self.config,
            e,
            x,
            start,
            kvs,
            block,
            active=active,
            seen=seen,
            axes=self.weights.axes,
        )

    def run_packed(
        self,
        e: int,
        x: jax.Array,
        packed: PackedRows,
        kvs: tuple[KeyValue, ...],
        block: KeyValue | None,
    ) -> SegmentOutput:
        """Run packed rows x [t, 1, d] of some slots (`models.cache.run_packed`)."""
        return cache.run_packed(
            self.weights.params,
            self.weights.segments[e],
            self.config,
            e,
            x,
            packed,
            kvs,
            block,
            axes=self.weights.axes,
        )

    def propagate(
        self,
        e: int,
        x: jax.Array,
        start: jax.Array,
        kvs: tuple[KeyValue, ...],
        block: KeyValue | None,
    ) -> tuple[tuple[KeyValue, ...], KeyValue | None]:
        """Write keys and values of a state below, x (`models.cache.propagate_segment`)."""
        return cache.propagate_segment(
            self.weights.params,
            self.weights.segments[e],
            self.config,
            e,
            x,
            start,
            kvs,
            block,
            self.weights.axes,
        )

    def reader(self, e: int, h: jax.Array) -> exits.Reader:
        """Return exit e's reader of states h [b, d] behind its block.

        On a mesh it covers the whole vocabulary on every shard, so that all shards decide alike.
        """
        return exits.reader(self.weights.params, self.config, e, h, self.weights.axes)

    def undecided(self, batch: int) -> Emission:
        """Return `Emission.undecided` for a device's requests."""
        return varying(Emission.undecided(batch), self.weights.axes.data)

    def decide(
        self,
        e: int,
        emission: Emission,
        memory: Memory,
        x: jax.Array,
        h: jax.Array,
        allowed: jax.Array,
        position: jax.Array,
        request: RequestRows,
        *,
        measure: bool = False,
        drafts: jax.Array | None = None,
        process_logits: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[Emission, Memory]:
        """Emit tokens from exit e: from the last exit always, from others where their gate fires.

        Args:
          e: number of the exit.
          emission: tokens of the exits below.
          memory: what gates remember of them.
          x: [b, d] states at the boundary.
          h: [b, d] states behind the exit's block.
          allowed: [b] bool, requests that may leave here.
          position: [b] int32, position of the token to emit.
          request: the requests.
          measure: fill in margins.
          drafts: [b] bool, requests that get a draft where no gate fires.
          process_logits: applies `request.logits_params` to logits [b, v].
        """
        look = ExitInput(
            e,
            x,
            self.reader(e, h),
            allowed,
            position,
            request.progress(position),
            router.of_exit(self.weights.params, self.config, e),
            request.logits_params,
            process_logits,
        )
        if e == self.last:
            return emit_final(emission, look, request.sampling, measure), memory
        return emit_early(
            emission, memory, look, request.policy, request.sampling, self.config, measure, drafts
        )
