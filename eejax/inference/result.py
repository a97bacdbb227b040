"""What a generation returns: tokens and, per token, exit, confidence and layers executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from eejax.inference.state import Record
from eejax.models.config import ModelConfig

COLORS = (196, 208, 220, 118, 45, 63)  # xterm colors from the shallowest exit to deeper ones
RESET = "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Result:
    """Arrays are [b, n], n the most tokens any request has so far.

    tokens: ids, -1 beyond a request's own `lengths`.
    logprobs: natural log-probability of each token under the emitting exit, before sampling
        transforms. exits: boundary (layers) of the emitting exit. confidences: its gate's.
    layers: layers executed in the step that emitted the token; a step is shared by the batch.
    margins: see `Record`; infinite for engines that do not measure it.
    finish: per request "stop" (token or string), "length", "context", or "" while running.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    exits: np.ndarray
    confidences: np.ndarray
    layers: np.ndarray
    margins: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    finish: tuple[str, ...]
    stops: tuple[int, ...]
    n_layers: int

    @property
    def finished(self) -> np.ndarray:
        return np.array([bool(f) for f in self.finish])

    def ids(self, i: int) -> list[int]:
        """Token ids of request i."""
        return self.tokens[i, : self.lengths[i]].tolist()

    @classmethod
    def collect(
        cls,
        records: Sequence[Record],
        prompt_lengths: np.ndarray,
        config: ModelConfig,
        stop_tokens: Sequence[int],
        stop_strings: Sequence[str],
        decode_text: Callable[[Sequence[int]], str] | None,
        limits: Sequence[str],
    ) -> Result:
        """Joins records [n, b]; cuts each request at its first stop token or string.

        `limits` [b] names what ended a request that just ran out of tokens. Raises
        FloatingPointError where a log-probability is not finite.
        """
        r = Record(*(np.concatenate(a).T for a in zip(*records, strict=True)))  # [b, n]
        bad = np.argwhere((r.exit >= 0) & ~np.isfinite(r.logprob))
        if len(bad):
            row, at = bad[0]
            raise FloatingPointError(
                f"logits of request {row} are not finite at new token {at}, exit"
                f" {config.stops[r.exit[row, at]]}: check the checkpoint's parameters"
            )
        lengths = (r.exit >= 0).sum(1)
        asked = sum(len(a.exit) for a in records)
        finish = []
        for i, n in enumerate(lengths):
            ids = r.token[i, :n].tolist()
            cut = _cut(ids, stop_tokens, stop_strings, decode_text)
            lengths[i] = n if cut is None else cut
            finish.append("stop" if cut is not None else str(limits[i]) if n < asked else "")
        width = int(lengths.max())
        inside = np.arange(width)[None] < lengths[:, None]
        take = lambda a, empty: np.where(inside, a[:, :width], empty)
        return cls(
            tokens=take(r.token, -1),
            logprobs=take(r.logprob, 0.0),
            exits=take(np.asarray(config.stops)[r.exit], -1),
            confidences=take(r.confidence, 0.0),
            layers=take(r.layers, 0),
            margins=take(r.margin, np.inf),
            lengths=lengths,
            prompt_lengths=prompt_lengths,
            finish=tuple(finish),
            stops=config.stops,
            n_layers=config.n_layers,
        )

    def summary(self) -> str:
        """A few lines: tokens by exit, mean confidence, layers executed."""
        valid = self.exits >= 0
        total = int(valid.sum())
        lines = [f"{total} tokens, {self.layers[valid].mean():.2f} of {self.n_layers} layers each"]
        for stop in dict.fromkeys(self.stops):
            here = valid & (self.exits == stop)
            n = int(here.sum())
            confidence = f"{self.confidences[here].mean():.3f}" if n else "  -  "
            lines.append(
                f"  exit {stop:3d}  {n:6d} tokens {n / max(total, 1):6.1%}  confidence {confidence}"
            )
        return "\n".join(lines)

    def paint(self, text: str, boundary: int) -> str:
        """`text` in the terminal color of the exit at `boundary`; the final exit's is plain."""
        early = list(dict.fromkeys(self.stops))[:-1]
        if boundary not in early or not text:
            return text
        color = COLORS[early.index(boundary) * len(COLORS) // len(early)]
        return f"\x1b[38;5;{color}m{text}{RESET}"

    def colored(self, i: int, decode_text: Callable[[Sequence[int]], str]) -> str:
        """Request i's text for a terminal, each token in its exit's color, the final exit plain."""
        pieces, ids, shown = [], self.ids(i), ""
        for j in range(len(ids)):
            text = decode_text(ids[: j + 1])
            if text.endswith("\ufffd") and j + 1 < len(ids):
                continue  # in the middle of a character
            piece, shown = text[len(shown) :], text
            pieces.append(self.paint(piece, self.exits[i, j]))
        return "".join(pieces)


def _cut(ids, stop_tokens, stop_strings, decode_text) -> int | None:
    """Number of tokens up to and with the first that ends the request, None if none does."""
    ends = [ids.index(t) + 1 for t in stop_tokens if t in ids]
    if stop_strings:
        found = lambda n: any(s in decode_text(ids[:n]) for s in stop_strings)
        if found(len(ids)):
            low, high = 1, len(ids)  # the shortest prefix whose text holds a stop string
            while low < high:
                mid = (low + high) // 2
                low, high = (low, mid) if found(mid) else (mid + 1, high)
            ends.append(low)
    return min(ends, default=None)
