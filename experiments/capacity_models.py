"""Models whose partial loading HELIOS measures, and the requests that fit beside them.

Everything is computed from abstract shapes (`eejax.inference.capacity`): nothing is allocated.
"""

from __future__ import annotations

LLAMA_2 = dict(
    vocab_size=32_000,
    context_length=4096,
    norm="rmsnorm",
    position="rotary",
    mlp_gated=True,
    activation="silu",
    head="shared",
)
SIZES = {
    "Llama-2-7B": (9, dict(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008)),
    "Llama-2-13B": (15, dict(n_layers=40, d_model=5120, n_heads=40, d_ff=13_824)),
}


def models() -> dict:
    """Return, by name, the layer up to which HELIOS loads a model (Table 4), and its config.

    Table 4 gives Llama2-13B 32 layers. It has 40, and the saving in the table is that of 40.
    """
    from eejax.configs import helios_opt_1b3
    from eejax.models.config import ModelConfig

    opt = ModelConfig.from_dict(helios_opt_1b3.get_config().model.to_dict())
    return {"OPT-1.3B": (6, opt)} | {
        name: (layer, llama(layer, size)) for name, (layer, size) in SIZES.items()
    }


def llama(layer: int, size: dict):
    """Return Llama 2 with one early exit, which shares the head as LayerSkip's exits do."""
    from eejax.models.config import ExitConfig, ModelConfig

    exits = (ExitConfig(layer, norm=False, head="shared"),)
    return ModelConfig(**(LLAMA_2 | size), exits=exits)


def depths(config, layer: int) -> dict[str, int]:
    """Return the number of segments of the whole model, and of the part that ends at a layer."""
    return {"whole": config.n_exits + 1, "part": config.exit_boundaries.index(layer) + 1}


def requests_that_fit(config, layer: int, context: int, budget: float, can_deepen: bool) -> dict:
    """Count the requests that fit beside the whole model and beside its part up to a layer.

    The result also has the bytes of both.

    Args:
      config: the model.
      layer: the layer at which the part ends.
      context: tokens that a request has room for.
      budget: bytes for weights and requests.
      can_deepen: whether the part keeps what it needs to be given more layers while requests run.
    """
    from eejax.inference import capacity
    from eejax.inference.options import EngineOptions

    options = EngineOptions(can_deepen=can_deepen)
    row: dict = {"layers": [layer, config.n_layers], "context": context}
    for which, depth in depths(config, layer).items():
        row[f"{which}_weights"] = capacity.weight_bytes(config, depth)
        row[f"{which}_request"] = capacity.request_bytes(config, options, depth, context)
        row[which] = capacity.slots(config, options, depth, context, budget)
    return row | {"ratio": row["part"] / row["whole"] if row["whole"] else None}
