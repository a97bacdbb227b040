"""Standard tasks through the server, and by lm-eval's own models, beside this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval, of the extra 'eval'")

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval_tasks import END, answers, ids, run, scored, written  # noqa: E402

import eejax  # noqa: E402
from eejax.interop.lm_eval import EarlyExitLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture(scope="module")
def server(small_run):
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "eejax.experiments.serve",
            f"--model=m={small_run}",
            "--port=0",
            "--slots=4",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"listening at (http://\S+)", line):
            break
    else:
        raise AssertionError("".join(said))
    rest = threading.Thread(target=process.stderr.read, daemon=True)
    rest.start()
    yield found[1]
    process.terminate()
    assert process.wait(60) == 0
    rest.join()
    process.stderr.close()


@pytest.mark.slow
def test_the_server_answers_lm_evals_own_client(server, own_tasks, small_run):
    for package in ("aiohttp", "tenacity"):
        pytest.importorskip(package, reason="needs lm-eval's extra 'api'")
    # It asks the server for tokens, and keeps two of the context: one that is generated, and one
    # for that one.
    client = dict(
        model="m",
        base_url=f"{server}/v1/completions",
        max_length=128,
        custom_prefix_token_id=END,
        max_retries=1,
    )
    theirs, by_client = run(own_tasks, "local-completions", model_args=client)
    lm = EarlyExitLM(small_run, batch_size=4, max_length=126)
    own, in_process = run(own_tasks, lm)
    follows(get_model("local-completions")(**client), lm)
    counts = {}
    for task in ("choice", "word"):
        a, b = answers(theirs[task]), answers(own[task])
        np.testing.assert_allclose([x for x, _ in a], [x for x, _ in b], rtol=1e-5, atol=1e-3)
        assert [x for _, x in a] == [x for _, x in b]
        counts[task] = len(a)
    a, b = answers(theirs["whole"]), answers(own["whole"])
    np.testing.assert_allclose(a, b, rtol=1e-5)
    longest = max(len(s["doc"]["context"]) for s in own["whole"])
    assert longest > 2 * 128  # more than one window
    assert answers(theirs["write"]) == answers(own["write"]) != [""] * 5
    assert counts == {"choice": 48, "word": 8} and len(a) == 3
    for task, metrics in in_process.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert by_client[task][name] == pytest.approx(value, rel=1e-3), (task, name)


def follows(theirs, lm):
    """What the model would write itself is greedy, and nothing else is."""
    contexts = ["exit layer tok", "early depth", "gate"]
    texts = written(lm, contexts, until=[], max_gen_toks=16)
    other = [text[:-1] + ("a" if text[-1] != "a" else "b") for text in texts]
    pairs = [*zip(contexts, texts, strict=True), *zip(contexts, other, strict=True)]
    a, b = scored(theirs, pairs), scored(lm, pairs)
    np.testing.assert_allclose([x for x, _ in a], [x for x, _ in b], rtol=1e-5, atol=1e-3)
    assert [x for _, x in a] == [x for _, x in b] == [True] * 3 + [False] * 3


def bytes_tokenizer(folder):
    """For tinylm, whose tokens are bytes, in the form that transformers reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's alphabet: bytes that can be shown are themselves, the others follow from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    letters = [chr(b) if b in shown else chr(next(rest)) for b in range(256)]
    inner = Tokenizer(models.BPE({letter: b for b, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    about = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=letters[2])
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.mark.slow
def test_it_agrees_with_lm_evals_model_of_transformers(eejax_data, own_tasks, tmp_path):
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason="needs the peers that benchmarks compare against")
    folder = tmp_path / "tinylm"
    shutil.copytree(eejax_data / "models" / "tinylm", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    bytes_tokenizer(folder)
    text = "Ünïcode “quoted” text\n"
    assert eejax.load(folder).tokenizer.encode(text).tolist() == ids(text)
    args = dict(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    theirs, by_torch = run(own_tasks, "hf", model_args=args)
    lm = EarlyExitLM(folder, batch_size=4)
    own, in_process = run(own_tasks, lm)
    follows(get_model("hf")(**args), lm)
    for task in ("choice", "word"):
        a, b = answers(theirs[task]), answers(own[task])
        np.testing.assert_allclose([x for x, _ in b], [x for x, _ in a], rtol=1e-5, atol=1e-3)
        assert [x for _, x in b] == [x for _, x in a]
    a, b = answers(theirs["whole"]), answers(own["whole"])
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-3)
    assert len(a) == 3 and min(a) < -100
    assert answers(own["write"]) == answers(theirs["write"]) != [""] * 5
    for task, metrics in by_torch.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert in_process[task][name] == pytest.approx(value, rel=1e-3), (task, name)
