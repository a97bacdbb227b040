"""Tasks for lm-eval over real records, and its requests and answers."""

from __future__ import annotations

END = 256  # of texts of bytes
TASKS = {
    "choice": dict(
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_choice="{{choices}}",
        doc_to_target="gold",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    ),
    "word": dict(
        output_type="loglikelihood",
        doc_to_text="{{context}}",
        doc_to_target=" {{continuation}}",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    ),
    "whole": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{context}}",
        metric_list=[{"metric": "word_perplexity"}],
    ),
    "write": dict(
        output_type="generate_until",
        doc_to_text="{{context}}",
        doc_to_target="{{continuation}}",
        generation_kwargs={"until": ["t ", "."], "max_gen_toks": 24, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    ),
}


def run(folder, model, tasks=tuple(TASKS), **args):
    """{task: samples in order}, and the results, by lm-eval itself."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **args
    )
    samples = {t: sorted(found["samples"][t], key=lambda s: s["doc_id"]) for t in tasks}
    return samples, found["results"]


def answers(samples) -> list:
    """All responses of a task's samples: one or more of each."""
    return [answer for s in samples for (answer,) in s["resps"]]


def asked(kind, *args):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, args, 0)


def scored(lm, pairs):
    return lm.loglikelihood([asked("loglikelihood", *p) for p in pairs], disable_tqdm=True)


def rolled(lm, texts):
    return lm.loglikelihood_rolling([asked("rolling", t) for t in texts], disable_tqdm=True)


def written(lm, contexts, **settings):
    requests = [asked("generate_until", c, settings) for c in contexts]
    return lm.generate_until(requests, disable_tqdm=True)


def ids(text):
    return list(text.encode())
