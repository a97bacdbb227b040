"""Show, extend or rebuild a repository of measurements of models that are served by choice.

    eejax repository --repository=runs/helios.db --scores=small=small.json
    eejax repository --repository=runs/helios.db
    eejax repository --repository=runs/helios.db --rebuild

--scores imports benchmark results for the model of a name, as in `eejax serve --model`: the output
of `eejax score-tasks --json`, or the results file of lm-eval. A server uses them as the quality of
its models with --quality=benchmark. --rebuild renames an unusable file, and makes a new one;
nothing is deleted. Without either the content is shown.
"""

from __future__ import annotations

from absl import flags

from eejax.common.errors import ConfigError
from eejax.common.paths import expanded
from eejax.experiments import launch

_REPOSITORY = flags.DEFINE_string("repository", None, "An SQLite file, as of eejax serve.")
_SCORES = flags.DEFINE_multi_string(
    "scores", [], "NAME=RESULTS.json: benchmark results of a model to import."
)
_REBUILD = flags.DEFINE_bool("rebuild", False, "Rename the file aside and make a new one.")
flags.mark_flag_as_required("repository")


def main() -> None:
    from eejax.experiments.benchmark_scores import read_scores
    from eejax.helios import repository

    path = _REPOSITORY.value
    if not path:
        raise ConfigError("--repository = '': must name a file.")
    if _REBUILD.value:
        aside = repository.rebuild(path)
        print(f"{path} is new" + (f"; what was there is in {aside}" if aside else ""))
    found = []
    for text in _SCORES.value:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--scores = {text!r}: must be NAME=RESULTS.json.")
        found.append((name, file, read_scores(expanded(file), name)))
    target = expanded(path)
    if not (found or _REBUILD.value) and not target.exists():
        fix = "--rebuild makes one." if target.parent.is_dir() else repository.advice(str(target))
        raise ConfigError(f"--repository = {path!r}: there is no such file. {fix}")
    kept = repository.Repository(path)
    for name, file, scores in found:
        kept.import_scores(scores)
        print(f"{name}: {len(scores)} scores of {len({s.task for s in scores})} tasks from {file}")
    if not (found or _REBUILD.value):
        print(measurement_tables(kept))
    kept.close()


def measurement_tables(kept) -> str:
    """Format tables of the scores and of each model's last evaluation.

    Raises:
      DataError: for a row that cannot be used; the error names it.
    """
    from eejax.analysis import table
    from eejax.helios.objectives import METRICS
    from eejax.helios.repository import date

    kept.check()
    scores = [
        [s.model, str(s.layers or "all"), s.task, s.metric, f"{s.value:.4g}"] for s in kept.scores()
    ]
    rows = []
    for model in kept.models():
        for row in kept.history(model):
            values = [f"{getattr(row.telemetry, metric):.4g}" for metric in METRICS]
            rows.append([model, date(row.time), str(row.prompts), *values])
    parts = [
        table(["model", "layers", "task", "metric", "value"], scores) if scores else "no scores",
        table(["model", "evaluated", "prompts", *METRICS], rows) if rows else "no evaluations",
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    launch.run(main)
