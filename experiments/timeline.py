"""Draw the performance over prompts of a server that chooses its model.

    eejax timeline --source=http://127.0.0.1:8000 --output=runs/timeline

It draws throughput, requests per second, time to first token and perplexity over the number of the
prompt, with lines where models were reassessed, LD where more layers of one were loaded, and SW
where another one began to serve (HELIOS, Figures 13, 14 and 16). Perplexity is that of each answer
under the model that gave it, by the exits of its tokens. --source is the address of a server that
runs with --objective, or the timeline.json of an earlier call. The files in --output are
timeline.png and timeline.json.
"""

from __future__ import annotations

import json
import math
from typing import Any

from absl import flags

from eejax.common.errors import ConfigError, DataError, require
from eejax.common.paths import expanded
from eejax.experiments import launch

_SOURCE = flags.DEFINE_string("source", None, "A server's address, or a timeline.json.")
_MODEL = flags.DEFINE_string("model", "auto", "The server's name for the models it chooses from.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the picture and its numbers.")
flags.mark_flags_as_required(["source", "output"])

PANELS = {
    "throughput": "tokens per second",
    "requests": "requests per second",
    "ttft": "time to first token, s",
    "perplexity": "perplexity",
}


def main() -> None:
    from eejax import analysis
    from eejax.checkpoint.files import write_text

    found = timeline(_SOURCE.value, _MODEL.value)
    folder = expanded(_OUTPUT.value)
    analysis.save(figure(found), folder / "timeline.png")
    write_text(folder / "timeline.json", json.dumps(found))
    print(f"{len(found['prompt'])} prompts: {folder / 'timeline.png'}")


def timeline(source: str, model: str) -> dict:
    """Read the curves of a server or a file. Raises DataError if there are none."""
    if source.startswith(("http://", "https://")):
        found = served(source, model)
    else:
        try:
            found = json.loads(expanded(source).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"--source = {source!r}: is not a timeline ({error}).") from error
    try:
        check(found)
    except ConfigError as error:
        raise DataError(f"--source = {source!r}: is not a timeline: {error}") from error
    return found


def served(source: str, model: str) -> Any:
    """Return a server's timeline of a model. Raises `DataError` if there is none."""
    import httpx

    try:
        state = httpx.get(f"{source.rstrip('/')}/dashboard", timeout=30).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError, OverflowError) as error:
        raise DataError(
            f"--source = {source!r}: does not answer as a server ({error}), or it still compiles: "
            "try again once it says that it listens."
        ) from error
    models = state.get("models") if isinstance(state, dict) else None
    if not isinstance(models, dict):
        raise DataError(
            f"--source = {source!r}: does not answer as a server: its /dashboard has no models. "
            "Give the address of eejax serve."
        )
    fleets = {
        name: own["fleet"]
        for name, own in models.items()
        if isinstance(own, dict) and isinstance(own.get("fleet"), dict)
    }
    if model not in fleets:
        names = ", ".join(fleets) or "none"
        raise DataError(
            f"--model = {model!r}: must be one that the server chooses models for, of {names}."
        )
    return fleets[model].get("timeline")


def check(found: Any) -> None:
    """Raise `ConfigError`, which names the column and the value, for an invalid timeline."""
    from eejax.helios.timeline import EVENT_KINDS

    require(isinstance(found, dict), "timeline", type(found).__name__, "must be an object")
    for name in ("prompt", "model", *PANELS, "marks"):
        own = found.get(name)
        require(isinstance(own, list), name, own, "must be a list")
    count = len(found["prompt"])
    for name in ("model", *PANELS):
        own = len(found[name])
        require(own == count, f"len({name})", own, f"must be {count}, as of prompt")
    for value in found["prompt"]:
        require(_is_prompt(value), "prompt", value, "must be a number of a prompt, from 1 on")
    for value in found["model"]:
        require(isinstance(value, str), "model", value, "must be a string")
    for name in PANELS:
        for value in found[name]:
            good = isinstance(value, float | None) or (type(value) is int and abs(value) < 2**53)
            require(good, name, value, "must be a number or null")
    kinds = sorted({*EVENT_KINDS.values()})
    for mark in found["marks"]:
        good = (
            isinstance(mark, dict) and mark.get("kind") in kinds and _is_prompt(mark.get("prompt"))
        )
        require(good, "marks", mark, f"must have a prompt, and a kind of {', '.join(kinds)}")


def _is_prompt(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**53


def figure(found: dict):
    """Draw four panels with marks and a curve for each model that served."""
    from eejax import analysis

    names = [*dict.fromkeys(found["model"])]
    panels = []
    for key, label in PANELS.items():
        curves = {name: ([], []) for name in names}
        for prompt, model, value in zip(found["prompt"], found["model"], found[key], strict=True):
            if value is not None and math.isfinite(value):
                curves[model][0].append(prompt)
                curves[model][1].append(value)
        panels.append(analysis.Panel(label, "prompt", label, curves))
    drawn = analysis.compare(panels, names, title="Performance over prompts", columns=2)
    for axes in drawn.axes[: len(panels)]:
        for mark in found["marks"]:
            plain = mark["kind"] == "reassessment"
            axes.axvline(mark["prompt"], color="0.6" if plain else "0.3", lw=0.8, ls=":")
            if not plain:
                at = (mark["prompt"], 1.0)
                axes.annotate(mark["kind"], at, xycoords=("data", "axes fraction"), fontsize=6)
    return drawn


if __name__ == "__main__":
    launch.run(main)
