"""Performance over prompts of a server that chooses its model, as a picture.

    python -m experiments.timeline --source=http://127.0.0.1:8000 --output=runs/timeline

Draws throughput, requests per second, time to first token and perplexity over the number of the
prompt, with lines where models were reassessed, LD where more layers of one were loaded, and SW
where another one came to serve (HELIOS, Figures 13, 14 and 16). Perplexity is that of each answer
under the model that gave it, as its tokens left. --source is the address of a server that runs with
--objective, or the timeline.json of an earlier call. Left in --output: timeline.png, timeline.json.
"""

from __future__ import annotations

import json
import math
import pathlib

from absl import flags

from eejax.common.errors import DataError
from experiments import launch

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
    folder = pathlib.Path(_OUTPUT.value).expanduser()
    analysis.save(figure(found), folder / "timeline.png")
    write_text(folder / "timeline.json", json.dumps(found))
    print(f"{len(found['prompt'])} prompts: {folder / 'timeline.png'}")


def timeline(source: str, model: str) -> dict:
    """Read the curves of a server or a file. Raises DataError if there are none."""
    if not source.startswith(("http://", "https://")):
        try:
            found = json.loads(pathlib.Path(source).expanduser().read_text(encoding="utf-8"))
            missing = {"prompt", "model", "marks", *PANELS} - {*found}
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"--source = {source!r}: is no timeline ({error}).") from error
        if missing:
            raise DataError(f"--source = {source!r}: is no timeline: it has no {min(missing)}.")
        return found
    import httpx

    try:
        state = httpx.get(f"{source.rstrip('/')}/dashboard", timeout=30).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise DataError(
            f"--source = {source!r}: does not answer as a server ({error}), or it still compiles: "
            "try again once it says that it listens."
        ) from error
    if "fleet" not in state["models"].get(model, {}):
        names = ", ".join(name for name, own in state["models"].items() if "fleet" in own) or "none"
        raise DataError(
            f"--model = {model!r}: must be one that the server chooses models for, of {names}."
        )
    return state["models"][model]["fleet"]["timeline"]


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
