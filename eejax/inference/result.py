"""The result of a generation: tokens and, for each, its exit, confidence and executed layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from eejax.data.streams import CONTEXT_TOKENS, Decode, PieceStream, ending, text_behind
from eejax.inference.request import FinishReason
from eejax.inference.state import DecodeRecord
from eejax.models.config import ModelConfig

COLORS = (196, 208, 220, 118, 45, 63)  # xterm colors from the shallowest exit to deeper ones
DRAFT_COLOR = 78  # of a draft that was right, which the final exit emits
RESET = "\x1b[0m"


def paint(text: str, color: int | None) -> str:
    """Color text for a terminal; None leaves it plain."""
    return f"\x1b[38;5;{color}m{text}{RESET}" if text and color is not None else text


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """Tokens that were generated so far; arrays are [b, n], n the maximum tokens of any request.

    Attributes:
      tokens: ids, -1 beyond a request's own length.
      logprobs: natural log-probability of each token under the emitting exit, before sampling
        transforms.
      exits: number of the emitting exit, an index into the model's exits. The final exit is
        `n_exits`, one more than the last early one. -1 beyond `lengths`. The engine "full" has no
        early exits and emits all tokens from exit 0.
      confidences: confidence of the emitting exit.
      layers: layers that the device ran since the request's previous token, in steps that the batch
        shares. If a step emits several tokens, the first has its layers and the others 0. The
        engine "pipelined" has no steps: there it is the layers on the token's way until the next
        one can start.
      margins: see `DecodeRecord`; infinite for engines that do not measure it.
      drafted: 1 for a token that an exit drafted before it was decided, else 0.
      accepted: 1 where that draft was right, else 0.
      lengths: [b] tokens of each request.
      prompts: token ids of each request's prompt.
      finish: why each request ended, None while it runs.
      exit_boundaries: boundary of each exit, the final one last.
      n_layers: layers of the model.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    exits: np.ndarray
    confidences: np.ndarray
    layers: np.ndarray
    margins: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    lengths: np.ndarray
    prompts: tuple[tuple[int, ...], ...]
    finish: tuple[FinishReason | None, ...]
    exit_boundaries: tuple[int, ...]
    n_layers: int

    @property
    def n_exits(self) -> int:
        """Number of early exits of the model; also the number of the final exit."""
        return len(self.exit_boundaries) - 1

    @property
    def boundaries(self) -> np.ndarray:
        """Layers below the emitting exit, [b, n]; -1 beyond `lengths`.

        An early exit after all layers has the boundary of the final exit, and a number of its own.
        """
        return np.where(self.exits < 0, -1, np.asarray(self.exit_boundaries)[self.exits])

    @property
    def finished(self) -> np.ndarray:
        return np.array([bool(f) for f in self.finish])

    def ids(self, i: int) -> list[int]:
        """Return the token ids of request i."""
        return self.tokens[i, : self.lengths[i]].tolist()

    def summary(self) -> str:
        """Return a few lines: tokens by exit, mean confidence, executed layers, accepted drafts."""
        valid = self.exits >= 0
        total = int(valid.sum())
        lines = [f"{total} tokens, {self.layers[valid].mean():.2f} of {self.n_layers} layers each"]
        for e, boundary in enumerate(self.exit_boundaries):
            here = self.exits == e
            n = int(here.sum())
            confidence = f"{self.confidences[here].mean():.3f}" if n else "  -  "
            name = "final" if e == self.n_exits else "exit "
            share = n / max(total, 1)
            lines.append(
                f"  {name} {boundary:2d}  {n:6d} tokens {share:6.1%}  confidence {confidence}"
            )
        if drafted := int(self.drafted.sum()):
            accepted = int(self.accepted.sum())
            lines.append(f"  {accepted} of {drafted} drafts accepted ({accepted / drafted:.1%})")
        return "\n".join(lines)

    def color(self, i: int, j: int) -> int | None:
        """Return the xterm color of request i's token j, by its exit or as a draft that was right.

        None is plain: a token of the final exit that no draft had.
        """
        exit_ = self.exits[i, j]
        if 0 <= exit_ < self.n_exits:
            return self._exit_color(exit_)
        return DRAFT_COLOR if self.accepted[i, j] else None

    def _exit_color(self, exit_: int) -> int:
        return COLORS[exit_ * len(COLORS) // self.n_exits]

    def legend(self, colors: bool = True) -> str:
        """Return one line that shows each exit's color and its tokens.

        For example "exit 3: 12, exit 8: 4, final 12: 9", or with drafts "final 12: 9, of which 4
        were drafted". Without `colors` it is plain text.
        """
        last = self.n_exits
        parts = [
            (f"exit {boundary}: {int((self.exits == e).sum())}", self._exit_color(e))
            for e, boundary in enumerate(self.exit_boundaries[:-1])
            # Not an exit that only drafts, nor one without layers that no token left by.
            if (self.exits == e).any() or (boundary and not self.drafted.any())
        ]
        shown = [paint(text, color) if colors else text for text, color in parts]
        shown.append(f"final {self.exit_boundaries[-1]}: {int((self.exits == last).sum())}")
        if self.drafted.any():
            right = f"of which {int((self.accepted & (self.exits == last)).sum())} were drafted"
            shown.append(paint(right, DRAFT_COLOR) if colors else right)
        return ", ".join(shown)

    def text(self, i: int, decode_text: Decode) -> str:
        """Return request i's text as it continues its prompt.

        Decoders drop a space that begins a text; after a prompt that space is kept.
        """
        return text_behind(decode_text, self.prompts[i], self.ids(i))

    def pieces(self, i: int, decode_text: Decode) -> Iterator[tuple[str, int]]:
        """Yield request i's text in parts, each with the index of the token that completes it.

        A character made of several tokens is one part, with the index of the last of them.
        """
        stream, ids = PieceStream(decode_text, self.prompts[i]), self.ids(i)
        for j, token in enumerate(ids):
            piece = stream.push(token)
            piece += stream.flush() if j + 1 == len(ids) else ""
            if piece:
                yield piece, j

    def colored(self, i: int, decode_text: Decode) -> str:
        """Return request i's text for a terminal, each token in its `color`."""
        return "".join(paint(piece, self.color(i, j)) for piece, j in self.pieces(i, decode_text))


class Collector:
    """Collector of an engine's records into growing `GenerationResult`s.

    It reads each token once. Results share one buffer, in which tokens of earlier results are never
    overwritten.
    """

    def __init__(
        self,
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        max_new: np.ndarray,
        limits: Sequence[FinishReason],
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        decode_text: Decode | None = None,
    ):
        """Start collecting.

        Args:
          prompts: token ids of each request's prompt.
          max_new: [b] tokens that a request may get.
          limits: [b] reason for the end of a request with `max_new` tokens: LENGTH or CONTEXT.
        """
        self._config = config
        self._prompts = tuple(tuple(int(i) for i in prompt) for prompt in prompts)
        self._max_new, self._limits = max_new, limits
        self._stop_token_ids, self._stop_strings = frozenset(stop_token_ids), tuple(stop_strings)
        self._decode = decode_text if stop_strings else None
        self._contexts = [
            [] if self._decode is None else ending(self._decode, prompt)[0]
            for prompt in self._prompts
        ]
        b, n = len(max_new), int(max_new.max())
        self._all = DecodeRecord(
            token=np.full((b, n), -1, np.int32),
            logprob=np.zeros((b, n), np.float32),
            confidence=np.zeros((b, n), np.float32),
            exit=np.full((b, n), -1, np.int32),
            layers=np.zeros((b, n), np.int32),
            margin=np.full((b, n), np.inf, np.float32),
            drafted=np.zeros((b, n), np.int32),
            accepted=np.zeros((b, n), np.int32),
        )
        self._ids: list[list[int]] = [[] for _ in range(b)]
        self._finish: list[FinishReason | None] = [None] * b

    def add(self, record: DecodeRecord) -> GenerationResult:
        """Add a record [n, b] and return all tokens so far.

        Where the exit is -1, a step emitted nothing for the request. A request ends with its first
        stop token, or with the token that completes a stop string. Raises as `Decoder.stream`.
        """
        new = jax.tree.map(lambda a: np.asarray(a).T, record)
        for i, ids in enumerate(self._ids):
            if self._finish[i]:
                continue
            before = len(ids)
            steps = np.flatnonzero(new.exit[i] >= 0)[: self._all.exit.shape[1] - before]
            bad = np.flatnonzero(~np.isfinite(new.logprob[i, steps]))
            if len(bad):
                boundary = self._config.exit_boundaries[new.exit[i, steps[bad[0]]]]
                raise FloatingPointError(
                    f"logits of request {i} are not finite at new token {before + bad[0]}, exit"
                    f" {boundary}: check the checkpoint's parameters"
                )
            ids += new.token[i, steps].tolist()
            end = self._end(i, before)
            if end is not None:
                del ids[end:]
                self._finish[i] = FinishReason.STOP
            elif len(ids) >= self._max_new[i]:
                self._finish[i] = self._limits[i]
            for whole, part in zip(*map(jax.tree.leaves, (self._all, new)), strict=True):
                whole[i, before : len(ids)] = part[i, steps[: len(ids) - before]]
        lengths = np.array([len(ids) for ids in self._ids])
        width = int(lengths.max())
        shown = jax.tree.map(lambda a: a[:, :width], self._all)
        for a in jax.tree.leaves(shown):
            a.flags.writeable = False
        return GenerationResult(
            tokens=shown.token,
            logprobs=shown.logprob,
            exits=shown.exit,
            confidences=shown.confidence,
            layers=shown.layers,
            margins=shown.margin,
            drafted=shown.drafted,
            accepted=shown.accepted,
            lengths=lengths,
            prompts=self._prompts,
            finish=tuple(self._finish),
            exit_boundaries=self._config.exit_boundaries,
            n_layers=self._config.n_layers,
        )

    def _end(self, i: int, before: int) -> int | None:
        """Return the length up to the first token beyond `before` that ends request i, or None."""
        ids = self._ids[i]
        ends = [j + 1 for j in range(before, len(ids)) if ids[j] in self._stop_token_ids][:1]
        if self._decode is not None:
            context = self._contexts[i]
            ends += string_end(ids, before, self._stop_strings, self._decode, context)
        return min(ends, default=None)


def string_end(
    ids: list[int],
    before: int,
    strings: Sequence[str],
    decode_text: Decode,
    context: Sequence[int] = (),
) -> list[int]:
    """Return [length of the shortest prefix of `ids` whose text contains a stop string], or [].

    The first `before` ids are known to contain none; only as many of them are decoded as a stop
    string could reach back into. `context` has the ids before `ids`.
    """

    def text(begin: int, end: int) -> str:
        return text_behind(decode_text, [*context, *ids[:begin]][-CONTEXT_TOKENS:], ids[begin:end])

    def found(begin, end):
        return any(s in text(begin, end) for s in strings)

    # A few characters more: decoding from the middle of a text may change the first ones.
    reach = max(map(len, strings)) + 8
    back = reach
    while back < before and len(text(before - back, before)) < reach:
        back *= 2
    if len(ids) == before or not found(max(0, before - back), len(ids)):
        return []
    if not found(0, len(ids)):
        return []
    low, high = before + 1, len(ids)
    while low < high:
        mid = (low + high) // 2
        low, high = (low, mid) if found(0, mid) else (mid + 1, high)
    return [low]
