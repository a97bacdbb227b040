"""One process of a stage, started by `stages`.

Its command is `python -m eejax.experiments.gpu_check.child JSON`.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import time

from eejax.experiments.gpu_check.check import StageCheck


def main(text: str) -> None:
    begin, own = time.monotonic(), json.loads(text)
    check = StageCheck(
        part=own["part"],
        out=pathlib.Path(own["out"]),
        name=own["name"],
        small=own["small"],
        card=own["card"],
        deadline=begin + own["seconds"],
    )
    check.write()
    module = importlib.import_module(own["module"])
    if own["mode"] == "compile":
        compile_all(check, module)
    else:
        if getattr(module, "HOLDS_DEVICE", True):  # else its server does, alone
            check.figures["device"] = _device()
        module.run(check)
    check.write()


def _device() -> str:
    import jax

    return jax.devices()[0].device_kind


def compile_all(check: StageCheck, module) -> None:
    """Compile each of a stage's programs for the card."""
    from eejax.common.errors import ConfigError
    from eejax.experiments import aot

    card = aot.CARDS[check.card]
    try:
        aot.device(card)
    except ConfigError as error:
        check.figures["skipped"] = str(error)
        check.errors["compiler"] = str(error)
        return
    check.figures |= dict(card=card.name, versions=aot.versions())
    if complaint := aot.complaint():
        check.figures["complaint"] = complaint
    for name, build in module.programs(check):
        check.measure(name, lambda build=build: program_figures(build(card)))


def program_figures(made) -> dict[str, float]:
    """Return the bytes that a program takes, and the number of decisions that the host makes."""
    from eejax.experiments import card_programs, hlo

    own = isinstance(made, card_programs.Compiled)
    program = hlo.parse(made.text if own else made.as_text())
    memory = made.memory if own else made.memory_analysis()
    return dict(
        temporary=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        host_decisions=hlo.on_host(program),
    )


if __name__ == "__main__":
    main(sys.argv[1])
