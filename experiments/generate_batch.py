"""Complete many prompts with a trained model in batches; every token has its own exit.

    eejax generate-batch --workdir=runs/demo --input=prompts.txt \\
        --output=texts.jsonl --threshold=0.5

Every line of --input ("-": standard input) is a prompt, as plain text or as a JSON object:
"prompt", and, to override the flags, "max_new_tokens", "threshold", "drafts" (at most --drafts),
"temperature" or "seed". Every line of --output is a JSON object, written as soon as its text is
done: "line" (of the input, from 1), "prompt", "text", "finish", "tokens" and "exits", the number of
tokens of each exit. --output has to be a new file: --resume continues, with the current flags, with
the lines that an earlier run did not reach or could not run.

Requests share --slots slots and leave them when they are done; none waits for another's end. First
the engine measures the cost of its work here, observes where such requests leave, and plans how
long to hold them back for others, and how many tokens to draft (--notune: no holding, --drafts
drafts). --engine=auto turns exits off while they do not pay, and --engine=full has none. Lines that
cannot be run are reported with the others, with the reason in "finish", and the exit status is then
1.
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
_OUTPUT = flags.DEFINE_string("output", None, "File of the texts; standard output by default.")
_ENGINE = flags.DEFINE_enum(
    "engine", "recompute", ENGINES, "With exits, while they pay, or without."
)
_SIZES = field_flags.define(EarlyExitEngine.make, ("slots", "context"), defaults={"slots": 8})
_THRESHOLD = field_flags.define(ExitPolicy.make, ["threshold"], defaults={"threshold": 0.9})
_GATE = field_flags.define(ExitRules, ["gate"])
_OPTIONS = field_flags.define(
    EngineOptions,
    ["cap", "drafts", "lookup"],
    defaults={"drafts": 4},
    helps={
        "drafts": "Maximum tokens that a request drafts past an undecided one",
        "lookup": "Maximum tokens that a text drafts itself, where its last ones stood before; "
        "with --notune",
    },
)
_LENGTH = field_flags.define(
    EngineRequest, {"max_tokens": "max_new_tokens"}, defaults={"max_tokens": 128}
)
_SAMPLING = field_flags.define(
    SamplingParams.make,
    ("temperature", "seed"),
    helps={"seed": "Seed of the first line's draws; each next line's is 1 more"},
)
_STOP_TOKEN = flags.DEFINE_multi_integer("stop_token", [], "Further token id that ends a text.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue an existing --output.")
_TUNE = flags.DEFINE_bool("tune", True, "Measure and plan before the first request.")
flags.mark_flag_as_required("input")


class Line(NamedTuple):
    """A line of the input.

    Attributes:
      number: its number, from 1.
      wants: its fields.
      error: why it cannot be read, or ''.
    """

    number: int
    wants: dict[str, Any]
    error: str = ""


def main() -> None:
    given = prompt_files.read("input", _INPUT.value).split("\n")
    lines = [parsed(i, text) for i, text in enumerate(given, 1) if text.strip()]
    require(bool(lines), "input", _INPUT.value, "must have a line that is not empty")
    if _RESUME.value and _OUTPUT.value is None:
        raise ConfigError("--resume: requires --output: name the file.")
    model = _RUN()
    # Check the flags before a file is touched.
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
        where = "the output" if _OUTPUT.value is None else _OUTPUT.value
        launch.say(f'{failed} could not be run: "finish" says why in {where}')
        raise SystemExit(1)


def opened(path: str, lines: list[Line]) -> tuple[TextIO, set[int]]:
    """Open the file of texts to append to it; return it and the numbers of the lines it has."""
    try:
        there = pathlib.Path(path).read_bytes() if pathlib.Path(path).is_file() else b""
        if there and not _RESUME.value:
            raise ConfigError(
                f"--output = {path!r}: has {len(there.splitlines())} lines already. Name a new "
                "file, or continue it with --resume."
            )
        whole = there[: there.rfind(b"\n") + 1]  # a killed run may have left a part of a line
        done = finished_lines(path, whole, lines)
        kept = b"".join(done.values())
        if kept != there:
            part = pathlib.Path(f"{path}.part")
            part.write_bytes(kept)
            part.replace(path)
        return open(path, "a", encoding="utf-8"), {*done}
    except OSError as error:
        raise DataError(f"--output = {path!r}: cannot be written ({error.strerror}).") from error


def finished_lines(path: str, data: bytes, lines: list[Line]) -> dict[int, bytes]:
    """Read the lines that an earlier run of the same input finished.

    Lines that could not be run are run again.
    """
    prompts = {line.number: line.wants.get("prompt") for line in lines}
    done = {}
    for i, text in enumerate(data.splitlines(keepends=True), 1):
        try:
            record = json.loads(text)
            number, prompt, finish = record["line"], record["prompt"], str(record["finish"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"--output = {path!r}: line {i} was not written by a run ({error})."
            ) from error
        if finish.startswith("error"):
            continue
        if number not in prompts or prompts[number] != prompt:
            raise DataError(
                f"--output = {path!r}: its line {i} has another prompt than line {number} of "
                "--input. Name its own input, or another output."
            )
        done[number] = text
    return done


def parsed(number: int, text: str) -> Line:
    """Parse a line: a JSON object if it begins with a brace, otherwise a prompt."""
    try:
        wants = prompt_files.fields(text)
    except ValueError as error:
        return Line(number, {"prompt": text}, str(error))
    others = [name for name in wants if name not in FIELDS]
    if others:
        return Line(number, wants, f"has the fields {others}: known are {list(FIELDS)}")
    if not isinstance(wants.get("prompt"), str):
        return Line(number, wants, 'must have a text as "prompt"')
    lists = [name for name, value in wants.items() if isinstance(value, list | dict)]
    if lists and lists != ["threshold"]:
        return Line(number, wants, f"has a list for {lists}: each must be one number")
    drafts = wants.get("drafts")
    if isinstance(drafts, int) and drafts > max(_OPTIONS["drafts"], _OPTIONS["lookup"]):
        return Line(number, wants, f"has drafts = {drafts}: must be at most --drafts")
    return Line(number, wants)


def encoded(lines: list[Line], tokenizer) -> tuple[list[Line], dict[int, list[int]]]:
    """Encode the prompts; return the lines, with errors, and the tokens by line."""
    ids, checked = {}, []
    for line in lines:
        if not line.error:
            try:
                ids[line.number] = tokenizer.encode(line.wants["prompt"]).tolist()
            except DataError as error:
                line = line._replace(error=str(error).rstrip("."))
        checked.append(line)
    return checked, ids


def complete(model, engine, stop_token_ids: list[int], lines: list[Line], out) -> int:
    """Run the lines, and return the number of those that failed."""
    from eejax.data import text_behind
    from eejax.inference.payoff import Payoff
    from eejax.inference.request import FinishReason
    from eejax.inference.scheduler import Scheduler

    tokenizer = model.tokenizer
    lines, ids = encoded(lines, tokenizer)
    engine, drafts = tuned(engine, [*ids.values()], stop_token_ids)
    payoff = Payoff() if _ENGINE.value == "auto" else None
    scheduler = Scheduler(engine, payoff=payoff)
    of: dict[str, Line] = {}
    failed = 0

    def write_record(line: Line, **rest) -> None:
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
            write_record(line, prompt=line.wants.get("prompt"), finish=f"error: {why}")
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
            write_record(
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
    launch.say(f"{done} texts, {total} tokens, {total / max(took, 1e-9):.1f} tokens/s")
    if payoff is not None:
        found = "too few calls to compare exits"
        if payoff.ratio is not None:
            found = f"with exits {payoff.ratio:.2f} times as fast as without"
        launch.say(found)
    return failed


def engine_of(model):
    """Return the engine, and the tokens that end a text. Errors name the flag."""
    from eejax.inference.state import MAX_STOP_TOKENS, RequestRows

    config, stop_token_ids = model.config, sorted({*model.tokenizer.end_ids, *_STOP_TOKEN.value})
    require_count("--max_new_tokens", _LENGTH["max_tokens"])
    with launch.flags_named({"stop_token_ids": "stop_token"}):
        policy = ExitPolicy.make(config, 1, **_THRESHOLD.values(), **_GATE.values())
        sampling = SamplingParams.make(1, **_SAMPLING.values())
        RequestRows.make(config, [1], [1], policy, sampling, stop_token_ids)
        allowed = f"must be at most {MAX_STOP_TOKENS}, with those of the tokenizer"
        require(len(stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", stop_token_ids, allowed)
        options = "full" if _ENGINE.value == "full" else _OPTIONS()
        require(
            not (_TUNE.value and _OPTIONS["lookup"]),
            "lookup",
            _OPTIONS["lookup"],
            "must be 0 where the engine is planned: how often texts repeat themselves is unknown",
            "Add --notune.",
        )
        engine = EarlyExitEngine.make(model.params, config, options, **_SIZES.values())
    return engine, stop_token_ids


def tuned(engine, prompts: list, stop_token_ids: list[int]):
    """Return the engine with a plan, and the drafts of requests."""
    from eejax.inference import batch_costs

    if _ENGINE.value == "full":
        return engine, 0
    fit = [p for p in prompts if 0 < len(p) < engine.context]
    if not _TUNE.value or not fit:
        return engine, engine.options.draft_rows
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
    launch.run(main, interrupted="interrupted: with --resume the same command continues --output")
