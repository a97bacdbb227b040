"""Compile programs for a GPU without one; print their launches, copies, memory, estimated time.

    eejax gpu-programs [--card=h100] [--only=full,recompute] [--json]

It needs no GPU, but the compiler in JAX's CUDA plugin: `make env` puts it into `.venv/lowering`;
elsewhere, name its folder in PYTHONPATH. Bytes, launches and temporaries are XLA's own.
Milliseconds are estimates: the bytes of every instruction at the data sheet's rate, its products at
0.7 of its rate, and fixed times between launches and for conditionals. The floor is the time to
read weights, keys and values once. With --json the last line is one JSON object. The standard error
has a line "program: NAME" before XLA's log of each program.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from eejax.experiments import card_figures, card_programs, launch

_CARD = flags.DEFINE_enum("card", "h100", ("a100", "h100"), "The GPU to compile for.")
_ONLY = flags.DEFINE_list("only", [], "Names of programs, or their beginnings; by default all.")
_SMALL = flags.DEFINE_bool("small", False, "Models of few and narrow layers, for a trial.")
_TEXT = flags.DEFINE_string("text", None, "A folder for the compiled programs' text.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")


def main() -> None:
    import os
    import sys
    import time

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.append(os.path.join(sys.prefix, "lowering"))  # JAX loads no plugin there
    from eejax.analysis import table
    from eejax.common.errors import require
    from eejax.common.paths import expanded
    from eejax.experiments import aot

    card = aot.CARDS[_CARD.value]
    programs = list(card_programs.programs(_SMALL.value))
    for given in _ONLY.value:
        known = [one.name for one in programs]
        begins = given and any(name.startswith(given) for name in known)
        require(begins, "--only", given, f"must begin the name of a program: {', '.join(known)}")
    texts = expanded(_TEXT.value) if _TEXT.value else None
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
    aot.device(card)
    versions = aot.versions()
    print(card.name, *(f"{name} {version}" for name, version in versions.items()), sep=", ")
    if complaint := aot.complaint():
        print(f"warning: {complaint}", file=sys.stderr)
    result: dict[str, Any] = {"card": card.name, "versions": versions, "estimates": True}
    for one in programs:
        name = one.name
        if _ONLY.value and not any(name.startswith(n) for n in _ONLY.value):
            continue
        print(f"program: {name}", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        made = one.build(card)
        seconds = time.perf_counter() - begin
        result[name] = card_figures.measured(card, one, made) | {"compiled_in_s": seconds}
        if texts is not None:
            (texts / f"{name.replace(' ', '_')}.txt").write_text(made.text)

        def shown(v):
            return f"{v:,.3g}" if isinstance(v, float) else str(v)

        rows = [(k, shown(v)) for k, v in result[name].items()]
        print(table((name, ""), rows), end="\n\n", flush=True)
    if _JSON.value:
        print(json.dumps(result))


if __name__ == "__main__":
    launch.run(main)
