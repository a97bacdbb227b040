"""What a generation returns: tokens and, per token, exit, confidence and layers executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from eejax.data.streams import SEEN, Decode, PieceStream, ending, text_behind
from eejax.inference.state import Record
from eejax.models.config import ModelConfig

COLORS = (196, 208, 220, 118, 45, 63)  # xterm colors from the shallowest exit to deeper ones
RESET = "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Result:
    """Arrays are [b, n], n the most tokens any request has so far.

    tokens: ids, -1 beyond a request's own `lengths`.
    logprobs: natural log-probability of each token under the emitting exit, before sampling
        transforms.
    exits: number of the emitting exit, an index into the model's exits; `n_exits`, one more
        than the last of them, is the final exit. -1 beyond `lengths`. The engine "full" has no
        early exits, and so emits all tokens from exit 0.
    confidences: the emitting exit's.
    layers: layers executed in the step that emitted the token; a step is shared by the batch. Of
        several tokens of a step the first has them and the others 0. The engine "pipelined" has
        no steps: those on the token's way until the next one can start.
    margins: see `Record`; infinite for engines that do not measure it.
    drafted: tokens drafted in the step that emitted the token, on the step's first token; else 0.
    accepted: 1 for tokens that were drafted, else 0.
    prompts: token ids of each request's prompt, behind which its text goes on.
    finish: per request "stop" (token or string), "length", "context", or "" while running.
    stops: boundary of each exit, the final one last.
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
    finish: tuple[str, ...]
    stops: tuple[int, ...]
    n_layers: int

    @property
    def n_exits(self) -> int:
        """Early exits of the model that was run; also the final exit's number."""
        return len(self.stops) - 1

    @property
    def boundaries(self) -> np.ndarray:
        """[b, n] layers below the emitting exit, -1 beyond `lengths`.

        An early exit after all layers has the final exit's boundary and a number of its own.
        """
        return np.where(self.exits < 0, -1, np.asarray(self.stops)[self.exits])

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[b] tokens of each prompt."""
        return np.array([len(prompt) for prompt in self.prompts])

    @property
    def finished(self) -> np.ndarray:
        return np.array([bool(f) for f in self.finish])

    def ids(self, i: int) -> list[int]:
        """Token ids of request i."""
        return self.tokens[i, : self.lengths[i]].tolist()

    def summary(self) -> str:
        """A few lines: tokens by exit, mean confidence, layers executed, drafts accepted."""
        valid = self.exits >= 0
        total = int(valid.sum())
        lines = [f"{total} tokens, {self.layers[valid].mean():.2f} of {self.n_layers} layers each"]
        for e, stop in enumerate(self.stops):
            here = self.exits == e
            n = int(here.sum())
            confidence = f"{self.confidences[here].mean():.3f}" if n else "  -  "
            name = "final" if e == self.n_exits else "exit "
            share = n / max(total, 1)
            lines.append(f"  {name} {stop:2d}  {n:6d} tokens {share:6.1%}  confidence {confidence}")
        if drafted := int(self.drafted.sum()):
            accepted = int(self.accepted.sum())
            lines.append(f"  {accepted} of {drafted} drafts accepted ({accepted / drafted:.1%})")
        return "\n".join(lines)

    def paint(self, text: str, exit_: int) -> str:
        """`text` in the terminal color of exit number `exit_`; the final exit's is plain."""
        if not 0 <= exit_ < self.n_exits or not text:
            return text
        color = COLORS[exit_ * len(COLORS) // self.n_exits]
        return f"\x1b[38;5;{color}m{text}{RESET}"

    def legend(self, colors: bool = True) -> str:
        """One line that says which color is which: every exit in its own, with its tokens.

        Such as "exit 3: 12, exit 8: 4, final 12: 9"; without `colors` it is plain.
        """
        names = [f"exit {stop}" for stop in self.stops[:-1]] + [f"final {self.stops[-1]}"]
        counted = [f"{name}: {int((self.exits == e).sum())}" for e, name in enumerate(names)]
        return ", ".join(self.paint(c, e) if colors else c for e, c in enumerate(counted))

    def text(self, i: int, decode_text: Decode) -> str:
        """Request i's text as it goes on behind its prompt: decoders drop the space that begins a
        text, which is none where there is text before it."""
        return text_behind(decode_text, self.prompts[i], self.ids(i))

    def pieces(self, i: int, decode_text: Decode) -> Iterator[tuple[str, int]]:
        """Request i's text in parts, each with the number of the token that completes it.

        A character that several tokens make up is a part of its own, with the last of them.
        """
        stream, ids = PieceStream(decode_text, self.prompts[i]), self.ids(i)
        for j, token in enumerate(ids):
            piece = stream.push(token)
            piece += stream.flush() if j + 1 == len(ids) else ""
            if piece:
                yield piece, j

    def colored(self, i: int, decode_text: Decode) -> str:
        """Request i's text for a terminal, each token in its exit's color, the final exit plain."""
        parts = self.pieces(i, decode_text)
        return "".join(self.paint(piece, self.exits[i, j]) for piece, j in parts)


class Collector:
    """Gathers an engine's records into growing `Result`s, looking at each token once.

    Results share one buffer: what an earlier one shows is never written again.
    """

    def __init__(
        self,
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        max_new: np.ndarray,
        limits: Sequence[str],
        stop_tokens: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        decode_text: Decode | None = None,
    ):
        """prompts [b]: token ids; max_new [b]: tokens a request may get; limits [b]: what ends it
        when it has them."""
        self._config = config
        self._prompts = tuple(tuple(int(i) for i in prompt) for prompt in prompts)
        self._max_new, self._limits = max_new, limits
        self._stop_tokens, self._stop_strings = frozenset(stop_tokens), tuple(stop_strings)
        self._decode = decode_text
        seen = (lambda p: ending(decode_text, p)[0]) if stop_strings else lambda p: []
        self._contexts = [seen(prompt) for prompt in self._prompts]
        b, n = len(max_new), int(max_new.max())
        self._all = Record(
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
        self._finish = [""] * b

    def add(self, record: Record) -> Result:
        """All tokens so far, with those of a record [n, b]; raises as `Generator.stream`.

        Where the exit is -1, a step has emitted nothing for a request. A request ends with its
        first stop token, or the token that completes a stop string.
        """
        new = jax.tree.map(lambda a: np.asarray(a).T, record)
        for i, ids in enumerate(self._ids):
            if self._finish[i]:
                continue
            before = len(ids)
            steps = np.flatnonzero(new.exit[i] >= 0)[: self._all.exit.shape[1] - before]
            bad = np.flatnonzero(~np.isfinite(new.logprob[i, steps]))
            if len(bad):
                stop = self._config.stops[new.exit[i, steps[bad[0]]]]
                raise FloatingPointError(
                    f"logits of request {i} are not finite at new token {before + bad[0]}, exit"
                    f" {stop}: check the checkpoint's parameters"
                )
            ids += new.token[i, steps].tolist()
            end = self._end(i, before)
            if end is not None:
                del ids[end:]
                self._finish[i] = "stop"
            elif len(ids) >= self._max_new[i]:
                self._finish[i] = str(self._limits[i])
            for whole, part in zip(*map(jax.tree.leaves, (self._all, new)), strict=True):
                whole[i, before : len(ids)] = part[i, steps[: len(ids) - before]]
        lengths = np.array([len(ids) for ids in self._ids])
        width = int(lengths.max())
        shown = jax.tree.map(lambda a: a[:, :width], self._all)
        for a in jax.tree.leaves(shown):
            a.flags.writeable = False
        return Result(
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
            stops=self._config.stops,
            n_layers=self._config.n_layers,
        )

    def _end(self, i: int, before: int) -> int | None:
        """Tokens up to and with the first beyond `before` that ends request i, or None."""
        ids = self._ids[i]
        ends = [j + 1 for j in range(before, len(ids)) if ids[j] in self._stop_tokens][:1]
        if self._stop_strings:
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
    """[length of the shortest prefix of `ids` whose text behind `context` holds one of `strings`],
    or [].

    The first `before` ids are known to hold none, and of them only as many are decoded as a
    string could reach back into.
    """

    def text(begin: int, end: int) -> str:
        return text_behind(decode_text, [*context, *ids[:begin]][-SEEN:], ids[begin:end])

    found = lambda begin, end: any(s in text(begin, end) for s in strings)
    # A few more characters: a text cut out of another may begin with other ones.
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
