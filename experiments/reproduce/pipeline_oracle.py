"""The oracle of pipelines: EE-LLM's algorithm stage by stage on one device, by autodiff.

It has no schedule, no mesh and none of the executor's code. It is a definition to test the executor
against, and is itself tested against the gradient of the whole loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eejax.common.trees import Tree, slice_layers
from eejax.losses.multi_exit import exits_loss
from eejax.models import exits, layers, transformer
from eejax.models.params import for_compute
from eejax.pipeline.partition import Partition


@jax.custom_vjp
def auxiliary(x: jax.Array, g: jax.Array) -> jax.Array:
    """Return <g, x>, by which a gradient g from the stage above enters a stage's own loss.

    g is constant. With L_i the losses of stage i's exits, the gradient of L_i + <g_i, x_i> in the
    stage's parameters includes that of all losses behind it (EE-LLM, Eq. 2 and Proposition 3.1).
    """
    return jnp.sum(x.astype(jnp.float32) * g.astype(jnp.float32))


auxiliary.defvjp(
    lambda x, g: (auxiliary(x, g), (jnp.zeros((), x.dtype), g)),
    lambda saved, scale: ((scale * saved[1]).astype(saved[0].dtype), None),
)


def gradients(
    partition: Partition,
    params: Tree,
    tokens: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, Tree]:
    """Return the sum over exits of w_e C_e, and its gradient in a model's parameters.

    As in a pipeline, each stage is differentiated by itself, from the last to the first. It sends
    down one gradient, that of its auxiliary loss in its input.

    Args:
      partition: layers and exits of the stages.
      params: the model's parameters.
      tokens: [b, t] int32.
      labels: [b, t] int32.
      weights: [e] of the exits.
    """
    config = partition.config
    positions = jnp.arange(tokens.shape[1])[None]
    context = layers.make_context(config, positions)

    def stage(i: int, params: Tree, x: jax.Array | None):
        """Return the losses of the stage's exits, and its output; the first stage has no input."""
        cast = for_compute(params, config.dtype) | {"embed": params["embed"]}
        start, n, loss = partition.starts[i], partition.layers[i], jnp.zeros((), jnp.float32)
        if x is None:
            x = transformer.embed(params, config, tokens, positions)
        for done in range(n + 1):
            for place in partition.on(i):
                if place.layers == done:
                    e = place.exit
                    h = exits.state(cast, config, e, x, context)
                    weight = weights[partition.which.index(e)][None]
                    loss = loss + exits_loss(cast, config, [h], labels, weight, (e,))[0]
            if done < n:
                part = slice_layers(cast["layers"], start + done, start + done + 1)
                index = jnp.arange(start + done, start + done + 1)
                x = transformer.run_layers(part, x, config, context, index)[0]
        return loss, x

    entered, x = [], None
    total = jnp.zeros((), jnp.float32)
    for i in range(partition.stages):
        entered.append(x)
        loss, x = stage(i, params, x)
        total = total + loss
    assert x is not None  # there is at least one stage
    g = jnp.zeros_like(x)
    grads = jax.tree.map(jnp.zeros_like, params)
    for i in reversed(range(partition.stages)):

        def own_loss(params, x, i=i, g=g):
            loss, leaving = stage(i, params, x)
            return loss + auxiliary(leaving, g)

        if i == 0:
            own = jax.grad(own_loss)(params, None)
        else:
            own, g = jax.grad(own_loss, (0, 1))(params, entered[i])
        grads = jax.tree.map(jnp.add, grads, own)
    return total, grads
