"""Describe an experiment and what it takes, without running it.

    eejax describe --config=configs/ee_llm_7b.py [--compile] [--json]

It prints parameters by part, floating-point operations, tokens, and the memory of each device of
the configured mesh: the state exactly, the rest estimated (eejax.train.memory). Everything comes
from shapes, so it needs neither the mesh nor the memory. With --compile the training step is
compiled here for that many devices and XLA's own figures are added; large models take minutes. With
--json the last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json

from absl import flags
from ml_collections import config_flags

from eejax.experiments import launch

config_flags.DEFINE_config_file(
    "config", None, "The experiment: a config file, or the name of an installed one."
)
_COMPILE = flags.DEFINE_bool("compile", False, "Compile the training step and ask XLA.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
flags.mark_flags_as_required(["config"])


COSTLY = 0.2  # minimum share of a step at which the heads of early exits are mentioned


def main() -> None:
    from eejax.analysis import table
    from eejax.train import memory

    experiment = launch.configured()
    counted, work = parameters(experiment.model), compute(experiment)
    step = memory.training_memory(experiment)
    sizes = dataclasses.asdict(step) | {
        name: getattr(step, name) for name in ("state", "temporary", "total")
    }
    result = {"parameters": counted, "compute": work, "memory": sizes}
    total = counted["total"]
    rows = [(name, f"{n:,}", f"{n / total:.1%}") for name, n in counted.items()]
    print(table(("parameters", "number", "share"), rows), end="\n\n")

    def number(n):
        return f"{n:,}" if isinstance(n, int) else f"{n:.1%}" if n < 1 else f"{n:.3e}"

    print(table(("training", "number"), [(k, number(n)) for k, n in work.items()]), end="\n\n")
    large = work["share of early-exit heads"] > COSTLY
    if large and experiment.loss.exit_tokens == 1 and experiment.mesh.pipe == 1:
        print(
            "The heads of early exits are a large part of a step, as the vocabulary is large for "
            "this model.\n--config.loss.exit_tokens=0.25 takes their loss at a quarter of the "
            "tokens, drawn at each step.",
            end="\n\n",
        )
    print(table(("bytes per device", "GiB"), gibibytes(sizes)))
    if _COMPILE.value:
        compiled = memory.compiled_memory(memory.compile_step(experiment))
        sizes = dataclasses.asdict(compiled) | {"total": compiled.total}
        print("\n" + table(("XLA, per device", "GiB"), gibibytes(sizes)))
        result["compiled"] = sizes
    if _JSON.value:
        print(json.dumps(result))


def parameters(model) -> dict[str, int]:
    """Return the number of parameters by part of the model, and their sum as "total"."""
    from eejax.common.trees import size
    from eejax.models import params

    shapes = params.shapes(model)
    parts = {"embedding": size(shapes["embed"]), "layers": size(shapes["layers"])}
    parts |= {e.name: size(shapes["exits"][e.name]) for e in model.exits}
    parts["final"] = size(shapes["final"])
    if "shared_head" in shapes:
        parts["shared head"] = size(shapes["shared_head"])
    return parts | {"total": params.count(model)}


def compute(experiment) -> dict[str, float]:
    """Return tokens and model FLOPs, forward and backward (eejax.train.flops)."""
    from eejax.train.flops import exit_heads_flops_per_token, model_flops_per_token

    train, length = experiment.train, experiment.data.length
    share = experiment.loss.exit_tokens
    tokens = train.batch_sizes.before(train.steps) * length
    per_token = model_flops_per_token(experiment.model, length, share)
    heads = exit_heads_flops_per_token(experiment.model, share)
    return {
        "FLOPs per token": per_token,
        "heads of early exits": heads,
        "share of early-exit heads": heads / per_token,
        "tokens per step": train.batch_size * length,
        "steps": train.steps,
        "tokens": tokens,
        "FLOPs": per_token * tokens,
    }


def gibibytes(sizes: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, f"{n / 2**30:,.3f}") for name, n in sizes.items()]


if __name__ == "__main__":
    launch.run(main)
