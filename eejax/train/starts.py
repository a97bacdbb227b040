"""Initial values of exits that a trained model does not have: they begin as the logit lens.

An exit's MLP or block stands on the residual stream. A plain copy, without the layers that it was
trained between, would be applied to states that it was not trained on, and the exit's initial loss
would have no bound. The copy's contribution to the stream therefore starts at zero, as in ReZero
(Bachlechner et al. 2020) or LoRA (Hu et al. 2021), and grows in training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.exits import head_name


def copied_exit(base: Tree, config: ModelConfig, e: ExitConfig) -> Tree:
    """Return initial parameters of exit `e`, copied from the model (EE-Tuning, section 3.1).

    The exit's logits are those of its norm and head on the state at its boundary, which for the
    final exit's norm and head is the logit lens.

    Args:
      base: parameters of a model of `config`, which may lack layers that are not copied.
      config: the model's configuration; its own exits do not matter.
      e: the exit.

    Returns:
      norm: the final exit's. head, head_bias: the final exit's output embedding. low_rank: the
      dimensions of the state that change the exit's logits most, the leading right singular vectors
      of its table. mlp: that of the layer below the boundary (above it at boundary 0), or its first
      `mlp_width` columns, with the norm it reads. block: the last layer. The contribution of MLP
      and block to the residual stream starts at zero. Parameters without a counterpart in the model
      are left out.

    Raises:
      ConfigError: a block in a model with norms on the residual stream itself, where no block
        leaves a state as it is.
    """
    final, tree = base["final"], {}
    if e.norm and "norm" in final:
        tree["norm"] = final["norm"]
    if "head_bias" in final:
        tree["head_bias"] = final["head_bias"]
    if e.head == "own":
        tree["head"] = _table(base, config, e)
    if e.head_rank:
        tree["low_rank"] = leading_dimensions(base, config, e)
    if e.mlp:
        layer = jax.tree.map(lambda a: a[max(e.boundary, 1) - 1], base["layers"])
        one_norm = config.residual == "parallel_one_norm"
        norms = {"mlp_norm": layer.get("attn_norm" if one_norm else "mlp_norm")}
        shapes = params.map_params(lambda p: p.shape, params.exit_(config, e)["mlp"])
        mlp = {k: a[tuple(map(slice, shapes[k]))] for k, a in layer["mlp"].items()}
        tree |= {"mlp": _silent(mlp, "down", "down_bias")}
        tree |= {k: v for k, v in norms.items() if v is not None}
    if e.block:
        require(
            config.norm_placement != "post",
            "tune.start",
            "copy",
            f"gives exit {e.boundary} no block: with norm_placement = 'post' none of them passes a "
            "state on as it is",
            "Leave the block out, or set tune.start to 'random'.",
        )
        layer = jax.tree.map(lambda a: a[config.n_layers - 1], base["layers"])
        tree["block"] = _silent_block(layer, config)
    # The exit computes in its own memory: a donated step must not give away the model's.
    return jax.tree.map(jnp.copy, tree)


def _table(base: Tree, config: ModelConfig, e: ExitConfig) -> jax.Array:
    """Return the output embedding [v, d] that exit e begins with.

    It is the final exit's where the exit has its own, and where the head of the final exit becomes
    a shared one.
    """
    copied = e.head == "own" or (e.head == "shared" and "shared_head" not in base)
    where = head_name(config, config.n_exits) if copied else e.head
    tables = {"own": base["final"], "tied": base["embed"], "shared": base}
    names = {"own": "head", "tied": "tokens", "shared": "shared_head"}
    return tables[where][names[where]]


def leading_dimensions(base: Tree, config: ModelConfig, e: ExitConfig) -> Tree:
    """Return the first `low_rank` of an exit, as `copied_exit` does for all its parameters.

    It projects on the leading right singular vectors of the rows that the exit knows, and back.
    """
    table = _table(base, config, e)[: e.vocabulary or config.vocab_size]
    products = jnp.einsum(
        "vd,ve->de", table, table, precision="highest", preferred_element_type=jnp.float32
    )
    _, vectors = jnp.linalg.eigh(products)  # by ascending eigenvalue
    vectors = vectors[:, -e.head_rank :].astype(table.dtype)
    return {"down": vectors, "up": vectors.T}


def _silent_block(layer: Tree, config: ModelConfig) -> Tree:
    """Return a layer whose attention and MLP add nothing to the residual stream.

    If a norm follows them, its scale is zero instead of their weights: the gradient through a norm
    of zeros would be a division by its epsilon.
    """
    if config.norm_placement == "pre":
        attn = _silent(layer["attn"], "o", "o_bias")
        return layer | {"attn": attn, "mlp": _silent(layer["mlp"], "down", "down_bias")}
    nothing = -1.0 if config.norm_plus_one else 0.0

    def off(norm):
        return _silent(norm, "bias") | {"scale": jnp.full_like(norm["scale"], nothing)}

    return layer | {name: off(layer[name]) for name in ("attn_out_norm", "mlp_out_norm")}


def _silent(tree: Tree, *names: str) -> Tree:
    """Return `tree` with zeros in the leaves `names`, some of which it may lack."""
    return tree | {name: jnp.zeros_like(tree[name]) for name in names if name in tree}
