"""Measure loss, perplexity and bits per byte of every exit of a trained model.

    eejax evaluate --workdir=runs/demo
    eejax evaluate --workdir=runs/demo --text='books/*.txt'

Without --text the text is the run's own validation split, all of it. The last line printed is one
JSON object. Several processes (docs/SCALING.md) run each batch on all of their devices.
"""

from __future__ import annotations

import json
import tempfile

from absl import flags

from eejax.experiments import field_flags, launch
from eejax.train.runs import open_run

_RUN = field_flags.define(open_run, ("workdir", "step", "ema"))
_TEXT = flags.DEFINE_multi_string("text", [], "Text files or globs to evaluate on instead.")
_BATCHES = flags.DEFINE_integer("batches", None, "Maximum number of batches.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences at a time.", lower_bound=1)
launch.define_processes()


def main() -> None:
    import jax

    from eejax import data
    from eejax.sharding import distributed
    from eejax.sharding.mesh import MeshConfig, check_batch, make_mesh
    from eejax.train import evaluate, inputs, metrics, step

    mesh = make_mesh(MeshConfig(data=jax.device_count() if distributed.is_multiprocess() else 1))
    check_batch(_BATCH_SIZE.value, mesh, field="--batch_size")
    run = _RUN(mesh=mesh)
    model, config = run.model, run.experiment.data
    with tempfile.TemporaryDirectory() as folder:
        if _TEXT.value:
            source = data.source(_TEXT.value, text_field=config.text_field)
            packed = data.pack(source, model.tokenizer, folder, validation_fraction=0.0)
            batches = data.batches(
                packed.split("train"),
                _BATCH_SIZE.value,
                config.length,
                document_masks=config.document_masks,
                limit=_BATCHES.value,
            )
            batches = [(1.0, (inputs.strip(batch, config.document_masks) for batch in batches))]
        else:
            launch.require_text(config.source, _RUN["workdir"], "text")
            batches = inputs.held_out(config, run.dataset(), _BATCH_SIZE.value, _BATCHES.value)
        own = f"the run's held-out part of {config.source}"
        launch.say(f"evaluating on {', '.join(_TEXT.value) or own} ...")
        params, architecture = evaluate.of_all_tokens(model.params, model.config)
        result = evaluate.evaluate_mixture(
            step.make_eval_step(architecture, mesh),
            params,
            batches,
            mesh,
            metrics.exit_names(architecture),
            model.tokenizer.byte_lengths,
        )
    if not distributed.is_first():
        return
    averaged = ", averaged parameters" if _RUN["ema"] else ""
    print(f"step {model.step} of {_RUN['workdir']}{averaged}")
    print(result.table())
    metrics = result.metrics("eval_ema" if _RUN["ema"] else "eval")
    print(json.dumps({"step": model.step, "tokens": result.tokens} | metrics))


if __name__ == "__main__":
    launch.run(main)
