"""Generate text with a trained model, each token in the color of its exit.

    eejax generate --workdir=runs/demo --prompt='def main(' --threshold=0.8
    eejax generate --workdir=runs/demo --prompt_file=a.txt --engine=full
    eejax generate --workdir=runs/demo --interactive --engine=auto
    eejax generate --workdir=runs/demo --prompt='def main(' \\
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

import itertools
import json
import sys
from collections.abc import Callable, Iterator

from absl import flags

from eejax.common.axes import MESH_AXES
from eejax.common.errors import ConfigError, DataError, require
from eejax.experiments import field_flags, launch, prompt_files, terminal
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
    return texts or [terminal.from_standard_input(sys.stdin.read)]


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


def answer(ask: Callable, texts: list[str], tokenizer, colors: bool) -> tuple:
    """Return (result, tokens per second) of a batch; a single text is shown as it grows."""
    ids = [tokenizer.encode(text).tolist() for text in texts]
    terminal.waits()
    screen, pace = (
        terminal.Screen(tokenizer, ids[0], colors) if len(texts) == 1 else None,
        terminal.StreamPace(),
    )
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
    speed = terminal.rate([pace])
    ended = f", ended by: {result.finish[0]}" if screen else ""
    print(f"\n{result.summary()}")
    if colors:
        print(f"colors: {result.legend()}")
    print(f"{terminal.per_second(speed)} with engine {_ENGINE.value}{ended}")
    return result, speed


def converse(ask: Callable, tokenizer, colors: bool) -> Iterator[tuple]:
    """Answer the lines of the input as they come; yield (prompt, result, pace) of each."""
    terminal.prepare_lines()
    terminal.waits()
    next(ask([[0]]))  # check settings and compile both programs before the first prompt
    for _ in itertools.islice(ask([[0]], stop_token_ids=[], stop_strings=[]), 2):
        pass
    terminal.greet()
    while (text := terminal.read_line()) is not None:
        result, pace, stopped = None, terminal.StreamPace(), False
        try:
            ids = tokenizer.encode(text).tolist()
            screen = terminal.Screen(tokenizer, ids, colors)
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
        speed = terminal.per_second(terminal.rate([pace]))
        print(
            f"[{result.lengths[0]} tokens, {speed}, ended by: {ended}; {result.legend(colors)}]",
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
        speed = terminal.rate([pace for *_, pace in answers])
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
