"""The model as a Flax Linen module, for code that is written around `init` and `apply`.

It is a facade: the parameters are the tree of `models.params`, the computation is that of
`models.transformer`. Checkpoints, engines and losses of eejax take `variables["params"]` as it is.
"""

from __future__ import annotations

from functools import cache

from flax import linen as nn
from flax.core.scope import LazyRng
from jax import Array, random
from jax.numpy import zeros
from jax.tree import map as tree_map

from eejax.common.trees import Tree
from eejax.models import exits, params, transformer
from eejax.models.config import ModelConfig


class EarlyExitTransformer(nn.Module):
    """A module whose `apply({"params": tree}, tokens)` returns the logits of every exit.

    `init(key, tokens)` gives the values of `params.init(config, key)`. It is for one device only:
    inside a `shard_map` use `models.transformer` with its `Axes`.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        train: bool = False,
    ) -> tuple[Array, ...]:
        """Compute the logits of every exit from tokens [b, t] int32.

        Args:
          positions, segment_ids: [b, t], as in `transformer.exit_states`.
          train: whether to apply dropout; with a dropout rate in the config, `apply` then needs
            `rngs={"dropout": key}`.

        Returns:
          E + 1 arrays [b, t, v] float32, the final exit's last.
        """
        config = self.config

        # Flax would fold each parameter's name into the key, which `params.init` does itself.
        @cache
        def drawn() -> Tree:
            assert self.scope is not None  # Flax calls only bound modules
            return params.init(config, LazyRng.create(self.scope.rngs["params"]).as_jax_rng())

        def part(_, name):
            if self.is_initializing():
                return drawn()[name]
            # In `apply` Flax compares shapes only.
            return tree_map(lambda a: zeros(a.shape, a.dtype), params.shapes(config)[name])

        tree = {name: self.param(name, part, name) for name in params.abstract(config)}
        keys = None
        if train and config.dropout:
            keys = random.split(self.make_rng("dropout"), tokens.shape[0])
        states = transformer.exit_states(
            tree,
            config,
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            dropout_keys=keys,
        )
        heads = (exits.head(tree, config, e) for e in range(config.n_exits + 1))
        return tuple(
            exits.logits(head._replace(table=head.table.astype(h.dtype)), h)
            for head, h in zip(heads, states, strict=True)
        )
