"""Write the model of a run as a folder that transformers opens.

    eejax export-hf --workdir=runs/tinylm --output=models/tinylm_exits

Early exits lie in files of their own beside the weights (eejax.json, eejax_exits.safetensors):
transformers opens the model without them, and eejax import-hf with them.
"""

from __future__ import annotations

from absl import flags

from eejax.experiments import field_flags, launch
from eejax.train.runs import open_run

_RUN = field_flags.define(open_run, ("workdir", "step", "ema"))
_OUTPUT = flags.DEFINE_string("output", None, "The folder, which must not exist yet.")
_FAMILY = flags.DEFINE_string("family", None, "Its model_type; by default the first that fits.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the written weights."
)
flags.mark_flag_as_required("output")


def main() -> None:
    from eejax.checkpoint.hf import save_pretrained
    from eejax.checkpoint.hf.families import FAMILIES

    model = _RUN().model
    known = model.metadata.get("pretrained", {}).get("family")
    known = known if known in FAMILIES else None  # some recognised families are written as another
    with launch.flags_named({}):
        family = save_pretrained(
            _OUTPUT.value,
            model.config,
            model.params,
            family=_FAMILY.value or known,
            tokenizer=model.tokenizer,
            generation=model.generation,
            dtype=_DTYPE.value,
        )
    print(f"{family}, {model.config.n_exits} early exits beside it, in {_OUTPUT.value}")


if __name__ == "__main__":
    launch.run(main)
