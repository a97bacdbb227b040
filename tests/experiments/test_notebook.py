"""The notebooks run top to bottom, on a tiny budget."""

import importlib.util
import re

import nbclient
import nbformat
import pytest
from tiny_chat import tiny_chat

NAMES = ("training", "exits_and_gates", "routers", "real_model")


def read(root, name):
    return nbformat.read(root / f"experiments/notebooks/{name}.ipynb", as_version=4)


@pytest.fixture
def execute(monkeypatch, one_device):
    """The notebook with its outputs, run in `folder` with these settings in its environment."""

    def run(notebook, folder, **settings):
        nbformat.validate(notebook)
        for setting, value in settings.items():
            monkeypatch.setenv(f"EEJAX_NOTEBOOK_{setting}", str(value))
        monkeypatch.setenv("XLA_FLAGS", one_device)
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        return client.execute()

    return run


def outputs(notebook, kind):
    return [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == kind]


def printed(notebook):
    return "".join(o.text for o in outputs(notebook, "stream") if o.name == "stdout")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_runs_and_shows_its_figures(repo_root, tmp_path, execute):
    notebook = read(repo_root, "training")
    for large, small in (
        ('source="python-stdlib"', 'source="python-stdlib", max_bytes=300_000'),
        ("d_model=128", "d_model=32"),
    ):
        (cell,) = [c for c in notebook.cells if large in c.source]
        cell.source = cell.source.replace(large, small)
    executed = execute(notebook, tmp_path, STEPS=2, WORKDIR=tmp_path / "run")
    images = [o for o in outputs(executed, "display_data") if "image/png" in o.data]
    assert len(images) == 3
    text = printed(executed)
    assert "exit_2" in text and "layers each" in text and "times as fast" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exits_and_gates_shows_a_run_in_colors_and_curves(repo_root, tmp_path, small_run, execute):
    executed = execute(read(repo_root, "exits_and_gates"), tmp_path, WORKDIR=small_run)
    shown = outputs(executed, "display_data")
    images = [o for o in shown if "image/png" in o.data]
    assert len(images) == 2 and all(len(o.data["image/png"]) > 10_000 for o in images)
    texts = [o.data["text/html"] for o in shown if "text/html" in o.data]
    assert len(texts) == 2
    for text in texts:
        assert "exit after layer 1</span>" in text and "final exit</span>" in text
    # Its own tokens, each with a confidence, behind the prompt.
    tokens = texts[0].partition("<b>|</b>")[2]
    assert tokens.count('<span style="') > 20 and re.search(r"confidence [01]\.\d\d\"", tokens)
    text = printed(executed)
    assert "boundaries [1, 2]" in text and "layers each" in text
    table = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "%" in line}
    for gate in ("max_probability", "margin", "entropy", "saturation"):
        threshold, agreement, depth = table[gate]
        assert float(agreement.strip("%")) >= 95 and 1 <= float(depth) <= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_routers_calibrates_and_writes(repo_root, tmp_path, eejax_data, execute):
    text = tmp_path / "text.txt"
    whole = (eejax_data / "tinyshakespeare" / "train.txt").read_bytes()
    text.write_bytes(whole[:60_000])
    executed = execute(
        read(repo_root, "routers"),
        tmp_path,
        MODEL=eejax_data / "models" / "tinylm",
        TOKENIZER="bytes",
        TEXT=text,
        TOKENS=12_000,
        PROMPT="ROMEO:",
        OUT=tmp_path / "out",
    )
    shown = outputs(executed, "display_data")
    images = [o for o in shown if "image/png" in o.data]
    assert len(images) == 2 and all(len(o.data["image/png"]) > 10_000 for o in images)
    (written,) = [o.data["text/html"] for o in shown if "text/html" in o.data]
    assert written.count("background:#") >= 3  # tokens that left early
    text = printed(executed)
    assert "12 layers of width 256" in text and "The full model:\nROMEO:" in text
    table = [line.split() for line in text.splitlines() if line.endswith(" kept")]
    assert [row[0] for row in table] == ["3", "6", "9"]
    assert all(0.6 < float(row[2]) < 1 for row in table)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_model_tunes_and_asks(repo_root, tmp_path, execute):
    tiny_chat().save(tmp_path / "model")
    settings = dict(MODEL=tmp_path / "model", TOKENS=2048, NEW=24, OUT=tmp_path / "out")
    executed = execute(read(repo_root, "real_model"), tmp_path, **settings)
    shown = outputs(executed, "display_data")
    assert sum("image/png" in o.data for o in shown) == 1
    assert sum("text/html" in o.data for o in shown) == 2
    text = printed(executed)
    assert "4 layers of width 16" in text and "the full model's tokens: True" in text


@pytest.mark.parametrize("name", NAMES)
def test_they_are_stored_without_outputs(repo_root, name):
    notebook = read(repo_root, name)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "find_spec" in notebook.cells[1].source, "the first cell installs what is missing"
    assert notebook.cells[1].source == read(repo_root, NAMES[0]).cells[1].source


def test_without_a_source_it_says_what_to_set(repo_root, tmp_path, monkeypatch):
    notebook = read(repo_root, "training")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EEJAX_SOURCE", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="set EEJAX_SOURCE"):
        exec(notebook.cells[1].source, {})
