"""The catalogue of claims, the page of findings, and when a reproduction is run again."""

from __future__ import annotations

import ast
import json
import pathlib
import re

import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError
from eejax.experiments.reproduce import catalogue, page, steps
from eejax.experiments.reproduce.catalogue import CATALOGUE, collect, finding
from eejax.experiments.reproduce.claims import PAPERS, Claim, Finding, Verdict

everything = functions_of("eejax.experiments.reproduce.all")
SMALL = {
    "EE-LLM": (
        Claim("one", "Table 1", "It is fast.", "2 times"),
        Claim("two", "Section 2", "It is small.", "1 MB"),
        Claim("three", "Section 2", "It is exact.", "equal"),
        Claim("again", "Abstract", "It is fast, as said.", "2 times", repeats="one"),
        Claim("huge", "Figure 9", "It scales.", "30B", cannot="needs 64 GPUs"),
    )
}


def found(place: str, claim: str, verdict=Verdict.HOLDS, why: str = "", paper="EE-LLM") -> Finding:
    return Finding(paper, place, claim, "theirs", "ours", "tiny", verdict, why)


WHOLE = (
    found("Table 1", "Curve a."),
    found("Table 1", "Curve b.", Verdict.FAILS, "too small | noisy"),
    found("Section 2", "It is small."),
    found("Section 2", "It is exact.", Verdict.NOT_AT_THIS_SCALE, "needs a GPU"),
)


def test_the_catalogue_is_well_formed():
    assert tuple(CATALOGUE) == PAPERS
    for paper, claims in CATALOGUE.items():
        keys = [c.key for c in claims]
        assert len(set(keys)) == len(keys), paper
        assert len({(c.place, c.text) for c in claims}) == len(claims), paper
        of = {c.key: c for c in claims}
        for c in claims:
            assert c.place and c.theirs and c.text.endswith("."), c.key
            assert not (c.repeats and c.cannot), c.key
            assert not c.repeats or not of[c.repeats].repeats, c.key
    numbered = {
        "EE-LLM": {"Figure": 12, "Table": 4},
        "HELIOS": {"Figure": 17, "Table": 5},
        "TIDE": {"Figure": 2, "Table": 5},
    }
    for paper, kinds in numbered.items():
        for kind, last in kinds.items():
            places = [c.place for c in CATALOGUE[paper] if c.place.startswith(kind)]
            numbers = {int(n) for place in places for n in re.findall(r"(\d+)[a-c]?\b", place)}
            assert set(range(1, last + 1)) <= numbers, (paper, kind)


def test_findings_go_to_their_claims():
    collection = collect(WHOLE, SMALL)
    assert collection.complete
    entries = {e.claim.key: e.findings for e in collection.entries["EE-LLM"]}
    assert entries["one"] == WHOLE[:2]  # the only claim of its place has all of them
    assert entries["two"] == WHOLE[2:3] and entries["three"] == WHOLE[3:]
    without = collect(WHOLE[:3], SMALL)
    assert without.missing == ("EE-LLM, Section 2: It is exact.",) and not without.complete
    green = found("Section 2", "It is green.")
    strange = collect([*WHOLE, found("Table 7", "x."), green], SMALL)
    assert not strange.complete and not strange.missing
    assert len(strange.unknown) == 1 and "Table 7" in strange.unknown[0]
    assert [e.claim.key for e in strange.entries["EE-LLM"] if e.besides == (green,)] == ["three"]
    assert collect([*WHOLE[:2], green], SMALL).missing  # it stands for no claim of its place
    other = found("section 4", "Kept.", paper="CALM")
    assert collect([*WHOLE, other], SMALL).others == (other,)


def test_a_finding_with_a_key_takes_its_words_from_the_catalogue():
    old = Finding("EE-LLM", "Old", "Old.", "old", "ours", "tiny", Verdict.HOLDS, key="three")
    (entry,) = [e for e in collect([old], SMALL).entries["EE-LLM"] if e.findings]
    (got,) = entry.findings
    assert entry.claim.key == "three" and got.ours == "ours"
    assert (got.place, got.claim, got.theirs) == ("Section 2", "It is exact.", "equal")
    gone = Finding("EE-LLM", "Old", "Old.", "old", "ours", "tiny", Verdict.HOLDS, key="four")
    assert "key 'four'" in collect([gone], SMALL).unknown[0]


@pytest.mark.parametrize(
    "place, labels",
    [
        ("Abstract", ["Abstract"]),
        ("Figures 1 and 10, Algorithm 1", ["Figure 1", "Figure 10", "Algorithm 1"]),
        ("Section 3.2, Figure 3(b)", ["Section 3.2", "Figure 3b"]),
        ("Eq. 2, Proposition 3.1", ["Eq 2", "Proposition 3.1"]),
        ("Eq. (4)-(6)", ["Eq 4", "Eq 6"]),
        ("Section 3.2, A.2", ["Section 3.2", "Appendix A.2"]),
        ("Remark A.2", ["Remark A.2"]),
        ("C.2.1", ["Appendix C.2.1"]),
        ("Appendix F", ["Appendix F"]),
        ("Table 1, time", ["Table 1"]),
        ("Section 5.2, footnote 2", ["Section 5.2"]),
    ],
)
def test_places_are_read(place, labels):
    assert catalogue.labels(place) == labels


def test_a_finding_may_name_several_places_or_a_part():
    both = found("Table 1, Section 2", "It is exact.")
    collection = collect([both, *WHOLE[2:3], found("Table 1(b)", "A part.")], SMALL)
    entries = {e.claim.key: e.findings for e in collection.entries["EE-LLM"]}
    assert len(entries["one"]) == 2 and entries["three"] == (both,)
    several = found("Table 1, Figure 9", "Both.")
    collection = collect([several], SMALL)
    rows = page.rows_of("EE-LLM", collection.entries["EE-LLM"])
    assert [row.ours for row in rows if row.place in ("Table 1, Figure 9", "Figure 9")] == [
        "ours",
        "see Table 1, Figure 9",
    ]
    assert page.count(collection)["holds"] == 1
    assert catalogue.claims_at("C.2.1", CATALOGUE["EE-LLM"])[0][0].place == "Appendix C.2"


def test_findings_of_the_catalogue():
    one = finding("EE-LLM", "eq-1", "equal", "tiny", True, "left out")
    assert (one.place, one.verdict, one.why) == ("Eq. (1)", Verdict.HOLDS, "")
    assert Finding.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert finding("EE-LLM", "eq-1", "x", "y", None, "why").verdict is Verdict.NOT_AT_THIS_SCALE
    with pytest.raises(ConfigError, match="why"):
        finding("EE-LLM", "eq-1", "x", "y", False)
    with pytest.raises(ConfigError, match="must be a claim of EE-LLM"):
        catalogue.claim("EE-LLM", "eq-9")


def table_rows(text: str) -> list[list[str]]:
    """Cells of all rows of a page's tables, without headers."""
    lines = (line for line in text.splitlines() if re.match(r"\| \d+ ", line))
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]


def listed(text: str, heading: str) -> list[str]:
    """Lines of the list below a heading."""
    part = text.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    return [line for line in part.splitlines() if line.startswith("- ")]


FAILED, BEYOND = "What does not hold, and why", "What this scale cannot show"


def test_the_page_has_a_row_for_every_claim():
    collection = collect(WHOLE, SMALL)
    text = page.page(collection, "a machine", {}, "2026-01-01")
    rows = table_rows(text)
    assert len(rows) == 6  # two findings of Table 1, and one row for each other claim
    assert rows[1][-1] == "**does not hold**" and len(rows[1]) == len(page.HEADER)
    assert rows[4][4] == "see Table 1" and rows[5][4] == "not run"
    assert listed(text, FAILED) == [r"- Row 2 (EE-LLM, Table 1): too small \| noisy"]
    assert listed(text, BEYOND) == [
        "- Row 4 (EE-LLM, Section 2): needs a GPU",
        "- Row 6 (EE-LLM, Figure 9): needs 64 GPUs",
    ]
    assert "missing from this page" not in text
    broken = page.page(collect(WHOLE[2:3], SMALL), "a machine", {"tide": "exit status 2"})
    assert "- tide: exit status 2" in broken and "- no finding: EE-LLM, Table 1" in broken
    assert "1 holds, 0 do not, 1 is not judged at this scale, 2 have no finding" in broken


def test_rows_are_numbered_over_the_page_and_reasons_name_them():
    slow = [found("Table 1", f"Curve {n}.", Verdict.FAILS, "slow") for n in "ab"]
    other = found("Section 4", "Kept.", Verdict.FAILS, "slow", paper="CALM")
    last = found("Section 2", "It is small.", Verdict.FAILS, "large")
    text = page.page(collect([other, last, *slow], SMALL), "a machine", {}, "2026-01-01")
    rows = table_rows(text)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert listed(text, FAILED) == [
        "- Rows 1, 2, 7 (EE-LLM, Table 1; CALM, Section 4): slow",
        "- Row 3 (EE-LLM, Section 2): large",
    ]
    failing = {row[0] for row in rows if "does not hold" in row[-1]}
    named = re.findall(r"\d+", " ".join(line.split(" (")[0] for line in listed(text, FAILED)))
    assert failing == set(named)


def test_the_page_counts_the_rows_that_it_shows():
    other = found("Section 4", "Kept.", paper="CALM")
    collection = collect([*WHOLE, WHOLE[0], other], SMALL)
    text = page.page(collection, "a machine", {}, "2026-01-01")
    shown = [row[-1].strip("*| ") for row in table_rows(text)]
    counts = page.count(collection)
    assert [counts[v] for v in map(str, Verdict)] == [shown.count(v) for v in map(str, Verdict)]
    assert counts == {
        "holds": 3,
        "does not hold": 1,
        "not at this scale": 2,
        "missing": 0,
        "": 2,
    }
    told = "3 hold, 1 does not, 2 are not judged at this scale, 2 point to another row."
    assert f"Of the rows, {told}" in text


def script(tmp_path: pathlib.Path, monkeypatch, findings: list[dict], status: int = 0) -> None:
    """A module that counts its runs and reports the findings."""
    (tmp_path / "fake_reproduction.py").write_text(
        "import pathlib, sys\n"
        f"path = pathlib.Path({str(tmp_path / 'runs')!r})\n"
        "path.write_text(path.read_text() + 'x' if path.exists() else 'x')\n"
        "print('working')\n"
        f"print({json.dumps({'findings': findings})!r})\n"
        "print('a warning at the end', file=sys.stderr)\n"
        f"sys.exit({status})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_what_is_done_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.ReproductionStep, "source_files", lambda self: [])
    one = steps.ReproductionStep("one", "fake_reproduction", ("--size=1",), 1)
    two = steps.ReproductionStep("two", "fake_reproduction", (), 1, ("one",))
    monkeypatch.setattr(everything, "STEPS", (one, two))

    def runs():
        return len((tmp_path / "runs").read_text())

    script(tmp_path, monkeypatch, [WHOLE[0].to_dict()], status=1)
    assert everything.run_all([one, two], tmp_path, None) == {}
    assert runs() == 2 and everything.recorded(one, tmp_path) == [WHOLE[0]]
    assert everything.run_all([one, two], tmp_path, None) == {} and runs() == 2
    assert everything.run_all([one, two], tmp_path, None, again=["two"]) == {} and runs() == 3
    # Another argument changes what it makes, and what needs that.
    changed = steps.ReproductionStep("one", "fake_reproduction", ("--size=2",), 1)
    monkeypatch.setattr(everything, "STEPS", (changed, two))
    assert everything.run_all([changed, two], tmp_path, None) == {} and runs() == 5


@pytest.mark.parametrize(
    "record",
    [
        '{"digest": "0", "find',
        "[]",
        "5",
        "null",
        '{"digest": "0"}',
        '{"digest": "0", "findings": 5}',
        '{"digest": "0", "findings": [{}]}',
        '{"digest": "0", "findings": [5]}',
        '{"digest": "0", "findings": [{"verdict": []}]}',
        json.dumps({"digest": "0", "findings": [WHOLE[0].to_dict() | {"ours": 5}]}),
        json.dumps({"digest": "0", "findings": [WHOLE[0].to_dict() | {"scope": "x"}]}),
        "[" * 100_000,
        "\udcff",
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_record_counts_as_none(tmp_path, monkeypatch, capsys, record):
    """The digest would match: only what is damaged has the step run again."""
    steps_of_all = [steps.ReproductionStep(name, "none", (), 1) for name in ("one", "two")]
    ran = []

    def finish(step, *_):
        return ran.append(step.name) or steps.Outcome([WHOLE[1]], [])

    monkeypatch.setattr(everything, "STEPS", steps_of_all)
    monkeypatch.setattr(everything, "digests_of", lambda *_: {"one": "0", "two": "0"})
    monkeypatch.setattr(everything, "execute", finish)
    for step in steps_of_all:
        everything.write_record(step, tmp_path, "0", [WHOLE[0]], 1.0)
        assert everything.recorded(step, tmp_path) == [WHOLE[0]]
        file = tmp_path / "records" / f"{step.name}.json"
        file.write_bytes(record.encode(errors="surrogateescape"))
    output = tmp_path / "page.md"
    with pytest.raises(SystemExit):
        call(
            "eejax.experiments.reproduce.all",
            f"--workdir={tmp_path}",
            "--only=one",
            f"--output={output}",
            "--json",
        )
    told = capsys.readouterr()
    assert ran == ["one"] and json.loads(told.out.splitlines()[-1])["failed"] == {}
    assert output.exists()
    for name in ("one", "two"):  # said once each; the step that was not chosen does no harm
        assert told.err.count(f"{name}.json: is damaged") == 1
    assert everything.recorded(steps_of_all[0], tmp_path) == [WHOLE[1]]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--only="], "--only = '': must be of training_efficiency, .*, one at least"),
        (["--again="], "--again = '': must be of training_efficiency, .*, one at least"),
        (["--only=helios,"], "--only = '': must be one of 'training_efficiency'"),
        (["--output="], "--output = '': must be a path"),
        (["--workdir="], "--workdir = '': must be a path"),
        (["--output={}"], "--output = .*: must be a file, and is a folder"),
        (["--output={}/file/page.md"], "exists|Not a directory"),
        (["--output={}/" + "x" * 300], "too long"),
    ],
)
def test_what_cannot_end_well_does_not_begin(tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(everything, "run_all", lambda *_, **__: pytest.fail("steps were run"))
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, OSError), match=said):
        call("eejax.experiments.reproduce.all", *(flag.format(tmp_path) for flag in flags))
    assert not (tmp_path / "docs" / "REPRODUCTION.md").exists()


def test_a_failure_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(steps.ReproductionStep, "source_files", lambda self: [])
    bad = steps.ReproductionStep("bad", "no_such_module", (), 1)
    after = steps.ReproductionStep("after", "fake_reproduction", (), 1, ("bad",))
    asks = steps.ReproductionStep("asks", "fake_reproduction", (), 1, data=True)
    good = steps.ReproductionStep("good", "fake_reproduction", (), 1)
    monkeypatch.setattr(everything, "STEPS", (bad, after, asks, good))
    script(tmp_path, monkeypatch, [WHOLE[0].to_dict()])
    failed = everything.run_all(everything.STEPS, tmp_path, None)
    assert list(failed) == ["bad", "after", "asks"]
    assert "without a JSON object" in failed["bad"] and "bad, which failed" in failed["after"]
    assert "EEJAX_DATA" in failed["asks"] and everything.recorded(good, tmp_path)
    assert not everything.recorded(bad, tmp_path)
    script(tmp_path, monkeypatch, [])
    failed = everything.run_all([good], tmp_path, None, again=["good"])
    assert "without findings" in failed["good"]


def test_a_step_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "fake_reproduction.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slow = steps.ReproductionStep("slow", "fake_reproduction", (), 1 / 60 / steps.SLOWER)
    assert "ran for more than" in steps.execute(slow, tmp_path, None).error


def test_steps_come_after_what_they_need():
    seen: set[str] = set()
    for step in steps.STEPS:
        assert not set(step.needs) - seen and step.name not in seen
        seen.add(step.name)
        assert step.source_files()[0].is_file()
    (inference,) = [s for s in steps.STEPS if s.name == "inference"]
    names = {path.stem for path in inference.source_files()}
    assert {"inference", "inference_tasks", "exit_tables"} <= names and "catalogue" not in names
    chosen = everything.chosen_steps(steps.STEPS, ["inference"])
    assert [s.name for s in chosen] == ["helios", "inference"]
    assert sum(step.minutes for step in steps.STEPS) < 120


def test_every_claim_is_spoken_of():
    """By its key or text in a reproduction's source, or by a place that has no other claim."""
    modules = {path.stem: path for path in steps.HERE.glob("*.py")}
    needed = {"efficiency_findings", "helios_findings", "tide_findings"}
    if lacking := needed - set(modules):
        pytest.skip(f"needs {', '.join(sorted(lacking))}")
    said = {
        str(node.value)
        for name, path in modules.items()
        if not name.startswith(("claims", "catalogue"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    places = [one for one in said if len(one) < 60]  # and no docstrings
    for paper, claims in CATALOGUE.items():
        there = [some for one in places for some in catalogue.claims_at(one, claims)]
        alone = {some[0].key for some in there if len(some) == 1}
        for c in claims:
            known = c.key in said or c.text in said or c.key in alone
            assert known or c.repeats or c.cannot, (paper, c.place, c.text)


def test_keys_that_reproductions_name_are_claims():
    """Else a step would end with an error after all of its work."""
    known = {claim.key for claims in CATALOGUE.values() for claim in claims}
    named = {
        (path.stem, node.args[0].value)
        for path in steps.HERE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("judged", "exact")
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(named) > 60
    assert {key for _, key in named} <= known


def test_the_written_page_has_every_claim(repo_root):
    path = repo_root / "docs" / "REPRODUCTION.md"
    if not path.exists():
        pytest.skip("docs/REPRODUCTION.md is not made yet: eejax reproduce all")
    text = path.read_text()
    for claims in CATALOGUE.values():
        for claim in claims:
            assert f"| {claim.place} |" in text, claim
    assert "What is missing from this page" not in text
