"""Texts whose tokens left by different exits, for terminals and as a page of HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from matplotlib.colors import to_hex, to_rgb

from eejax.analysis.plots import exit_colors

Text = Sequence[tuple[str, int]]


def visible(text: str) -> str:
    """Return the text in one line, with unprintable characters escaped and spaces visible."""
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)


def marked(text: Text, boundaries: Sequence[int]) -> str:
    """Return a text in one line that marks each change of exit: '⟨3⟩impo⟨12⟩rt'.

    boundaries: boundary of each exit, the final one last.
    """
    parts, last = [], None
    for piece, exit_ in text:
        parts += [f"⟨{boundaries[exit_]}⟩"] * (exit_ != last) + [visible(piece)]
        last = exit_
    return "".join(parts)


def exit_text(prompt: str, texts: Mapping[str, Text], boundaries: Sequence[int]) -> str:
    """Return HTML of a prompt and, below it, its texts by name, tokens in their exits' colors."""
    rows = [f"<pre class=prompt>{html.escape(prompt)}</pre>"]
    for name, text in texts.items():
        spans = "".join(_token(piece, exit_, boundaries) for piece, exit_ in text)
        rows.append(f"<h3>{html.escape(name)}</h3><pre>{spans}</pre>")
    return "\n".join(rows)


def predictions(
    prompt: str,
    pieces: Sequence[str],
    predicted: Sequence[Sequence[tuple[str, float]]],
    same: Sequence[Sequence[bool]],
    boundaries: Sequence[int],
) -> str:
    """Return HTML of a text's tokens, one in a row, with each exit's (token, confidence).

    `predicted` and `same` are `[exits][tokens]`; predictions that differ from the final exit's are
    marked.
    """
    header = "".join(f"<th>after {stop}</th>" for stop in boundaries)
    rows = [f"<pre class=prompt>{html.escape(prompt)}</pre>", f"<table><tr><th>token</th>{header}"]
    for i, piece in enumerate(pieces):
        cells = "".join(
            f"<td{'' if agrees[i] else ' class=other'}>{html.escape(visible(exit_[i][0]))} "
            f"<small>{exit_[i][1]:.3f}</small></td>"
            for exit_, agrees in zip(predicted, same, strict=True)
        )
        rows.append(f"<tr><td>{html.escape(visible(piece))}</td>{cells}")
    return "\n".join([*rows, "</table>"])


def page(title: str, parts: Sequence[tuple[str, str]], boundaries: Sequence[int]) -> str:
    """Return a whole page of (heading, HTML), with a legend of the exits' colors."""
    legend = " ".join(
        _token(
            "the final exit" if e == len(boundaries) - 1 else f"exit after {stop}", e, boundaries
        )
        for e, stop in enumerate(boundaries)
    )
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{part}" for heading, part in parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; }}
pre {{ white-space: pre-wrap; }} .prompt {{ color: gray; }} h3 {{ font-size: 1em; }}
td, th {{ padding: 0 1em 0 0; text-align: left; font-family: monospace; }}
.other {{ background: #f6d5d8; }} small {{ color: gray; }}
</style></head><body><h1>{html.escape(title)}</h1><p>{legend}</p>
{body}
</body></html>
"""


def _token(piece: str, exit_: int, boundaries: Sequence[int]) -> str:
    """Return a piece in the color of its exit; the final exit has none."""
    text = html.escape(piece)
    if exit_ == len(boundaries) - 1:
        return f"<span>{text}</span>"
    color = exit_colors(len(boundaries))[exit_]
    red, green, blue = to_rgb(color)
    ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
    return f'<span style="background:{to_hex(color)};color:{ink}">{text}</span>'
