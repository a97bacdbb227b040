"""Traces of models' predictions for prompts, exit by exit, for simulations of serving.

A trace is teacher-forced: each model generates every prompt's text greedily with all of its layers,
and the predictions of its exits are read in one pass over that text. The text is therefore the same
whichever exit a token leaves by; in serving, a token that differs from the full model's changes the
text after it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from eejax.common.errors import DataError, require, require_count

VERSION = 1


@dataclasses.dataclass(frozen=True)
class ModelTrace:
    """One model on p prompts, of each n tokens, at every exit e, the final one last.

    Attributes:
      exit_boundaries: [e] layers below each exit.
      thresholds: [e - 1], by which tokens leave; 1 where none may.
      prefill_exit: the first token, which the prompt's pass makes, may leave early.
      prompts: [p] tokens of each prompt.
      tokens: [p, n, e] the token that an exit would emit.
      confidences: [p, n, e] its confidence; no rule reads that of the final exit.
    """

    exit_boundaries: tuple[int, ...]
    thresholds: tuple[float, ...]
    prefill_exit: bool
    prompts: np.ndarray
    tokens: np.ndarray
    confidences: np.ndarray

    def __post_init__(self):
        e, p = len(self.exit_boundaries), len(self.prompts)
        allowed = f"must be [{p} prompts, tokens, {e} exits]"
        for name in ("tokens", "confidences"):
            shape = getattr(self, name).shape
            ok = len(shape) == 3 and shape[::2] == (p, e) and shape[1] > 0
            require(ok and shape == self.tokens.shape, name, shape, allowed)
        require(p > 0, "prompts", self.prompts, "must be of one prompt at least")
        require(bool(np.all(self.prompts > 0)), "prompts", self.prompts, "must have tokens")
        whole = all(isinstance(stop, int) and stop >= 0 for stop in self.exit_boundaries)
        ok = whole and list(self.exit_boundaries) == sorted(self.exit_boundaries)
        require(
            ok,
            "exit_boundaries",
            self.exit_boundaries,
            "must be numbers of layers that do not descend",
        )
        require(self.prompts.ndim == 1, "prompts", self.prompts.shape, "must be one number each")
        low, high = float(np.min(self.confidences)), float(np.max(self.confidences))
        # NaN fails both comparisons.
        ok = low >= 0 and high <= 1 + 1e-5
        require(ok, "confidences", f"{low:g}..{high:g}", "must lie in [0, 1]")
        self._thresholds(self.thresholds)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def new(self) -> int:
        """Tokens of a prompt's text."""
        return self.tokens.shape[1]

    @property
    def exits(self) -> int:
        return len(self.exit_boundaries)

    @property
    def same(self) -> np.ndarray:
        """[p, n, e] whether an exit's token is the final exit's."""
        return self.tokens == self.tokens[..., -1:]

    def _thresholds(self, value: float | Sequence[float] | None) -> np.ndarray:
        """Return thresholds [e - 1]; by default those recorded."""
        value = self.thresholds if value is None else value
        allowed = f"must be one number in [0, 1], or {self.exits - 1}: one for each early exit"
        a = np.asarray(value, np.float64)
        ok = a.shape in ((), (self.exits - 1,)) and bool(np.all((a >= 0) & (a <= 1)))
        require(ok, "thresholds", value, allowed)
        return np.broadcast_to(a, (self.exits - 1,))

    def leaves(
        self, threshold: float | Sequence[float] | None = None, depth: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (exit, below) [p, n] with the first `depth` exits loaded (default: all).

        `exit` is the exit that each token leaves by, `below` whether it was below that exit's
        threshold, for want of the next one. By the engines' rule it is the earliest exit whose
        confidence reaches its threshold, where a threshold of 1 never fires, else the last that is
        loaded. The first token leaves by the last, unless `prefill_exit`.

        threshold: one, or one for each early exit; by default those recorded.
        """
        limits, depth = self._thresholds(threshold), self.exits if depth is None else depth
        require(1 <= depth <= self.exits, "depth", depth, f"must be in 1..{self.exits}")
        sure = (self.confidences[..., :-1] >= limits) & (limits < 1)
        asked = np.concatenate([sure, np.ones((*sure.shape[:2], 1), bool)], -1)
        if not self.prefill_exit:
            asked[:, 0, : depth - 1] = False
        first = asked.argmax(-1)
        return np.minimum(first, depth - 1), first >= depth

    def part(self, which: slice | np.ndarray) -> ModelTrace:
        """Return the trace of some of the prompts."""
        own = {name: getattr(self, name)[which] for name in ("prompts", "tokens", "confidences")}
        return dataclasses.replace(self, **own)


@dataclasses.dataclass(frozen=True)
class PromptTrace:
    """Several models on the same prompts, in order of arrival. kinds [p]: task of each prompt."""

    models: Mapping[str, ModelTrace]
    kinds: tuple[str, ...]

    def __post_init__(self):
        require(bool(self.models), "models", self.models, "must be at least one")
        shapes = {name: (len(m), m.new) for name, m in self.models.items()}
        same = len(set(shapes.values())) == 1
        require(same, "models", shapes, "must have as many prompts and tokens, all of them")
        p = len(self)
        require(len(self.kinds) == p, "kinds", len(self.kinds), f"must be one for each of {p}")

    def __len__(self) -> int:
        return len(next(iter(self.models.values())))

    @property
    def new(self) -> int:
        return next(iter(self.models.values())).new

    def part(self, begin: int, end: int) -> PromptTrace:
        """Return the prompts begin..end - 1."""
        models = {name: m.part(slice(begin, end)) for name, m in self.models.items()}
        return PromptTrace(models, self.kinds[begin:end])

    def ordered(self, order: Sequence[int]) -> PromptTrace:
        """Return the same prompts in another order: number order[i] comes as the i-th."""
        which = np.asarray(order)
        models = {name: m.part(which) for name, m in self.models.items()}
        return PromptTrace(models, tuple(self.kinds[i] for i in which))

    def save(self, path: str | os.PathLike) -> None:
        """Write an npz file, replaced at once."""
        path = pathlib.Path(path)
        about = {"version": VERSION, "kinds": list(self.kinds), "models": {}}
        arrays = {}
        for i, (name, m) in enumerate(self.models.items()):
            about["models"][name] = {
                "stops": list(m.exit_boundaries),
                "thresholds": list(m.thresholds),
                "prefill_exit": m.prefill_exit,
            }
            arrays |= {f"{field}_{i}": getattr(m, field) for field in _ARRAYS}
        held = io.BytesIO()
        np.savez_compressed(held, about=np.array(json.dumps(about)), **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(held.getvalue())
        os.replace(part, path)


_ARRAYS = {"prompts": "iu", "tokens": "iu", "confidences": "f"}


def load(path: str | os.PathLike) -> PromptTrace:
    """Read what `PromptTrace.save` wrote. Raises DataError, which names the file and its fault."""
    try:
        # Opened here: numpy leaves what is no npz open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = dict(found)
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        why = f"cannot be read as a trace ({error})"
        # Of what is no npz numpy says how to read it all the same, which would make it no trace.
        if not isinstance(error, OSError) and not zipfile.is_zipfile(path):
            why = "is not a trace"
        raise DataError(f"{path}: {why}. Record it again.") from error
    try:
        about = json.loads(str(arrays["about"]))
        if about["version"] != VERSION:
            raise DataError(
                f"{path}: version = {about['version']!r}: must be {VERSION}. Record it again."
            )
        models = {}
        for i, (name, own) in enumerate(about["models"].items()):
            for field, kinds in _ARRAYS.items():
                kind = arrays[f"{field}_{i}"].dtype.kind
                require(kind in kinds, f"{name}.{field}", kind, f"must be of dtype kind {kinds}")
            models[name] = ModelTrace(
                tuple(own["stops"]),
                tuple(own["thresholds"]),
                bool(own["prefill_exit"]),
                **{field: arrays[f"{field}_{i}"] for field in _ARRAYS},
            )
        return PromptTrace(models, tuple(about["kinds"]))
    except KeyError as error:
        raise DataError(f"{path}: has no {error}. Record it again.") from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: {error} Record it again.") from error


def record(member, prompts: Sequence[Sequence[int]], new: int, *, slots: int = 16) -> ModelTrace:
    """Record `new` tokens of every prompt by a `FleetMember` and its rules; no token ends a text.

    Prompts are decoded `slots` at a time by the engine "full", and scored as many at a time. Raises
    as `read`, and ConfigError for a prompt that leaves no room.
    """
    require_count("new", new)
    _policy(member)  # what is wrong with it is said before the work is done
    return read(member, prompts, write(member, prompts, new, slots), slots=slots)


def read(
    member, prompts: Sequence[Sequence[int]], texts: np.ndarray, *, slots: int = 16
) -> ModelTrace:
    """Return what a member's exits predict for texts [p, new] behind prompts.

    Confidences are those of the member's gate. Raises ConfigError for a gate that has none of its
    own (patience and fixed), and for thresholds that fall while a text grows.
    """
    import jax  # late: whoever reads traces does without

    from eejax import calibration
    from eejax.common.lengths import padded_lengths

    policy, config, new = _policy(member), member.config, texts.shape[1]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    whole = [[*prompts[i], *texts[i]] for i in order]
    widths = padded_lengths(config.context_length)
    weights = jax.device_put(member.params)
    scores = calibration.score(weights, config, _batches(whole, new, slots, widths))
    # Units are numbers in `order`, whose positions come in the order of their text.
    back = np.argsort(order)

    def shaped(a):
        return a.reshape(-1, len(prompts), new)[:, back].transpose(1, 2, 0)

    gate = scores.confidences[member.rules.get("gate", "max_probability")]
    limits = np.where(policy.active, policy.thresholds, 1.0)[0]
    return ModelTrace(
        tuple(config.exit_boundaries),
        tuple(map(float, limits)),
        bool(policy.prefill_exit[0]),
        np.array([len(p) for p in prompts], np.int32),
        shaped(scores.tokens).astype(np.int32),
        shaped(gate).astype(np.float32),
    )


def _policy(member):
    """Return the `ExitPolicy` of a member's rules, where they can be recorded."""
    from eejax.inference.policy import ExitPolicy

    rules = member.rules
    require(rules.get("decay") is None, "decay", rules.get("decay"), "must be None to be recorded")
    gate = rules.get("gate", "max_probability")
    none = ("patience", "fixed")
    require(gate not in none, "gate", gate, "must have a confidence of its own to be recorded")
    return ExitPolicy.make(member.config, 1, **rules)


def write(member, prompts: Sequence[Sequence[int]], new: int, slots: int) -> np.ndarray:
    """Return ids [p, new] that the full model writes greedily."""
    import jax

    from eejax.inference.engine import EarlyExitEngine
    from eejax.inference.request import EngineRequest, FinishReason, check_prompts
    from eejax.inference.scheduler import Scheduler

    check_prompts(prompts, member.config, member.config.context_length - new + 1)
    weights = jax.device_put(member.params)  # that of a fleet are on the host
    engine = EarlyExitEngine.make(weights, member.config, "full", slots=slots)
    scheduler = Scheduler(engine)
    texts: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        scheduler.add_request(EngineRequest(str(i), prompt, new))
    for output in scheduler.run():
        texts[int(output.request_id)] += [token.id for token in output.tokens]
        if output.finish == FinishReason.ERROR:
            raise FloatingPointError("logits are not finite: check the model's parameters.")
    return np.array(texts, np.int32)


def _batches(
    texts: Sequence[Sequence[int]], new: int, size: int, widths: Sequence[int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield texts in ascending length, of which the last `new` tokens count.

    Each batch is padded to one of few `widths`, for each of which a program is compiled.
    """
    for begin in range(0, len(texts), size):
        part = texts[begin : begin + size]
        width = next(n for n in widths if n >= len(part[-1]) - 1)
        tokens = np.zeros((size, width), np.int32)
        labels = np.full((size, width), -1, np.int32)
        for i, ids in enumerate(part):
            tokens[i, : len(ids) - 1] = ids[:-1]
            labels[i, len(ids) - 1 - new : len(ids) - 1] = ids[-new:]
        yield {"tokens": tokens, "labels": labels, "units": begin + np.arange(size)}
