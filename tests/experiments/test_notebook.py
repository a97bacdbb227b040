"""The notebook runs top to bottom, on a tiny budget."""

import importlib.util

import nbclient
import nbformat
import pytest


@pytest.fixture(scope="module")
def executed(repo_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(repo_root / "experiments/notebooks/quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    patch = pytest.MonkeyPatch()
    patch.setenv("EEJAX_NOTEBOOK_STEPS", "6")
    patch.setenv("EEJAX_NOTEBOOK_WORKDIR", str(folder / "run"))
    patch.setenv("XLA_FLAGS", "")  # one device, as a user has
    try:
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        yield client.execute()
    finally:
        patch.undo()


def outputs(notebook, kind):
    return [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == kind]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs_and_shows_its_figures(executed):
    images = [o for o in outputs(executed, "display_data") if "image/png" in o.data]
    assert len(images) == 3
    text = "".join(o.text for o in outputs(executed, "stream") if o.name == "stdout")
    assert "exit_2" in text and "layers each" in text and "times as fast" in text


def test_it_is_stored_without_outputs(repo_root):
    notebook = nbformat.read(repo_root / "experiments/notebooks/quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "find_spec" in notebook.cells[1].source, "the first cell installs what is missing"


def test_without_a_source_it_says_what_to_set(repo_root, tmp_path, monkeypatch):
    notebook = nbformat.read(repo_root / "experiments/notebooks/quickstart.ipynb", as_version=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EEJAX_SOURCE", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="set EEJAX_SOURCE"):
        exec(notebook.cells[1].source, {})
