"""Standard tasks by lm-eval, in this process."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval, of the extra 'eval'")

from launchers import call  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402
from lm_eval_tasks import END, answers, asked, ids, rolled, run, scored, written  # noqa: E402
from reference_model import exit_logits, tree64  # noqa: E402

from eejax.common.errors import ConfigError  # noqa: E402
from eejax.inference import Generator  # noqa: E402
from eejax.inference.scoring import score  # noqa: E402
from eejax.inference.weights import prepare  # noqa: E402
from eejax.interop.lm_eval import EarlyExitLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("nobody_else")

TIE = 1e-3  # a gap below which float32 may decide otherwise than float64

PAIRS = (
    ("exit layer", " token"),
    ("early depth ", "gate"),  # a space that belongs to the continuation
    ("", "loss head"),
    (" \n", "token gate"),  # a context that belongs to the continuation, all of it
    ("state\n", "exit exit exit exit exit exit."),
    ("token " * 30, "early loss"),  # a context longer than the model's, which is 128
    ("layer", " depth" * 40),  # a continuation longer than that
)


def windows(lm, pair):
    """(tokens read, tokens told from the last of them) of a pair, as lm-eval cuts texts."""
    context, continuation = pair
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation  # spaces belong to what they begin
    context = ids(kept) or [END]
    most = lm.max_length
    if len(ids(continuation)) <= most:
        whole = [*context, *ids(continuation)][-(most + 1) :]
        return [(whole[:-1], ids(continuation))]
    found = []
    for begin in range(0, len(ids(continuation)), most):
        told = ids(continuation)[begin : begin + most]
        found.append(([*context, *ids(continuation)[: begin + len(told)]][-most - 1 : -1], told))
    return found


@pytest.fixture(scope="module")
def reference(lm):
    """Of (tokens read, told): log-probabilities [exits, told, v] in float64, in plain numpy."""
    params, known = tree64(lm.model.params), {}

    def of(read, told):
        key = tuple(read), len(told)
        if key not in known:
            y = np.stack(exit_logits(params, lm.config, np.array(read)))[:, -len(told) :, :257]
            y = y - y.max(-1, keepdims=True)
            known[key] = y - np.log(np.exp(y).sum(-1, keepdims=True))
        return known[key]

    return of


def expected(lm, reference, pairs, rule):
    """[(log-likelihood, greedy or None where that is a near tie)], and the layers of each token.

    rule: exit numbers [told] of log-probabilities [exits, told, v], or None where they are near to
    another decision.
    """
    found, layers = [], []
    for pair in pairs:
        total, greedy, tied = 0.0, True, False
        for read, told in windows(lm, pair):
            y = reference(read, told)
            number = rule(y)
            row = np.arange(len(told))
            y = y[number, row]
            picked, (second, top) = y[row, told], np.sort(y, -1)[:, -2:].T
            total += picked.sum()
            greedy &= bool((picked == top).all())
            tied |= bool((top - second < TIE).any())
            layers += np.array(lm.config.exit_boundaries)[number].tolist()
        found.append((total, None if tied else greedy))
    return found, layers


def agree(got, want):
    np.testing.assert_allclose([a for a, _ in got], [a for a, _ in want], rtol=2e-5, atol=2e-4)
    sure = [(a, b) for (_, a), (_, b) in zip(got, want, strict=True) if b is not None]
    assert sure and all(a == b for a, b in sure)


def test_every_exit_scores_as_float64_does(lm, reference):
    texts = "".join(context + text for context, text in PAIRS)
    assert texts.isascii() and lm.config.exit_boundaries == (1, 2, 3) and lm.max_length == 128
    assert sum(len(windows(lm, pair)) > 1 for pair in PAIRS) == 1
    totals = set()
    for e, boundary in enumerate((1, 2, 3)):
        one = lm.at(exit=boundary)
        want, layers = expected(lm, reference, PAIRS, lambda y, e=e: np.full(y.shape[1], e))
        agree(scored(one, PAIRS), want)
        assert one.depth == boundary and len(layers) == one._tokens
        totals.add(round(want[0][0], 3))
    assert len(totals) == 3  # exits differ
    assert scored(lm, PAIRS) == scored(lm.at(exit=3), PAIRS)  # the default


def test_the_first_exit_that_is_confident_answers(lm, reference):
    thresholds = np.array([0.6, 0.45])

    def leaves(y):
        p = np.exp(y[:2].max(-1))
        assert (np.abs(p - thresholds[:, None]) > 1e-5).all()
        return np.concatenate([p >= thresholds[:, None], np.ones_like(p[:1], bool)]).argmax(0)

    one = lm.at(thresholds="0.6/0.45")
    want, layers = expected(lm, reference, PAIRS, leaves)
    agree(scored(one, PAIRS), want)
    assert set(layers) == {1, 2, 3} and one.depth == pytest.approx(np.mean(layers))
    agree(scored(lm.at(thresholds=[0.6, 0.45], gate="max_probability"), PAIRS), want)
    assert scored(lm.at(thresholds=1.0), PAIRS) == scored(lm, PAIRS)
    assert scored(lm.at(thresholds=0), PAIRS) == scored(lm.at(exit=1), PAIRS) != scored(lm, PAIRS)
    assert scored(lm.at(thresholds=0.5, gate="margin"), PAIRS) != scored(
        lm.at(thresholds=0.5), PAIRS
    )


def test_whole_texts_are_scored_in_windows(lm, reference):
    texts = ["exit layer token early", "depth gate loss head state " * 15, "", "e" * 128]
    assert len(texts[1]) > 3 * 128
    short = EarlyExitLM(lm.model.source, batch_size=4, max_length=40)
    totals = set()
    for own, boundary in ((lm, 1), (lm, 3), (short, 3)):
        want = []
        for text in texts:
            total = 0.0
            for window in get_rolling_token_windows(ids(text), END, own.max_length, 1):
                context, told = make_disjoint_window(window)
                y = reference([*context, *told][:-1], told)[boundary - 1]
                total += y[np.arange(len(told)), told].sum()
            want.append(total)
        got = rolled(own.at(exit=boundary), texts)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)
        assert got[2] == 0 and all(g < 0 for g in got[:2])
        totals.add(got[1])
    assert len(totals) == 3


def test_what_is_generated_is_greedy_by_the_same_exits(lm):
    contexts = ["exit layer tok", "e", "state loss" * 20, ""]
    plain, found = Generator.make(lm.model.params, lm.config, "full"), {}
    for chosen in (dict(), dict(exit=1), dict(thresholds=0.2)):
        one = lm.at(**chosen)
        texts = found[str(chosen)] = written(one, contexts, until=[], max_gen_toks=24)
        assert 1 <= one.depth <= 3
        assert one.depth == chosen.get("exit", 3) or 1 < one.depth < 3 and "thresholds" in chosen
        assert all(0 < len(text) <= 24 and text.isascii() for text in texts[:3])
        # Told again behind what was read: 24 tokens of the context are kept free.
        pairs = [(c[-104:], t) for c, t in zip(contexts[:3], texts, strict=False)]
        assert [greedy for _, greedy in scored(one, pairs)] == [True] * 3
    assert len(set(map(str, found.values()))) == 3
    for context, text in zip(contexts, found["{}"], strict=True):
        prompt = (ids(context) or [END])[-104:]
        result = plain.generate([prompt], 24, stop_token_ids=lm.model.tokenizer.end_ids)
        assert text == lm.model.tokenizer.decode(result.ids(0))


def test_generations_end_where_a_task_says(lm):
    contexts = ["exit layer tok", "early depth ga", "loss"]
    whole = written(lm, contexts, until=[], max_gen_toks=24)
    stops = [" l", "e"]
    assert any(stop in text for text in whole for stop in stops)
    cut = [re.split("|".join(stops), text)[0] for text in whole]
    assert written(lm, contexts, until=stops, max_gen_toks=24) == cut
    assert written(lm, contexts, until="e", max_gen_toks=24) == [t.split("e")[0] for t in whole]
    assert written(lm, contexts, until=[], max_gen_toks=20) == [text[:20] for text in whole]
    # Settings of their own for each request, in the order of the requests.
    mixed = [(contexts[0], 20), (contexts[1], 24), (contexts[2], 20)]
    requests = [asked("generate_until", c, dict(max_gen_toks=n)) for c, n in mixed]
    got = lm.generate_until(requests, disable_tqdm=True)
    assert got == [whole[0][:20], whole[1], whole[2][:20]]
    # Greedy unless a task samples, whatever temperature it names.
    greedy = dict(max_gen_toks=24, do_sample=False, temperature=0.0)
    assert written(lm, contexts, **greedy) == whole
    sampled = dict(max_gen_toks=24, do_sample=True, temperature=1.5, top_p=0.95)
    drawn = written(lm, contexts[:1] * 3, **sampled)
    assert len(set(drawn)) == 3 and drawn == written(lm, contexts[:1] * 3, **sampled)
    for wrong, told in (
        (dict(max_gen_toks=128), "max_gen_toks = 128: must be in 1..127"),
        (dict(num_beams=4), r"generation_kwargs = \['num_beams'\]: must be until"),
        (dict(do_sample=True, top_p=2.0), "top_p = 2.0"),
    ):
        with pytest.raises(ConfigError, match=told):
            written(lm, contexts, **wrong)


def test_mistakes_are_named(lm, small_run):
    for wrong, told in (
        (dict(exit=4), r"exit = 4: must be one of \[1, 2, 3\], in layers"),
        (dict(exit="a"), "exit = 'a': must be one of"),
        (dict(exit=1, thresholds=0.5), "exit = 1: must be None beside thresholds"),
        (dict(gate="margin"), "gate = 'margin': must be None without thresholds"),
        (dict(thresholds=0.5, gate="x"), "gate = 'x': must be one of"),
        (dict(thresholds=1.5), r"thresholds = 1.5: must lie in \[0, 1\]"),
        (dict(thresholds=[0.5] * 3), r"thresholds = \[0.5, 0.5, 0.5\]: must be one number"),
        (dict(thresholds="0.5/x"), "thresholds = '0.5/x': must be a number"),
    ):
        with pytest.raises(ConfigError, match=told):
            lm.at(**wrong)
    for wrong, told in (
        (dict(batch_size=0), "batch_size = 0: must be an integer of at least 1"),
        (dict(max_length=129), "max_length = 129: must be at most 128"),
        (dict(max_length=1), "max_length = 1: must be an integer of at least 2"),
        (dict(tokenizer="bytes"), "tokenizer = 'bytes': must be None"),
    ):
        with pytest.raises(ConfigError, match=told):
            EarlyExitLM(small_run, **wrong)
    with pytest.raises(ConfigError, match="path = None: must name a model"):
        EarlyExitLM()
    with pytest.raises(ConfigError, match="has no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    assert math.isnan(lm.at(exit=1).depth)


def test_conversations_go_by_the_models_template(lm, small_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(source)
    own = EarlyExitLM(folder)
    said = [dict(role="user", content="Why?"), dict(role="assistant", content="As ")]
    assert own.apply_chat_template(said[:1]) == "<user>Why?</><assistant>"
    assert own.apply_chat_template(said, False) == "<user>Why?</><assistant>As "
    assert own.chat_template(True) == source and lm.chat_template(True) == ""
    assert own.tokenizer_name == lm.tokenizer_name == lm.model.tokenizer.fingerprint


def test_tasks_by_name(lm, own_tasks, small_run):
    """`simple_evaluate` as anybody calls it, against a text at a time."""
    weights = prepare(lm.model.params, lm.config)
    found = {}
    for e, arguments in enumerate((f"path={small_run},exit=1,batch_size=4", f"path={small_run}")):
        samples, results = run(
            own_tasks, "eejax", ["choice", "word"], model_args=arguments, limit=5
        )
        number = (0, 2)[e]
        told = answers(samples["choice"])
        assert len(told) == 20 and len(samples["choice"]) == 5
        pairs = [
            (s["doc"]["query"], " " + c) for s in samples["choice"] for c in s["doc"]["choices"]
        ]
        fit = [len(ids(context + text)) <= 128 for context, text in pairs]
        assert sum(fit) > 10
        for pair, (total, greedy), fits in zip(pairs, told, fit, strict=True):
            if fits:
                n = len(ids(pair[1]))
                one = score(weights, lm.config, ids("".join(pair)), exit=number)
                np.testing.assert_allclose(total, one.logprob[-n:].sum(), rtol=1e-5, atol=1e-3)
                assert greedy == one.top[-n:].all()
        best = [max(range(4), key=lambda i: told[4 * s + i][0]) for s in range(5)]
        right = np.mean(
            [b == s["doc"]["gold"] for b, s in zip(best, samples["choice"], strict=True)]
        )
        assert results["choice"]["acc,none"] == pytest.approx(right)
        found[e] = told
    assert found[0] != found[1]


@pytest.mark.slow
def test_the_launcher(own_tasks, lm, small_run, capsys, monkeypatch):
    call(
        "eejax.experiments.score_tasks",
        f"--model={small_run}",
        "--tasks=choice,whole,write",
        f"--include_path={own_tasks}",
        "--thresholds=0.5,0.9/0.3",
        "--limit=4",
        "--json",
        "--batch_size=4",
    )
    out, err = capsys.readouterr()
    *table, last = out.splitlines()
    names = ["exit 1", "exit 2", "exit 3", "threshold 0.5", "threshold 0.9/0.3"]
    assert [line[:17].strip() for line in table[2:]] == names
    assert "choice acc" in table[0] and "depth of 3" in table[0] and "stderr" not in table[0]
    # Once for all rows, of each kind; a bar may say that it is full twice.
    assert err.count("scoring:   0%") == 2 and "scoring: 100%" in err
    assert "threshold 0.9/0.3 (5 of 5)" in err
    found = json.loads(last)
    assert found["layers"] == 3 and [row["name"] for row in found["rows"]] == names
    assert [row["depth"] for row in found["rows"][:3]] == [1, 2, 3]
    chosen = [dict(exit=1), dict(exit=2), dict(), *({"thresholds": t} for t in (0.5, "0.9/0.3"))]
    for row, line, which in zip(found["rows"], table[2:], chosen, strict=True):
        one = lm.at(**which)
        _, results = run(own_tasks, one, ["choice", "whole", "write"], limit=4)
        for task, metric in (("choice", "acc"), ("whole", "word_perplexity")):
            value = row["tasks"][task][metric]
            assert value == pytest.approx(results[task][f"{metric},none"], rel=1e-4)
            assert f"{value:.4g}" in line
        assert row["depth"] == pytest.approx(one.depth) and 1 <= row["depth"] <= 3
    assert 1 < found["rows"][3]["depth"] < 3
    assert len({row["tasks"]["whole"]["word_perplexity"] for row in found["rows"]}) == 5
    # Reading lm-eval's own tasks takes seconds.
    few = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    for wrong, told in (
        ("--tasks=nothing", "--tasks = 'nothing': there is none in lm-eval"),
        ("--exits=7", "--exits = 7: must be one of"),
        ("--thresholds=2", "--thresholds = 2.0: must lie in"),
        ("--exits=", "--exits = '': leaves nothing to score"),
        ("--include_path=nowhere", "--include_path = 'nowhere': must be a folder"),
    ):
        given = [f"--model={small_run}", "--tasks=choice", f"--include_path={own_tasks}", wrong]
        with pytest.raises(ConfigError, match=re.escape(told)):
            call("eejax.experiments.score_tasks", *given)
