"""Generate text with a trained model, each token in the color of its exit.

    eejax generate --workdir=runs/quickstart --prompt='def main(' --threshold=0.8
    eejax generate --workdir=runs/quickstart --prompt_file=a.txt --engine=full
    eejax generate --workdir=runs/quickstart --interactive --engine=auto
    eejax generate --workdir=runs/quickstart --prompt='def main(' \\
        --engine=pipelined --mesh.pipe=2

Without --prompt or --prompt_file the prompt is read from standard input. The text of one prompt is
shown while it grows, the texts of several when they are done. With --interactive every line typed
is a prompt, until the input ends. Ctrl-C ends an answer, and at the prompt it ends the session.
With --json the last line printed is one JSON object.

The stages of "pipelined" need a device each; on a CPU, set
XLA_FLAGS=--xla_force_host_platform_device_count=2. "auto" is "recompute", and "auto_speculative" is
"speculative", which time themselves and turn exits off while they do not pay; the result is printed
at the end.

Two programs are compiled, one that reads the prompt and one that generates a chunk of tokens; the
printed speed excludes the time before both are compiled. Other text, thresholds, gates, exits,
sampling or seeds need no new program. Another number of prompts, --engine, --mesh, --cap, --drafts,
--draft_exit or --num_segments does, and sometimes a longer prompt or a larger --max_new_tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator

from absl import flags

from eejax.common.axes import MESH_AXES
from eejax.common.errors import ConfigError, DataError, require
from eejax.experiments import field_flags, launch, prompt_files
from eejax.inference import AutoGenerator, EngineOptions, Generator, PipelinedGenerator
from eejax.inference.generate import GenerationParams
from eejax.inference.options import USED_BY as ENGINES_WITH
from eejax.inference.policy import ExitPolicy, ExitRules
from eejax.inference.sampling import SamplingParams
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.runs import open_run

FEW = 4  # steps of a call of an interactive session, so that tokens appear as they come
AUTO = {"auto": "recompute", "auto_speculative": "speculative"}  # the engine that each switches
ENGINES = ["full", "posthoc", "recompute", "pipelined", "propagate", "speculative", *AUTO]
OPTIONS = ("cap", "drafts", "draft_exit", "adapt", "lookup", "propagate", "num_segments")
# Flags that only some engines use, and those engines.
LEAVING = ("posthoc", "recompute", "pipelined", "propagate", "auto")
USED_BY = {
    flag: engines
    for names, engines in (
        ("threshold gate exits min_exit_layer decay prefill_exit num_segments", LEAVING),
        ("cap", ("recompute", "pipelined", "auto", "speculative", "auto_speculative")),
        ("stage_layers", ("pipelined",)),
    )
    for flag in names.split()
} | {
    flag: (*engines, *(name for name, engine in AUTO.items() if engine in engines))
    for flag, engines in ENGINES_WITH.items()
    if flag in OPTIONS
}

_RUN = field_flags.define(open_run, ("workdir", "step", "ema"))
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; repeat the flag for a batch.")
_PROMPT_FILE = flags.DEFINE_multi_string(
    "prompt_file", [], "A file whose text is a prompt; - is standard input."
)
_INTERACTIVE = flags.DEFINE_bool("interactive", False, "Answer prompts line by line.")
_ENGINE = flags.DEFINE_enum("engine", "recompute", ENGINES, "Decoder.")
_OPTIONS = field_flags.define(EngineOptions, OPTIONS)
_MESH = field_flags.define(MeshConfig, {axis: f"mesh.{axis}" for axis in MESH_AXES})
_STAGE_LAYERS = flags.DEFINE_list(
    "stage_layers", ["even"], "Layers of each stage (pipelined): numbers, even or balanced."
)
_THRESHOLD = field_flags.define(
    ExitPolicy.make, ["threshold"], defaults={"threshold": 0.9}, lists=["threshold"]
)
_RULES = field_flags.define(ExitRules, ("exits", "prefill_exit", "gate", "min_exit_layer", "decay"))
_SAMPLING = field_flags.define(
    SamplingParams.make, ("temperature", "top_k", "top_p", "min_p", "seed")
)
_ENDS = field_flags.define(
    GenerationParams,
    {"stop_strings": "stop", "stop_token_ids": "stop_token"},
    defaults={"stop_strings": [], "stop_token_ids": []},
    repeated=["stop_strings", "stop_token_ids"],
)
_LENGTH = field_flags.define(Generator.stream, ["max_new_tokens"], defaults={"max_new_tokens": 256})
_COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colors by exit.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

# Settings whose flags have other names.
FLAG_OF = _ENDS.names | {"mesh": "mesh", "pipeline.layers": "stage_layers"}


def note_unused() -> None:
    """Print the flags on the command line that have no effect."""
    given = [f for f in USED_BY if flags.FLAGS[f].present and _ENGINE.value not in USED_BY[f]]
    if given:
        listed = ", ".join(f"--{f}" for f in given)
        launch.say(f"note: without effect with --engine={_ENGINE.value}: {listed}")


def prompts() -> list[str]:
    files = [prompt_files.read("prompt_file", path) for path in _PROMPT_FILE.value]
    texts = [*_PROMPT.value, *files]
    return texts or [from_standard_input(sys.stdin.read)]


def from_standard_input(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: is not UTF-8 text ({error}): convert it.") from error


def read_line() -> str | None:
    """Return the next prompt; None where the input ends, or Ctrl-C ends it."""
    typed = sys.stdin.isatty()
    try:
        return from_standard_input(lambda: input("> " if typed else ""))
    except (EOFError, KeyboardInterrupt):
        if typed:
            print()
        return None


def make_generator(model, mesh):
    engine, params, config = _ENGINE.value, model.params, model.config
    used = {name: v for name, v in _OPTIONS.values().items() if engine in USED_BY[name]}
    options = EngineOptions(AUTO.get(engine, engine), **used)
    if engine == "pipelined":
        layers = _STAGE_LAYERS.value
        named = len(layers) == 1 and layers[0].isalpha()
        layers = layers[0] if named else launch.numbers("stage_layers", layers, int)
        return PipelinedGenerator.make(params, config, mesh, options, layers=layers)
    make = AutoGenerator.make if engine in AUTO else Generator.make
    return make(params, config, options, mesh=mesh if mesh.size > 1 else None)


class StreamPace:
    """Tokens and seconds of one stream after its second result, when both programs have run."""

    def __init__(self):
        self.tokens, self.seconds, self._number, self._since = 0, 0.0, 0, (0.0, 0)

    def add(self, result) -> None:
        now = time.perf_counter(), int(result.lengths.sum())
        if self._number == 1:
            self._since = now
        elif self._number > 1:
            self.seconds, self.tokens = now[0] - self._since[0], now[1] - self._since[1]
        self._number += 1


def rate(paces: list[StreamPace]) -> float | None:
    """Return tokens per second; None if there were too few to time."""
    tokens = sum(pace.tokens for pace in paces)
    return tokens / sum(pace.seconds for pace in paces) if tokens else None


def per_second(value: float | None) -> str:
    return "too few tokens to time" if value is None else f"{value:.1f} tokens/s"


class Screen:
    """Writer of a request's tokens as they arrive."""

    def __init__(self, tokenizer, prompt: list[int], colors: bool):
        self._text, self._shown, self._colors = tokenizer.stream(prompt), 0, colors

    def show(self, result) -> None:
        while self._shown < result.lengths[0]:
            piece = self._text.push(int(result.tokens[0, self._shown]))
            exit_ = result.exits[0, self._shown]
            print(result.paint(piece, exit_) if self._colors else piece, end="")
            self._shown += 1
        sys.stdout.flush()

    def end(self) -> None:
        """Show the rest of the text, and end the line."""
        print(self._text.flush())


def answer(ask: Callable, texts: list[str], tokenizer, colors: bool) -> tuple:
    """Return (result, tokens per second) of a batch; a single text is shown as it grows."""
    ids = [tokenizer.encode(text).tolist() for text in texts]
    waits()
    screen, pace = Screen(tokenizer, ids[0], colors) if len(texts) == 1 else None, StreamPace()
    for number, result in enumerate(ask(ids)):
        pace.add(result)
        if screen:
            # Only once the request is known to be valid.
            print(texts[0] if number == 0 else "", end="")
            screen.show(result)
    if screen:
        screen.end()
    for i in range(0 if screen else len(texts)):
        new = (result.colored if colors else result.text)(i, tokenizer.decode)
        print(f"--- prompt {i}: {result.finish[i]}\n{texts[i]}{new}")
    speed = rate([pace])
    ended = f", ended by: {result.finish[0]}" if screen else ""
    print(f"\n{result.summary()}")
    if colors:
        print(f"colors: {result.legend()}")
    print(f"{per_second(speed)} with engine {_ENGINE.value}{ended}")
    return result, speed


def waits() -> None:
    if sys.stderr.isatty():
        launch.say("compiling ...")


def converse(ask: Callable, tokenizer, colors: bool) -> Iterator[tuple]:
    """Answer the lines of the input as they come; yield (prompt, result, pace) of each."""
    if hasattr(sys.stdin, "reconfigure"):  # refuse only the lines that are not UTF-8
        sys.stdin.reconfigure(errors="surrogateescape")
    waits()
    next(ask([[0]]))  # check settings and compile both programs before the first prompt
    for _ in itertools.islice(ask([[0]], stop_token_ids=[], stop_strings=[]), 2):
        pass
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited and come back)
        print("Ctrl-C ends an answer; at the prompt it ends the session, as Ctrl-D does.")
    while (text := read_line()) is not None:
        result, pace, stopped = None, StreamPace(), False
        try:
            ids = tokenizer.encode(text).tolist()
            screen = Screen(tokenizer, ids, colors)
            for result in ask([ids]):
                pace.add(result)
                screen.show(result)
        except KeyboardInterrupt:
            stopped = True
        except (ConfigError, DataError) as error:
            print(f"error: {str(error).replace('prompts[0]', 'prompt', 1)}", file=sys.stderr)
            continue
        if result is None:
            print("interrupted")
            continue
        screen.end()
        ended = "Ctrl-C" if stopped else result.finish[0]
        print(
            f"[{result.lengths[0]} tokens, {per_second(rate([pace]))}, ended by: {ended}; "
            f"{result.legend(colors)}]",
            flush=True,
        )
        yield text, result, pace


def verdict(payoff, what: str) -> str:
    """Return a sentence about the measured gain of exits, or of drafts."""
    if payoff.ratio is None:
        return f"{what} were left on: too few tokens to measure whether they pay"
    if payoff.exits:
        return f"{what} were left on: {payoff.ratio:.2f} times as fast as without"
    return f"{what} were turned off: with them {payoff.ratio:.2f} times as fast as without"


def in_numbers(text: str, result, i: int, decode: Callable) -> dict:
    """Return request i of a result, for JSON."""

    def row(a):
        return a[i, : result.lengths[i]].tolist()

    return {
        "prompt": text,
        "text": result.text(i, decode),
        "finish": result.finish[i],
        "tokens": result.ids(i),
        "boundaries": row(result.boundaries),
        "layers": row(result.layers),
        "drafted": row(result.drafted),
        "accepted": row(result.accepted),
        "confidences": [round(c, 4) for c in row(result.confidences)],
        "logprobs": [round(p, 4) for p in row(result.logprobs)],
    }


@launch.flags_named(FLAG_OF)
def main() -> None:
    if _INTERACTIVE.value:
        given = [f"--{f.name}" for f in (_PROMPT, _PROMPT_FILE) if f.value]
        given += ["--mesh.data"] if _MESH["data"] > 1 else []
        if given:
            raise ConfigError(
                f"{given[0]}: --interactive reads its prompts itself, one at a time. Leave one of "
                "the two out."
            )
    note_unused()
    for text in _ENDS["stop_strings"]:
        lone = any(0xD800 <= ord(c) < 0xE000 for c in text)  # bytes that are not UTF-8
        require(not lone, "--stop", text, "must be text that UTF-8 can encode")
    settings = _THRESHOLD.values() | _RULES.values() | _SAMPLING.values() | _ENDS.values()
    mesh = make_mesh(_MESH())
    model = _RUN(mesh=mesh).model
    tokenizer, generator = model.tokenizer, make_generator(model, mesh)
    settings["stop_token_ids"] = [*_ENDS["stop_token_ids"], *tokenizer.end_ids]
    settings["decode_text"] = tokenizer.decode
    if _INTERACTIVE.value and _ENGINE.value not in AUTO:  # `auto` times calls of more steps
        settings["chunk"] = FEW

    def ask(ids, **change):
        return generator.stream(ids, **_LENGTH.values(), **settings | change)

    colors = _COLOR.value == "always" or (_COLOR.value == "auto" and sys.stdout.isatty())
    decode = tokenizer.decode
    if _INTERACTIVE.value:
        answers = list(converse(ask, tokenizer, colors))
        requests = [in_numbers(text, result, 0, decode) for text, result, _ in answers]
        speed = rate([pace for *_, pace in answers])
    else:
        texts = prompts()
        result, speed = answer(ask, texts, tokenizer, colors)
        requests = [in_numbers(text, result, i, decode) for i, text in enumerate(texts)]
    found = {}
    if _ENGINE.value in AUTO:
        payoff = generator.payoff
        print(verdict(payoff, "drafts" if generator.options.engine == "speculative" else "exits"))
        found = {"exits_on": payoff.exits, "exits_ratio": payoff.ratio}
    if _JSON.value:
        result = {"engine": _ENGINE.value, "tokens_per_second": speed, **found}
        print(json.dumps(result | {"requests": requests}))


if __name__ == "__main__":
    launch.run(main, interrupted="\ninterrupted")
