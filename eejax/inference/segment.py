"""A model's segments for decoding: the layers between two exits, and the exit above them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eejax.common.trees import Tree
from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference.policy import Emission, ExitInput, emit_early, emit_final
from eejax.inference.state import RequestRows
from eejax.inference.weights import Weights
from eejax.models import attention, exits, layers, transformer
from eejax.models.attention import PackedRows
from eejax.models.cache import KeyValue, varying
from eejax.models.config import ModelConfig

SegmentOutput = tuple[jax.Array, jax.Array, tuple[KeyValue, ...], KeyValue | None]
"""States at the boundary and behind the exit's block, and the keys and values that were written: of
the segment's layers, and of the block."""


@dataclasses.dataclass(frozen=True)
class SegmentRunner:
    """Runner of rows through segments and exits, from which the engines' steps are made.

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
        visible: jax.Array | None = None,
    ) -> SegmentOutput:
        """Run rows through segment e, whose earlier positions must be filled already.

        Args:
          e: number of the segment.
          x: [b, w, d] states at the boundary below.
          start: [b] int32, positions of the first rows.
          kvs: keys and values of the layers; there must be room for all w rows from `start` on.
          block: keys and values of the exit's block.
          active: [b] bool, sequences whose states the layers change, by default all. The state of
            any other sequence stays x, and each layer writes keys and values of x for it, as
            `propagate` does.
          visible: [b, s] bool, positions of the buffers that may be attended to, by default all.
        """
        context = self._context(x, start, kvs, block, visible)
        return self._run(e, x, context, kvs, block, active)

    def run_packed(
        self,
        e: int,
        x: jax.Array,
        packed: PackedRows,
        kvs: tuple[KeyValue, ...],
        block: KeyValue | None,
    ) -> SegmentOutput:
        """Run packed rows x [t, 1, d] of some of the cache's sequences; otherwise as `run`."""
        keys = jnp.arange(_positions(kvs, block), dtype=jnp.int32)[None]
        context = layers.make_context(
            self.config, packed.position[:, None], key_positions=keys, packed=packed
        )
        return self._run(e, x, context, kvs, block)

    def _run(self, e, x, context, kvs, block, active=None) -> SegmentOutput:
        """Run a segment's layers, and its exit's, in one pass."""
        config, axes, written = self.config, self.weights.axes, []
        for i, p, kv in self._layers(e, kvs):
            before = x
            x, kv = _layer(
                p,
                x,
                config,
                context,
                window=config.window(i),
                rope=config.rope(i),
                cache=kv,
                axes=axes,
            )
            if active is not None:
                x = jnp.where(active[:, None, None], x, before)
            written.append(kv)
        params = self.weights.params
        h, block = exits.attend(params, config, e, x, context, cache=block, axes=axes)
        return x, h, tuple(written), block

    def propagate(
        self,
        e: int,
        x: jax.Array,
        start: jax.Array,
        kvs: tuple[KeyValue, ...],
        block: KeyValue | None,
    ) -> tuple[tuple[KeyValue, ...], KeyValue | None]:
        """Write the keys and values of a segment and its exit block for rows that do not run it.

        Every layer reads x itself, the state of a boundary below, instead of the state under the
        layer: no attention and no MLP runs, except an exit's own MLP below its block. Otherwise as
        `run`. State propagation (CALM; Schuster et al. 2022, section 3.1).
        """
        config, axes = self.config, self.weights.axes
        context = self._context(x, start, kvs, block)
        written = tuple(
            _write_heads(p, x, config, context, config.rope(i), kv, axes)
            for i, p, kv in self._layers(e, kvs)
        )
        if block is not None:
            p = exits.exit_params(self.weights.params, config, e)
            x = exits.after_mlp(p, x, config, axes)
            block = _write_heads(p["block"], x, config, context, config.exit_rope(e), block, axes)
        return written, block

    def _layers(self, e: int, kvs: tuple[KeyValue, ...]) -> list[tuple[int, Tree, KeyValue]]:
        """Return number, parameters, and keys and values of each layer of segment e."""
        segment, first = self.weights.segments[e], self.config.segments[e][0]
        pairs = zip(segment, kvs, strict=True)
        return [(first + i, p, kv) for i, (p, kv) in enumerate(pairs)]

    def _context(self, x, start, kvs, block, visible=None) -> layers.LayerContext:
        """Return the context of rows x [b, w, d] at positions start [b] on, beside the buffers."""
        positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        keys = jnp.arange(_positions(kvs, block), dtype=jnp.int32)[None]
        return layers.make_context(
            self.config, positions, key_positions=keys, start=start, visible=visible
        )

    def reader(self, e: int, h: jax.Array) -> exits.Reader:
        """Return exit e's reader of states h [b, d] behind its block.

        On a mesh it covers the whole vocabulary on every shard, so that all shards decide alike.
        """
        return exits.reader(self.weights.params, self.config, e, h, self.weights.axes)

    def undecided(self, batch: int) -> Emission:
        """Return `Emission.undecided` for a device's requests."""
        return varying(Emission.undecided(batch), self.weights.axes.data)

    def exit_input(
        self,
        e: int,
        x: jax.Array,
        h: jax.Array,
        allowed: jax.Array,
        position: jax.Array,
        request: RequestRows,
        process_logits: Callable[[jax.Array], jax.Array] | None = None,
    ) -> ExitInput:
        """Return the input of exit e.

        Args:
          e: number of the exit.
          x: [b, d] states at the boundary.
          h: [b, d] states behind the exit's block.
          allowed: [b] bool, requests that may leave here.
          position: [b] int32, position of the token to emit.
          request: the requests.
          process_logits: applies `request.logits_params` to logits [b, v].
        """
        confidence = router.of_exit(self.weights.params, self.config, e)
        return request.exit_input(
            e, x, self.reader(e, h), allowed, position, confidence, process_logits
        )

    def decide(
        self,
        emission: Emission,
        memory: Memory,
        look: ExitInput,
        *,
        measure: bool = False,
        drafts: jax.Array | None = None,
    ) -> tuple[Emission, Memory]:
        """Emit tokens from an exit: from the last one always, from others where their gate fires.

        Args:
          emission: tokens of the exits below.
          memory: what gates remember about them.
          look: the exit's input.
          measure: fill in margins.
          drafts: [b] bool, requests that get a draft where no gate fires.
        """
        if look.e == self.last:
            return emit_final(emission, look, measure), memory
        return emit_early(emission, memory, look, self.config, measure, drafts)


# Equal layers are traced and lowered once for each shape, and XLA inlines them. The trace is kept
# for the process, so a test that replaces a part of it has to clear JAX's caches.
_layer = jax.jit(layers.layer, static_argnames=("config", "window", "rope", "axes"))


def _positions(kvs, block) -> int:
    """Return the number of positions that the buffers hold."""
    buffers = jax.tree.leaves((kvs, block))
    return buffers[0].shape[1] if buffers else 1


def _write_heads(p, x, config, context, rope, kv, axes) -> KeyValue:
    """Write the keys and values that `layers.layer` writes for x, and skip the rest of the layer.

    If the projections are fused, queries are computed too and dropped: a product with the other
    columns alone would first copy them, which takes ten times as long on a CPU.
    """
    h = layers.norm(p["attn_norm"], x, config) if "attn_norm" in p else x
    _, k, v = layers.heads(p["attn"], h, config, context, rope, axes)
    return attention.write(kv, k, v, context.start)
