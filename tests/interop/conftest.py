"""Fixtures for tests of lm-eval: a model, tasks, and no network."""

from __future__ import annotations

import json
import socket

import pytest
from lm_eval_tasks import TASKS


@pytest.fixture
def nobody_else(monkeypatch):
    """No connection leaves this machine."""
    connect = socket.socket.connect

    def local(own, address):
        if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1",):
            raise AssertionError(f"a connection to {address}")
        return connect(own, address)

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture(scope="module")
def lm(small_run):
    from eejax.interop.lm_eval import EarlyExitLM

    return EarlyExitLM(small_run, batch_size=4)


@pytest.fixture(scope="module")
def own_tasks(eejax_data, tmp_path_factory):
    """A folder of tasks over records of real data sets."""
    folder = tmp_path_factory.mktemp("tasks")

    def lines(name):
        return (eejax_data / name).read_text(encoding="utf-8").splitlines()

    records = {
        "choice": lines("openbookqa/test.jsonl")[:12],
        "word": lines("lambada/lambada_openai.jsonl")[:8],
        "whole": sorted(lines("lambada/lambada_openai.jsonl")[:40], key=len)[-3:],
        "write": [json.dumps({"context": f"{a} layer ", "continuation": "x"}) for a in "abcde"],
    }
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(records[name]) + "\n", encoding="utf-8")
        own = dict(data_files={"test": str(file)}, cache_dir=str(folder / "cache"))
        about = dict(task=name, dataset_path="json", dataset_kwargs=own, test_split="test")
        # YAML reads JSON.
        (folder / f"{name}.yaml").write_text(json.dumps(about | task), encoding="utf-8")
    return folder
