"""Complete many prompts with a trained model, a batch at a time: every token exits by itself.

    eejax generate-batch --workdir=runs/quickstart --input=prompts.txt \\
        --output=texts.jsonl --threshold=0.5

Every line of --input ("-": standard input) is a prompt, as plain text or as a JSON object:
"prompt", and, where it wants other than the flags say, "max_new_tokens", "threshold", "drafts"
(more than --drafts are that many), "temperature" or "seed". Every line of --output is a JSON object
as soon as its text is done: "line" (of the input, from 1), "prompt", "text", "finish", "tokens" and
"exits", the number of tokens of each exit. --output has to be a new file: --resume goes on, by the
flags given now, with the lines that an earlier run did not come to or could not run.

Requests share --slots slots and leave them when they are done; none waits for another's end. First
the engine measures what its work takes here, watches where such requests leave, and plans how long
to hold them back for others, and how many tokens to draft (--notune: no holding, --drafts drafts).
--engine=auto turns exits off while they do not pay, and =full has none. Lines that cannot be run
are told with the others, "finish" saying why, and the exit status is then 1.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple, TextIO

import numpy as np
from absl import flags

from eejax.checkpoint.model import load_run
from eejax.common.errors import ConfigError, DataError, require, require_count
from eejax.experiments import field_flags, launch, prompt_files
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy, ExitRules
from eejax.inference.request import EngineRequest
from eejax.inference.sampling import SamplingParams

ENGINES = ["recompute", "auto", "full"]
FIELDS = ("prompt", "max_new_tokens", "threshold", "drafts", "temperature", "seed")

_RUN = field_flags.define(load_run, ("workdir", "step"))
_INPUT = flags.DEFINE_string("input", None, "A file of prompts, one a line; '-': standard input.")
_OUTPUT = flags.DEFINE_string("output", None, "Where texts go; standard output by default.")
_ENGINE = flags.DEFINE_enum("engine", "recompute", ENGINES, "With exits; while they pay; without.")
_SIZES = field_flags.define(EarlyExitEngine.make, ("slots", "context"), defaults={"slots": 8})
_THRESHOLD = field_flags.define(ExitPolicy.make, ["threshold"], defaults={"threshold": 0.9})
_GATE = field_flags.define(ExitRules, ["gate"])
_OPTIONS = field_flags.define(
    EngineOptions,
    ["drafts"],
    defaults={"drafts": 4},
    helps={"drafts": "Most tokens of a request that are drafted past an undecided one"},
)
_LENGTH = field_flags.define(
    EngineRequest, {"max_tokens": "max_new_tokens"}, defaults={"max_tokens": 128}
)
_SAMPLING = field_flags.define(
    SamplingParams.make,
    ("temperature", "seed"),
    helps={"seed": "Seed of the first line's draws; each next line's is 1 more"},
)
_STOP_TOKEN = flags.DEFINE_multi_integer("stop_token", [], "Token id that ends a text, beside EOS.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with an --output that is there.")
_TUNE = flags.DEFINE_bool("tune", True, "Measure and plan before the first request.")
flags.mark_flag_as_required("input")


class Line(NamedTuple):
    """One of the input. wants: its fields; error: why it cannot be read, or ''."""

    number: int
    wants: dict[str, Any]
    error: str = ""


def main() -> None:
    given = prompt_files.read("input", _INPUT.value)
    lines = [parsed(i, text) for i, text in enumerate(given, 1) if text.strip()]
    require(bool(lines), "input", _INPUT.value, "must have a line that is not empty")
    if _RESUME.value and _OUTPUT.value is None:
        raise ConfigError("--resume: goes on with an --output: name the file.")
    model = _RUN()
    # What is wrong with flags is found before a file is touched.
    engine, stop_token_ids = engine_of(model)
    with contextlib.ExitStack() as stack:
        out = sys.stdout
        if _OUTPUT.value is not None:
            out, done = opened(_OUTPUT.value, lines)
            stack.enter_context(out)
            if done:
                launch.say(f"{len(done)} of {len(lines)} lines are done already")
            lines = [line for line in lines if line.number not in done]
        failed = complete(model, engine, stop_token_ids, lines, out) if lines else 0
    if failed:
        raise SystemExit(1)


def opened(path: str, lines: list[Line]) -> tuple[TextIO, set[int]]:
    """The file of texts, to go on behind what it has, and the numbers of the lines it has."""
    try:
        there = pathlib.Path(path).read_bytes() if pathlib.Path(path).is_file() else b""
        if there and not _RESUME.value:
            raise ConfigError(
                f"--output = {path!r}: has {len(there.splitlines())} lines already. Name a new "
                "file, or --resume to go on behind them."
            )
        whole = there[: there.rfind(b"\n") + 1]  # who was killed may have left a part of a line
        done = told_before(path, whole, lines)
        kept = b"".join(done.values())
        if kept != there:
            part = pathlib.Path(f"{path}.part")
            part.write_bytes(kept)
            part.replace(path)
        return open(path, "a", encoding="utf-8"), {*done}
    except OSError as error:
        raise DataError(f"--output = {path!r}: cannot be written ({error.strerror}).") from error


def told_before(path: str, data: bytes, lines: list[Line]) -> dict[int, bytes]:
    """Read which lines an earlier run of the same input finished.

    Lines that could not be run are run again.
    """
    prompts = {line.number: line.wants.get("prompt") for line in lines}
    done = {}
    for i, text in enumerate(data.splitlines(keepends=True), 1):
        try:
            told = json.loads(text)
            number, prompt, finish = told["line"], told["prompt"], str(told["finish"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"--output = {path!r}: line {i} is no text of a run ({error})."
            ) from error
        if finish.startswith("error"):
            continue
        if number not in prompts or prompts[number] != prompt:
            raise DataError(
                f"--output = {path!r}: its line {i} is of another prompt than line {number} of "
                "--input. Name the input it was made of, or another output."
            )
        done[number] = text
    return done


def parsed(number: int, text: str) -> Line:
    """A line that begins with a brace is a JSON object, any other a prompt."""
    try:
        wants = prompt_files.fields(text)
    except ValueError as error:
        return Line(number, {"prompt": text}, str(error))
    others = [name for name in wants if name not in FIELDS]
    if others:
        return Line(number, wants, f"has {others}: must be among {list(FIELDS)}")
    if not isinstance(wants.get("prompt"), str):
        return Line(number, wants, 'must have a text as "prompt"')
    return Line(number, wants)


def encoded(lines: list[Line], tokenizer) -> tuple[list[Line], dict[int, list[int]]]:
    """The lines, those that cannot be encoded with why, and the others' tokens."""
    ids, told = {}, []
    for line in lines:
        if not line.error:
            try:
                ids[line.number] = tokenizer.encode(line.wants["prompt"]).tolist()
            except DataError as error:
                line = line._replace(error=str(error).rstrip("."))
        told.append(line)
    return told, ids


def complete(model, engine, stop_token_ids: list[int], lines: list[Line], out) -> int:
    """Run the lines, and return how many could not be."""
    from eejax.data import text_behind
    from eejax.inference.payoff import Payoff
    from eejax.inference.request import FinishReason
    from eejax.inference.scheduler import Scheduler

    tokenizer = model.tokenizer
    lines, ids = encoded(lines, tokenizer)
    engine, drafts = tuned(engine, [*ids.values()], stop_token_ids)
    payoff = Payoff() if _ENGINE.value == "auto" else None
    scheduler = Scheduler(engine, engine.config, payoff=payoff)
    of: dict[str, Line] = {}
    failed = 0

    def told(line: Line, **rest) -> None:
        out.write(json.dumps({"line": line.number, **rest}) + "\n")
        out.flush()

    for line in lines:
        try:
            require(not line.error, f"line {line.number}", line.wants, line.error)

            def want(name, default, line=line):
                return line.wants.get(name, default)

            policy = ExitPolicy.make(
                model.config,
                1,
                want("threshold", _THRESHOLD["threshold"]),
                **_GATE.values(),
                drafts=line.wants.get("drafts", drafts),
            )
            if _ENGINE.value == "full":
                policy = ExitPolicy.make(engine.config, 1)
            sampling = SamplingParams.make(
                1,
                want("temperature", _SAMPLING["temperature"]),
                seed=line.wants.get("seed", _SAMPLING["seed"] + line.number - 1),
            )
            scheduler.add_request(
                EngineRequest(
                    str(line.number),
                    ids[line.number],
                    want("max_new_tokens", _LENGTH["max_tokens"]),
                    policy,
                    sampling,
                    stop_token_ids=stop_token_ids,
                )
            )
            of[str(line.number)] = line
        except ConfigError as error:
            failed += 1
            why = re.sub(r"^max_tokens\b", "max_new_tokens", str(error))
            why = re.sub(r"^prompts\[0\]", "prompt", why)
            told(line, prompt=line.wants.get("prompt"), finish=f"error: {why}")
    tokens: dict[str, list] = {id_: [] for id_ in of}
    done, begin, total = 0, time.perf_counter(), 0
    shown = begin
    while not scheduler.idle:
        for id_, new, finish in scheduler.step():
            tokens[id_] += new
            total += len(new)
            if not finish:
                continue
            line, mine = of[id_], tokens.pop(id_)
            done += 1
            failed += finish == FinishReason.ERROR
            exits = np.bincount([t.exit for t in mine], minlength=engine.config.n_exits + 1)
            told(
                line,
                prompt=line.wants["prompt"],
                text=text_behind(tokenizer.decode, ids[line.number], [t.id for t in mine]),
                finish=finish,
                tokens=len(mine),
                exits=exits.tolist(),
            )
        now = time.perf_counter()
        if now - shown > 5:
            shown = now
            launch.say(f"{done} of {len(of)} done, {total / (now - begin):.0f} tokens/s")
    took = time.perf_counter() - begin
    launch.say(f"{done} texts, {total} tokens, {total / max(took, 1e-9):.0f} tokens/s")
    if payoff is not None:
        found = "too few calls to compare exits"
        if payoff.ratio is not None:
            found = f"with exits {payoff.ratio:.2f} times as fast as without"
        launch.say(found)
    return failed


def engine_of(model):
    """The engine, and the tokens that end a text. Raises ConfigError, which names the flag."""
    from eejax.inference.state import RequestRows

    config, stop_token_ids = model.config, sorted({*model.tokenizer.end_ids, *_STOP_TOKEN.value})
    require_count("--max_new_tokens", _LENGTH["max_tokens"])
    with launch.flags_named({"stop_token_ids": "stop_token"}):
        policy = ExitPolicy.make(config, 1, **_THRESHOLD.values(), **_GATE.values())
        sampling = SamplingParams.make(1, **_SAMPLING.values())
        RequestRows.make(config, [1], [1], policy, sampling, stop_token_ids)
        options = "full" if _ENGINE.value == "full" else _OPTIONS()
        engine = EarlyExitEngine.make(model.params, config, options, **_SIZES.values())
    return engine, stop_token_ids


def tuned(engine, prompts: list, stop_token_ids: list[int]):
    """The engine with a plan, and the drafts that requests are to have."""
    from eejax.inference import batch_costs

    if _ENGINE.value == "full":
        return engine, 0
    fit = [p for p in prompts if 0 < len(p) < engine.context]
    if not _TUNE.value or not fit:
        return engine, _OPTIONS["drafts"]
    launch.say("measuring and planning ...")
    found = batch_costs.tune(
        engine,
        fit[:64],
        new=min(64, _LENGTH["max_tokens"]),
        stop_token_ids=stop_token_ids,
        **_GATE.values(),
        **_THRESHOLD.values(),
    )
    launch.say(
        f"plan: {found.drafts} drafts, fill {found.engine.plan.fill.tolist()}, patience"
        f" {found.engine.plan.patience.tolist()}"
    )
    return found.engine, found.drafts


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: with --resume the same command goes on in --output")
