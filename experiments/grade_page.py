"""Page of a grade: one HTML file with its pictures inside, which needs no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from eejax.calibration.prediction import GatePoint
from eejax.experiments.grade_times import DRAFTS, GATE, LOOKUP
from eejax.experiments.grading import ModelGrade

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.8rem; text-align: right; border-bottom: 1px solid #d9dee4; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .verdict { font-size: 1.15rem; padding: 0.8rem 1rem; border-radius: 6px; }
.yes { background: #e3f5ec; } .no { background: #fbe9e7; }
pre { background: #f3f5f7; padding: 0.8rem 1rem; overflow-x: auto; border-radius: 6px; }"""
WAYS = {
    GATE: "early exits emit tokens",
    DRAFTS: "an exit drafts",
    LOOKUP: "drafts from the text so far, where it repeats itself",
}
NONE = "–"


def page(grade: ModelGrade) -> str:
    """Return the page as HTML."""
    kind = "yes" if grade.verdict.pays else "no"
    sections = (
        ("The model", model_section(grade)),
        ("Exits by depth", depth_section(grade)),
        ("Gates", gate_section(grade)),
        ("Drafts", draft_section(grade)),
        ("Measured", measured_section(grade)),
        ("Guarantee", guarantee_section(grade)),
        ("Recipe", recipe_section(grade)),
    )
    body = "\n".join(f"<h2>{title}</h2>\n{text}" for title, text in sections)
    name = html.escape(grade.model.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>Grade of {name}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>Does early exit pay for {name}?</h1>\n"
        f'<p class="verdict {kind}">{html.escape(grade.verdict.sentence)}</p>\n'
        f"{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of text."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    lines = [line("th", header), *(line("td", row) for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def picture(figure, about: str) -> str:
    """Return a figure as an image inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(about)}" src="data:image/png;base64,{data}">'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def ms(seconds: float) -> str:
    """Return milliseconds in three digits."""
    return f"{1e3 * seconds:.3g} ms"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    """Return a speed over that of the full model."""
    return NONE if value is None else f"{value:.2f} ×"


def model_section(grade: ModelGrade) -> str:
    model, measured, text = grade.model, grade.times, grade.text
    full = measured.full(model.layers)
    exits = ", ".join(map(str, model.own_exits)) or "none"
    size = [
        ["layers", f"{model.layers}"],
        ["width", f"{model.width:,}"],
        ["vocabulary", f"{model.vocabulary:,}"],
        ["parameters", f"{model.parameters:,}"],
        ["dtype", model.dtype],
        ["device", model.device],
        ["exits of the model, after layer", exits],
        ["text", f"{text.source} ({text.tokens:,} tokens, of which {text.checked:,} check)"],
    ]
    parts = [
        ["a layer", share(model.layer_share), ms(measured.layer), share(measured.layer / full)],
        [
            "the head",
            share(model.head_share),
            ms(measured.heads[-1]),
            share(measured.heads[-1] / full),
        ],
        ["the rest of a step", NONE, ms(measured.step), share(measured.step / full)],
        ["a step of all layers", "100.0%", ms(full), "100.0%"],
    ]
    first, further = measured.early_step
    for name, seconds in (
        ("the engine's work for one exit", first),
        ("the engine's work for each further exit", further),
        ("the engine's work for an exit that may draft", measured.draft_step),
    ):
        parts.append([name, NONE, ms(seconds), share(seconds / full)])
    for boundary, known, seconds in own_exits(grade):
        name = f"the exit after layer {boundary}, which knows {known:,} tokens"
        parts.append([name, NONE, ms(seconds), share(seconds / full)])
    rows = [[f"{n}", f"{factor:.2f}"] for n, factor in measured.rows]
    head = measured.heads[-1] / measured.layer
    return "\n".join(
        (
            table(["model", ""], size),
            table(["part of a step for one token", "weights", "measured", "of a step"], parts),
            paragraph(f"The head takes as long as {head:.1f} layers."),
            table(["rows at once", "time of a layer, over one row's"], rows),
        )
    )


def own_exits(grade: ModelGrade) -> list[tuple[int, int, float]]:
    """Return (boundary, tokens that it knows, measured seconds) of each exit that the model has."""
    model, at = grade.model, {d.boundary: e for e, d in enumerate(grade.depths)}
    return [
        (boundary, known, grade.times.heads[at[boundary]])
        for boundary, known in zip(model.own_exits, model.own_vocabularies, strict=True)
    ]


def depth_section(grade: ModelGrade) -> str:
    from eejax.analysis.grades import exits_by_depth

    depths, oracle = grade.depths, grade.oracle
    figure = exits_by_depth(
        [d.boundary for d in depths],
        [d.agreement for d in depths],
        [d.loss for d in depths],
        grade.model.own_exits,
    )
    rows = [
        [
            f"{d.boundary}",
            "final" if d is depths[-1] else "logit lens" if d.added else "of the model",
            share(d.agreement),
            NONE if d.loss is None else f"{d.loss:.3f}",
        ]
        for d in depths
    ]
    return "\n".join(
        (
            picture(figure, "agreement and loss by depth"),
            table(["layers", "exit", "agreement", "nats per token"], rows),
            paragraph(
                f"The shallowest exit that says what the final exit says lies after "
                f"{oracle.depth:.2f} of {grade.model.layers} layers on average. A gate that always "
                f"knew would be at most {oracle.layers_speed:.2f} times as fast by layers alone, "
                f"and {oracle.speed:.2f} times with one head for a token and the rows that later "
                "tokens carry."
            ),
        )
    )


def point_cells(point: GatePoint) -> list[str]:
    exits = ", ".join(map(str, point.exits))
    return [exits, f"{point.threshold:.5g}", share(point.agreement), times(point.speed)]


def gate_section(grade: ModelGrade) -> str:
    from eejax.analysis.grades import gate_speeds
    from eejax.experiments.grade_verdict import TARGETS

    curves = {
        gate: ([p.speed for p in points], [p.agreement for p in points])
        for gate, points in grade.frontiers.items()
        if points
    }
    rows = []
    for gate, choices in grade.choices.items():
        by_target = {c.target: c.checked for c in choices}
        for target in TARGETS:
            found = by_target.get(target)
            cells = [NONE] * 4 if found is None else point_cells(found)
            rows.append([gate, f"{target:.0%}", *cells])
    return "\n".join(
        (
            paragraph(
                "A token pays for the layers below its exit, for every head that the gate reads on "
                "its way, for the engine's own work, and for the rows of earlier tokens that it "
                "carries deeper. "
                "Thresholds are chosen on one half of the text; the table shows them on the other "
                "half. A dash says that no threshold is faster than the full model."
            ),
            picture(gate_speeds(curves, TARGETS, grade.oracle.speed), "gates"),
            table(
                ["gate", "wanted", "exits after", "threshold", "agreement", "predicted speed"], rows
            ),
        )
    )


def draft_section(grade: ModelGrade) -> str:
    from eejax.analysis.grades import draft_speeds

    own = set(grade.model.own_exits)
    tuned = [d for d in grade.drafts if d.tuned]
    lens = [d for d in grade.drafts if not d.tuned]
    curves = {
        "logit lens, by measured times": ([d.boundary for d in lens], [d.timed for d in lens]),
        "logit lens, by weights": ([d.boundary for d in lens], [d.speed for d in lens]),
    }
    if tuned:
        curves |= {
            "exits of the model, by measured times": (
                [d.boundary for d in tuned],
                [d.timed for d in tuned],
            )
        }
    rows = [
        [
            f"{d.boundary}",
            "of the model" if d.tuned else "logit lens",
            share(d.acceptance),
            f"{d.drafts}",
            times(d.speed),
            times(d.timed),
            times(d.single),
        ]
        for d in grade.drafts
    ]
    compared = "Exits of the model stand beside the logit lens at the same depth. " if own else ""
    return "\n".join(
        (
            paragraph(
                "An exit drafts tokens, and one pass through the layers above verifies them: the "
                "text is that of the full model. The engine chooses the number of drafts from the "
                f"weights that are read. {compared}"
            ),
            picture(draft_speeds(curves), "drafts"),
            table(
                [
                    "layers",
                    "exit",
                    "acceptance",
                    "drafts",
                    "speed by weights",
                    "speed by times",
                    "with one draft",
                ],
                rows,
            ),
        )
    )


def measured_section(grade: ModelGrade) -> str:
    rows = [
        [
            WAYS[m.way],
            times(m.predicted),
            f"{times(m.speed)} ({m.low:.2f} to {m.high:.2f})",
            NONE if m.of_predicted is None else f"{m.of_predicted:.2f}",
            share(m.same_tokens),
            share(m.acceptance),
            f"{m.layers:.1f}",
        ]
        for m in grade.measured
    ]
    return "\n".join(
        (
            paragraph(
                f"Texts of held-out prompts were decoded in {grade.measured[0].pairs} pairs with "
                "the full model, in turns. Intervals are 95 % bootstraps over pairs. After its "
                "first other token a text goes on differently, so that fewer of its tokens are the "
                "same than the agreement says."
            ),
            table(
                [
                    "way",
                    "predicted",
                    "measured (95 %)",
                    "ratio",
                    "same tokens",
                    "accepted",
                    "layers per token",
                ],
                rows,
            ),
        )
    )


def guarantee_section(grade: ModelGrade) -> str:
    rows = [
        [g.gate, *([NONE] * 4 if g.point is None else point_cells(g.point))]
        for g in grade.guarantees
    ]
    first = grade.guarantees[0]
    none = "" if any(g.point for g in grade.guarantees) else " No threshold meets it on this text."
    return "\n".join(
        (
            paragraph(
                f"With a probability of {1 - first.epsilon:.0%}, at most {first.delta:.0%} of the "
                f"tokens of windows to come change at these thresholds (Learn-then-Test on "
                f"{first.units} windows).{none}"
            ),
            table(["gate", "exits after", "threshold", "agreement", "predicted speed"], rows),
        )
    )


def recipe_section(grade: ModelGrade) -> str:
    recipe = grade.recipe
    lines = [f"<pre>{html.escape(recipe.python)}</pre>"]
    if recipe.command is not None:
        lines.append(f"<pre>{html.escape(recipe.command)}</pre>")
    return "\n".join(lines)
