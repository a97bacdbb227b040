"""Claims of HELIOS' paper on models by their shapes: Tables 2 and 4, Figures 6 and 15.

Nothing is allocated and no weights are needed, so these hold at the paper's own sizes.
"""

from __future__ import annotations

import numpy as np

from eejax.experiments.capacity_models import LLAMA_2, depths, models, requests_that_fit

DTYPE = "bfloat16"
BUDGET = 40e9  # bytes of the paper's A100
CONTEXTS = (512, 1024, 2048)
FIGURE_6 = {
    "Llama-7B": dict(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008),
    "Llama-13B": dict(n_layers=40, d_model=5120, n_heads=40, d_ff=13_824),
}
STEP = 4  # layers between the exits of Figure 6


def table_2() -> list[dict]:
    """Return parameters, layers and exits of the configurations of HELIOS' two models."""
    from eejax.configs import helios_opt_1b3, helios_opt_6b7
    from eejax.models import params
    from eejax.models.config import ModelConfig

    rows = []
    for name, file in (("OPT-1.3B", helios_opt_1b3), ("OPT-6.7B", helios_opt_6b7)):
        config = ModelConfig.from_dict(file.get_config().model.to_dict())
        rows.append(
            {
                "model": name,
                "parameters": params.count(config),
                "layers": config.n_layers,
                "exits": list(config.exit_boundaries),
            }
        )
    return rows


def table_4() -> list[dict]:
    """Return the share of the card's memory saved by loading a model up to its first exit.

    `saved` counts bfloat16 weights; `saved_of_model` is the same as a share of the whole model.
    """
    from eejax.inference import capacity

    rows = []
    for name, (layer, config) in models().items():
        config = config.replace(dtype=DTYPE)
        depth = depths(config, layer)
        whole = capacity.weight_bytes(config, depth["whole"])
        saved = whole - capacity.weight_bytes(config, depth["part"])
        rows.append(
            {
                "model": name,
                "layers": config.n_layers,
                "exit": layer,
                "saved": saved / BUDGET,
                "saved_of_model": saved / whole,
            }
        )
    return rows


def figure_6() -> list[dict]:
    """Return gigaflops of a token and gigabytes of weights by exit layer, of two Llama models.

    `layer_gigaflops` leaves out the head, which is read once whichever exit a token takes.
    """
    from eejax.helios.energy import layer_flops
    from eejax.inference import capacity
    from eejax.models.config import ExitConfig, ModelConfig

    rows = []
    for name, size in FIGURE_6.items():
        early = range(STEP, size["n_layers"], STEP)
        exits = tuple(ExitConfig(layer, norm=False, head="shared") for layer in early)
        config = ModelConfig(**(LLAMA_2 | size), dtype=DTYPE, exits=exits)
        head = 2 * config.padded_vocab * config.d_model
        layers = np.cumsum(layer_flops(config)).tolist()
        for depth, (layer, flops) in enumerate(
            zip(config.exit_boundaries, layers, strict=True), start=1
        ):
            row = {
                "model": name,
                "layer": layer,
                "layers": config.n_layers,
                "gigaflops": (flops + head) / 1e9,
                "layer_gigaflops": flops / 1e9,
                "gigabytes": capacity.weight_bytes(config, depth) / 1e9,
            }
            rows.append(row)
    return rows


def savings_at(rows: list[dict], layer: int) -> dict[str, float]:
    """Return the share of all layers' operations that an exit behind `layer` saves, by model."""
    found = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        flops = {r["layer"]: r["layer_gigaflops"] for r in rows if r["model"] == name}
        found[name] = 1 - flops[layer] / flops[max(flops)]
    return found


def figure_15() -> list[dict]:
    """Return requests served at a time beside part of a model over those beside all of it.

    It is the geometric mean over `CONTEXTS`, the room of a request in tokens.
    """
    rows = []
    for name, (layer, config) in models().items():
        config = config.replace(dtype=DTYPE)
        ratios = [requests_that_fit(config, layer, n, BUDGET, True)["ratio"] for n in CONTEXTS]
        rows.append({"model": name, "exit": layer, "ratio": float(np.exp(np.log(ratios).mean()))})
    return rows
