"""Chat with a model: the full model's answers, drafted where that is faster, or early exits.

    eejax chat smollm2
    eejax chat runs/quickstart/model --threshold=0.8
    eejax chat smollm2 --prompt='What is the capital of France?'

MODEL is anything that `eejax.load` takes, with a chat template. Every line typed is a message, and
the conversation before it counts; /new begins another one. Ctrl-C ends an answer, and at the prompt
it ends the session. With --prompt each message is asked by itself, and the command ends.

Without --threshold the answers are those of the full model: the text so far drafts where it repeats
itself, and so does an exit that the model has, and all layers verify the drafts (--nodrafts: none).
With --threshold a token leaves at the first exit whose confidence reaches it. Tokens are shown in
the color of their exit, or of drafts that were right; behind each answer is a legend with the
numbers of tokens. With --json the last line printed is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from eejax.common.errors import ConfigError, DataError, require
from eejax.experiments import field_flags, launch, terminal
from eejax.experiments.conversation import Conversation
from eejax.inference.policy import ExitPolicy, ExitRules
from eejax.inference.sampling import SamplingParams

_PROMPT = flags.DEFINE_multi_string("prompt", [], "A message; repeat the flag for more.")
_SYSTEM = flags.DEFINE_string("system", None, "Message of the system, before the conversation.")
_THRESHOLD = field_flags.define(ExitPolicy.make, ["threshold"], defaults={"threshold": None})
_GATE = field_flags.define(ExitRules, ["gate"])
_DRAFTS = flags.DEFINE_bool("drafts", True, "Draft tokens where no threshold is given.")
_SAMPLING = field_flags.define(
    SamplingParams.make, ("temperature", "top_k", "top_p", "min_p", "seed")
)
_NEW = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens of an answer.", lower_bound=1)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "A file or a folder, if the model has none.")
_COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colors by exit.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

NEW = "/new"
FEW = 4  # steps of a call, so that tokens appear as they come


def main(names: list[str]) -> None:
    import eejax

    name = launch.one_model(names)
    for text in _PROMPT.value:
        require(text.strip(), "--prompt", text, "must be a text that is not empty")
    with launch.flags_named({}):
        model = eejax.load(name, tokenizer=_TOKENIZER.value)
    talk = Conversation(name, model, _SYSTEM.value)
    ask = asking(model)
    colors = _COLOR.value == "always" or (_COLOR.value == "auto" and sys.stdout.isatty())
    terminal.waits()
    asked = []
    if _PROMPT.value:
        for text in _PROMPT.value:
            talk.clear()
            print(f"> {text}")
            asked.append(reply(model, talk, ask, text, colors))
    else:
        asked = list(session(model, talk, ask, colors))
    if _JSON.value:
        print(json.dumps({"model": name, "answers": asked}))


def asking(model) -> Callable:
    """Return a function that streams the answer to token ids."""
    from eejax.interop.api import drafting_generator, generator_of

    rules = _THRESHOLD.values()
    if rules["threshold"] is not None:
        require(
            bool(model.config.exits),
            "--threshold",
            rules["threshold"],
            "must be left out for a model without early exits",
            "model.tune() adds exits; `eejax quickstart` shows how.",
        )
        generator, settings = generator_of(model, "recompute"), rules | _GATE.values()
    else:
        plain = generator_of(model, "full") if not _DRAFTS.value else None
        generator, settings = plain or drafting_generator(model), {}
    settings |= _SAMPLING.values() | {"stop_token_ids": model.tokenizer.end_ids}

    def ask(ids):
        with launch.flags_named({}):
            yield from generator.stream([ids], _NEW.value, chunk=FEW, growing=True, **settings)

    return ask


def session(model, talk: Conversation, ask: Callable, colors: bool):
    """Answer the lines of the input as they come; yield what `reply` returns."""
    terminal.prepare_lines()
    terminal.greet()
    while (text := terminal.read_line()) is not None:
        if text.strip() == NEW:
            talk.clear()
        elif text.strip():
            try:
                yield reply(model, talk, ask, text, colors)
            except (ConfigError, DataError) as error:
                print(f"error: {error}", file=sys.stderr)


def reply(model, talk: Conversation, ask: Callable, text: str, colors: bool) -> Mapping[str, Any]:
    """Show the answer to a message while it grows; return it with its numbers."""
    ids, decode = talk.ask(text, _NEW.value), model.tokenizer.decode
    screen, pace = terminal.Screen(model.tokenizer, ids, colors), terminal.StreamPace()
    result, stopped = None, False
    try:
        for result in ask(ids):
            pace.add(result)
            screen.show(result)
    except KeyboardInterrupt:
        if _PROMPT.value:
            raise
        stopped = True
    screen.end()
    if result is None:
        return {"prompt": text, "answer": "", "tokens": 0}
    answer = result.text(0, decode)
    talk.answer(answer)
    speed = terminal.rate([pace])
    ended = "Ctrl-C" if stopped else result.finish[0]
    print(
        f"[{result.lengths[0]} tokens, {terminal.per_second(speed)}, ended by: {ended}; "
        f"{result.legend(colors)}]\n",
        flush=True,
    )
    return {
        "prompt": text,
        "answer": answer,
        "prompt_tokens": len(ids),
        "tokens": int(result.lengths[0]),
        "tokens_per_second": speed,
        "boundaries": result.boundaries[0, : result.lengths[0]].tolist(),
        "accepted": int(result.accepted.sum()),
    }


if __name__ == "__main__":
    launch.run(main, positional=True, interrupted="\ninterrupted")
