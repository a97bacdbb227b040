"""Generates text with a trained model, each token in the color of the exit it left by.

    python -m experiments.generate --workdir=runs/quickstart --prompt='def main(' --threshold=0.8
    python -m experiments.generate --workdir=runs/quickstart --prompt_file=a.txt --engine=full

Without --prompt or --prompt_file the prompt is read from standard input. One prompt is shown
while it grows, several when they are done. With --json the last line printed is one JSON object.

Two programs are compiled, one that reads the prompt and one that generates a chunk of tokens; the
speed printed leaves out what comes before both are there. Other text, thresholds, exits, sampling
or seeds need no new program; another number of prompts, --engine, --cap, --gamma or --draft_exit
does, and now and then a longer prompt or a larger --max_new_tokens.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

from absl import flags

from eejax.common.errors import ConfigError, DataError
from experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; the newest by default.")
_EMA = flags.DEFINE_bool("ema", False, "Take the averaged parameters (train.ema).")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; repeat the flag for a batch.")
_PROMPT_FILE = flags.DEFINE_multi_string("prompt_file", [], "A file whose text is a prompt.")
_ENGINE = flags.DEFINE_enum(
    "engine", "recompute", ["full", "posthoc", "recompute", "propagate", "speculative"], "Decoder."
)
_THRESHOLD = flags.DEFINE_list("threshold", ["0.9"], "Confidence to leave at; one, or one an exit.")
_EXITS = flags.DEFINE_list("exits", None, "Boundaries of the active exits; all by default.")
_PREFILL_EXIT = flags.DEFINE_bool("prefill_exit", False, "May the first token leave early too?")
_CAP = flags.DEFINE_integer("cap", 16, "Most tokens that may wait for deeper layers.")
_GAMMA = flags.DEFINE_integer("gamma", 4, "Most tokens drafted in a step (speculative).")
_DRAFT_EXIT = flags.DEFINE_integer("draft_exit", 0, "Number of the exit that drafts; 0: the first.")
_NEW = flags.DEFINE_integer("max_new_tokens", 256, "Tokens to generate at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k most likely tokens; 0: all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample within this much probability.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Least probability, as a share of the likeliest's.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends a request; repeatable.")
_STOP_TOKEN = flags.DEFINE_multi_integer("stop_token", [], "Token id that ends a request.")
_COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colors by exit.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")
flags.mark_flags_as_required(["workdir"])


def numbers(flag: str, texts: list[str], kind: type) -> list:
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"--{flag} = {','.join(texts)!r}: must be numbers ({error}).") from error


def prompts() -> list[str]:
    texts = [*_PROMPT.value, *map(read_prompt, _PROMPT_FILE.value)]
    return texts or [sys.stdin.read()]


def read_prompt(path: str) -> str:
    try:
        return pathlib.Path(path).read_text("utf-8")
    except OSError as error:
        raise DataError(f"--prompt_file = {path!r}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt_file = {path!r}: is not UTF-8 text ({error}): convert the file."
        ) from error


def speed(begin: float, before: int, tokens: int) -> float | None:
    """Tokens per second since `begin`, when there were `before`; None where none came since."""
    return (tokens - before) / (time.perf_counter() - begin) if tokens > before else None


def main() -> None:
    from eejax.inference import EngineOptions, Generator
    from eejax.train.runs import open_run

    threshold = numbers("threshold", _THRESHOLD.value, float)
    exits = None if _EXITS.value is None else numbers("exits", _EXITS.value, int)
    model = open_run(_WORKDIR.value, step=_STEP.value, ema=_EMA.value).model
    tokenizer, texts = model.tokenizer, prompts()
    ids = [tokenizer.encode(text).tolist() for text in texts]
    options = EngineOptions(
        engine=_ENGINE.value, cap=_CAP.value, gamma=_GAMMA.value, draft_exit=_DRAFT_EXIT.value
    )
    generator = Generator.make(model.params, model.config, options)
    stops = [*_STOP_TOKEN.value, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    stream = generator.stream(
        ids, _NEW.value, threshold=threshold[0] if len(threshold) == 1 else threshold,
        exits=exits, prefill_exit=_PREFILL_EXIT.value, temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value, top_p=_TOP_P.value, min_p=_MIN_P.value, seed=_SEED.value,
        stop_tokens=stops, stop_strings=_STOP.value, decode_text=tokenizer.decode,
    )  # fmt: skip
    colors = _COLOR.value == "always" or (_COLOR.value == "auto" and sys.stdout.isatty())
    growing, timed = len(texts) == 1, None
    text, shown = tokenizer.stream(), 0
    if growing:
        text.push(ids[0])  # what comes first in a text is decoded differently
    for number, result in enumerate(stream):
        if growing and number == 0:  # not before the request was found to be valid
            print(texts[0], end="")
        while growing and shown < result.lengths[0]:
            piece = text.push(int(result.tokens[0, shown]))
            print(result.paint(piece, result.exits[0, shown]) if colors else piece, end="")
            shown += 1
        sys.stdout.flush()
        if number == 1:  # both programs are compiled and have run
            timed = time.perf_counter(), int(result.lengths.sum())
    rate = speed(*timed, int(result.lengths.sum())) if timed else None
    print(text.flush())
    for i in range(0 if growing else len(texts)):
        new = result.colored(i, tokenizer.decode) if colors else tokenizer.decode(result.ids(i))
        print(f"--- prompt {i}: {result.finish[i]}\n{texts[i]}{new}")
    pace = "too few tokens to time" if rate is None else f"{rate:.1f} tokens/s"
    ended = f", ended by: {result.finish[0]}" if growing else ""
    print(f"\n{result.summary()}\n{pace} with engine {_ENGINE.value}{ended}")
    if _JSON.value:
        row = lambda a, i: a[i, : result.lengths[i]].tolist()
        requests = [
            {
                "prompt": texts[i],
                "text": tokenizer.decode(result.ids(i)),
                "finish": result.finish[i],
                "tokens": result.ids(i),
                "boundaries": row(result.boundaries, i),
                "layers": row(result.layers, i),
                "drafted": row(result.drafted, i),
                "accepted": row(result.accepted, i),
                "confidences": [round(c, 4) for c in row(result.confidences, i)],
                "logprobs": [round(p, 4) for p in row(result.logprobs, i)],
            }
            for i in range(len(texts))
        ]
        print(
            json.dumps({"engine": _ENGINE.value, "tokens_per_second": rate, "requests": requests})
        )


if __name__ == "__main__":
    launch.run(main, interrupted="\ninterrupted")
