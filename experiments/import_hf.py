"""Import a pretrained model as a run, which every other launcher takes by its --workdir.

    eejax import-hf --model=models/tinylm --tokenizer=bytes --workdir=runs/tinylm \\
        --source='texts/*.txt'

--model is a folder of the Hugging Face form (config.json, safetensors or .bin, a tokenizer), a GGUF
file, or the name of a model on the Hub or in an installed package (smollm2). --source is the text
on which the model is evaluated and exits are tuned. The model has no early exits, except those that
eejax export-hf wrote beside it; eejax tune adds some.
"""

from __future__ import annotations

from absl import flags

from eejax.experiments import launch

_MODEL = flags.DEFINE_string("model", None, "The folder, a GGUF file, or the model's name.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the new run.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "'bytes', a tokenizer.json, a .model or a folder; the model's own by default.",
)
_SOURCE = flags.DEFINE_list("source", None, "Text files or globs; none by default.")
_LENGTH = flags.DEFINE_integer("length", None, "Tokens of a sequence; up to 256 by default.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the model's computation."
)
flags.mark_flags_as_required(["model", "workdir"])


def main() -> None:
    from eejax import data
    from eejax.checkpoint.hf.load import fetched
    from eejax.common import progress
    from eejax.common.trees import size
    from eejax.train.imported import import_pretrained

    if _SOURCE.value is not None:
        data.source(tuple(_SOURCE.value)).describe()  # fail before the model is read
    path = fetched(_MODEL.value)
    text = {} if _SOURCE.value is None else {"source": tuple(_SOURCE.value)}
    text |= {} if _LENGTH.value is None else {"length": _LENGTH.value}
    launch.say(f"importing {path} ...")
    with progress.waiting("importing"):
        made = import_pretrained(
            path,
            _WORKDIR.value,
            tokenizer=_TOKENIZER.value,
            dtype=_DTYPE.value,
            data=text,
            watch=launch.say,
        )
    config = made.config
    if made.guessed:
        launch.say(made.guessed)
    print(
        f"{made.family.model_type}: {config.n_layers} layers x {config.d_model}, "
        f"{size(made.params):,} parameters, {config.vocab_size} tokens, context "
        f"{config.context_length}, {config.n_exits} early exits, in {_WORKDIR.value}"
    )


if __name__ == "__main__":
    launch.run(main)
