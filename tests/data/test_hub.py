"""Data sets read by the `datasets` package, from local folders in the Hub's form."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from eejax.common.errors import ConfigError, DataError
from eejax.data import HubDataset, source


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """The library neither reaches the network nor leaves files behind."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    home = pathlib.Path(huggingface_hub.constants.HF_HOME)
    before = sorted(home.rglob("*"))
    yield
    assert sorted(home.rglob("*")) == before


def write(path: pathlib.Path, texts: list[str], **more) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text, "meta": {"body": text.upper()}, **more} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    write(tmp_path / "corpus" / "train.jsonl", ["one", " \n", "two"])
    write(tmp_path / "corpus" / "validation.jsonl", ["held out"])
    return tmp_path / "corpus"


def test_rows_are_documents(folder):
    assert list(source(f"hf:{folder}").documents()) == [
        ("corpus::train#1", "one"),
        ("corpus::train#3", "two"),
    ]
    wanted = [("corpus::validation#1", "held out")]
    assert list(source(f"hf:{folder}::validation").documents()) == wanted
    wanted = [("corpus:default:validation#1", "HELD OUT")]
    spec = f"hf:{folder}:default:validation"
    assert list(source(spec, text_field="meta.body").documents()) == wanted


def test_rows_equal_the_librarys_own_in_every_format(tmp_path):
    import datasets

    texts = [f"text {i} é🙂\n" for i in range(300)]
    table = datasets.Dataset.from_dict({"text": texts, "n": list(range(300))})
    (tmp_path / "made").mkdir()
    table.to_parquet(tmp_path / "made" / "train.parquet", batch_size=50)
    spec = f"hf:{tmp_path / 'made'}"
    assert [d.text for d in source(spec).documents()] == texts
    assert [d.text for d in source(spec, 30).documents()] == [texts[0], texts[1], texts[2][:2]][:3]
    files = source(str(tmp_path / "made" / "train.parquet"))
    assert [d.text for d in files.documents()] == texts


def test_configurations_of_a_folder(tmp_path):
    write(tmp_path / "d" / "small.jsonl", ["a"])
    write(tmp_path / "d" / "large.jsonl", ["b"])
    configs = [{"config_name": n, "data_files": f"{n}.jsonl"} for n in ("small", "large")]
    card = "---\nconfigs: " + json.dumps(configs) + "\n---\n"
    (tmp_path / "d" / "README.md").write_text(card, encoding="utf-8")
    for name, text in (("small", "a"), ("large", "b")):
        got = list(source(f"hf:{tmp_path / 'd'}:{name}").documents())
        assert got == [(f"d:{name}:train#1", text)]
    with pytest.raises(DataError, match="Config name is missing.*small.*large"):
        list(source(f"hf:{tmp_path / 'd'}").documents())


def test_one_among_several(folder, tmp_path):
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    mixed = source((str(tmp_path / "a.txt"), f"hf:{folder}", f"hf:{folder}::validation"))
    assert [d.text for d in mixed.documents()] == ["first", "one", "two", "held out"]
    before = mixed.describe()
    assert mixed.describe() == before
    write(folder / "validation.jsonl", ["changed"])
    assert mixed.describe() != before


def test_describe_changes_with_the_documents_and_only_then(folder):
    spec = f"hf:{folder}"
    before = source(spec).describe()
    assert source(spec).describe() == before and json.dumps(before)
    assert before["files"] == 1
    for other in (f"{spec}::validation", f"{spec}:default"):
        assert source(other).describe() != before
    assert source(spec, 10).describe() != before != source(spec, text_field="x").describe()
    same = source(spec)
    assert same.describe() == before
    write(folder / "train.jsonl", ["three"])
    assert source(spec).describe() == same.describe() != before
    write(folder / "train-2.jsonl", ["more"])
    assert source(spec).describe() != same.describe()


def test_rows_are_streamed(tmp_path):
    write(tmp_path / "d" / "train-0.jsonl", ["text"])
    (tmp_path / "d" / "train-1.jsonl").write_text("no json\n", encoding="utf-8")
    spec = f"hf:{tmp_path / 'd'}"
    assert next(source(spec).documents()).text == "text"  # before the second file is opened
    with pytest.raises(DataError, match="cannot be read: .*Check the name"):
        list(source(spec).documents())
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_what_is_wrong_is_named_with_the_fix(folder, tmp_path):
    def read(spec, **options):
        return list(source(spec, **options).documents())

    with pytest.raises(DataError, match="no split 'test' but train, validation: .*::train"):
        read(f"hf:{folder}::test")
    with pytest.raises(DataError, match="no split 'test' but train, validation"):
        source(f"hf:{folder}::test").describe()
    with pytest.raises(DataError, match="'none' not found. Available: .*Check the name, the conf"):
        read(f"hf:{folder}:none")
    for spec in ("hf:user/none", "hf:none"):
        with pytest.raises(DataError, match="none' cannot be read: .*name its folder .hf:FOLDER"):
            read(spec)
    with pytest.raises(DataError, match=f"{tmp_path}/no' cannot be read: Couldn't find any data"):
        read(f"hf:{tmp_path}/no")
    with pytest.raises(DataError, match=r"row 1 has no field 'no' .*with text are text, meta.body"):
        read(f"hf:{folder}", text_field="no")
    write(folder / "train.jsonl", ["", " "])
    with pytest.raises(DataError, match="split train, has no text"):
        read(f"hf:{folder}")


@pytest.mark.parametrize("spec", ["hf:", "hf::a", "hf:a:b:c:d"])
def test_misspelt_names_are_refused_at_once(spec):
    with pytest.raises(ConfigError, match="must be hf:NAME, hf:NAME:CONFIG or"):
        source(spec)


def test_parts_that_are_left_out():
    assert HubDataset.parse("hf:a/b") == HubDataset("a/b", None, "train")
    assert HubDataset.parse("hf:a/b:c", "t") == HubDataset("a/b", "c", "train", "t")
    assert source("hf:a/b::d", 9) == HubDataset("a/b", None, "d", max_bytes=9)


def test_a_missing_package_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'eejax\[data\]'"):
        list(source(f"hf:{folder}").documents())
