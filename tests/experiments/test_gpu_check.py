"""eejax.experiments.gpu_check, as far as it goes without a GPU."""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import sys
import types

import numpy as np
import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError
from eejax.experiments import aot, card_programs
from eejax.experiments.gpu_check import check, smoke, stages, torch_peer, traces
from eejax.experiments.gpu_check.check import StageCheck
from eejax.experiments.gpu_check.stages import STAGES, GpuStage, RunSettings
from eejax.helios import energy
from eejax.inference.generate import DECODE_STEPS
from eejax.inference.options import CHUNKS
from eejax.kernels import triton_call
from eejax.train.flops import peak_flops

CHECK = "eejax.experiments.gpu_check.__main__"

RAISING = """
HOLDS_DEVICE = False

def run(check):
    check.measure("before", lambda: 1)
    check.measure("wrong", lambda: 1 / 0)
    check.measure("behind", lambda: 2)
    raise ValueError("the stage itself")
"""

SLOW = """
import time

HOLDS_DEVICE = False

def run(check):
    check.measure("first", lambda: 1)
    check.measure("second", lambda: time.sleep(SECONDS))
    check.measure("third", lambda: 3)
"""

ONE_PROGRAM = """
from functools import partial

from eejax.experiments.gpu_check import smoke

def programs(check):
    yield "scatter", partial(smoke._compiled, smoke.specs("scatter", True)[0])

def run(check):
    check.measure("rehearsed", lambda: check.small)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A function that writes a module where the stages' processes find it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, text: str) -> GpuStage:
        (tmp_path / f"{name}.py").write_text(text)
        return GpuStage(name, name)

    return write


def settings(tmp_path, **own) -> RunSettings:
    return RunSettings(tmp_path / "out", **(dict(seconds=120.0, small=True) | own))


@pytest.mark.slow
def test_smoke_and_training_on_a_cpu(tmp_path, monkeypatch, capsys, one_device):
    monkeypatch.setenv("XLA_FLAGS", f"{one_device} --xla_backend_optimization_level=0")
    call(CHECK, "--stages=smoke,train", "--small", f"--out={tmp_path}", "--seconds=200")
    smoke, train = map(json.loads, capsys.readouterr().out.splitlines())
    assert smoke["ok"] and train["ok"], (smoke.get("error"), train.get("error"))
    figures = smoke["figures"]
    assert figures["device"] == "cpu" and figures["copy_bytes_per_second"] > 0
    assert figures["norm_router"]["worst"]["float32"] < 1e-4
    assert figures["head_confidence"]["worst"]["bfloat16"] < 1e-2
    for name in ("350M", "1.3B"):
        own = train["parts"][name]["figures"]
        assert own["1 exits"]["time_over_no_exits"] > 0 and own["0 exits"]["ms"] > 0
        losses = own["0 exits"]["losses"]
        assert losses[-1] < losses[0]
    expected = torch_peer.unavailable(cuda=False)
    assert train["parts"]["torch"]["figures"].get("torch") == expected
    whole = json.loads((tmp_path / "train.json").read_text())
    assert whole["parts"].keys() == train["parts"].keys()
    assert not [*tmp_path.glob("*.partial.json")]


def test_a_stage_that_raises_ends_with_its_line_and_others_go_on(tmp_path, modules):
    pair = modules("raising", RAISING), modules("also", RAISING.replace("1 / 0", "3"))
    first, second = stages.run(pair, settings(tmp_path))
    for result in (first, second):
        assert not result["ok"] and result["figures"]["before"] == 1
        assert result["figures"]["behind"] == 2
        assert "status 1" in result["error"] and "ValueError: the stage" in result["error"]
    assert "ZeroDivisionError" in first["errors"]["wrong"]
    said = (tmp_path / "out" / "raising.txt").read_text()
    assert "ZeroDivisionError" in said and "the stage itself" in said


def test_a_stage_ends_at_its_time_limit_with_what_it_has(tmp_path, modules):
    slow = modules("slow", SLOW.replace("SECONDS", "60"))
    (result,) = stages.run([slow], settings(tmp_path, seconds=3.0))
    assert not result["ok"] and "time limit of 3 s" in result["error"]
    assert result["figures"] == {"first": 1} and result["seconds"] < 20


def test_a_time_limit_hides_no_error(tmp_path, modules):
    wrong = SLOW.replace("lambda: 1)", "lambda: 1 / 0)").replace("SECONDS", "60")
    (result,) = stages.run([modules("wrong", wrong)], settings(tmp_path, seconds=3.0))
    assert "time limit of 3 s" in result["error"]
    assert "first: ZeroDivisionError: division by zero" in result["error"]


def test_without_a_gpu_nothing_is_measured_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ConfigError, match="no GPU to check: JAX has the CPU only"):
        call(CHECK, "--stages=smoke", f"--out={tmp_path}")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("PYTHONPATH", "")  # of no plugin
    assert stages.missing_gpu().startswith("JAX does not start: ")
    monkeypatch.setattr(stages, "START", 0.01)
    assert stages.missing_gpu() == "JAX has not started within 0 s"


def test_programs_have_most_of_the_time_of_a_dry_run(tmp_path, monkeypatch):
    given = {}

    def record(settings, seconds, log, part, **_):
        return given.update({part: round(seconds)}) or {}

    monkeypatch.setattr(stages, "_part", record)
    decode = next(stage for stage in STAGES if stage.name == "decode")
    [*stages.run([decode], settings(tmp_path, seconds=1300.0, dry_run=True))]
    assert given["compile"] == 1000
    # What one does not take is the next ones'.
    assert given["rehearse engines"] == pytest.approx(1300 / 3, abs=2)


def test_a_server_that_cannot_be_is_an_error_and_the_engine_is_timed(tmp_path, monkeypatch):
    serve = functions_of("eejax.experiments.gpu_check.serve")
    monkeypatch.setattr(serve, "missing_module", lambda *names: "httpx: cannot be imported")
    monkeypatch.setattr(serve, "alone", lambda own: {"tokens_per_second": 1.0})
    check = StageCheck("", tmp_path, "own", True, "h100", deadline=math.inf)
    serve.run(check)
    assert check.errors == {"server": "httpx: cannot be imported"}
    assert check.figures == {"engine": {"tokens_per_second": 1.0}}


def test_a_jax_that_copies_caches_on_a_gpu_is_complained_of(monkeypatch):
    for version, good in (("0.10.2", False), ("0.11.0", True), ("0.12.0.1", True)):
        monkeypatch.setattr(aot.jax, "__version__", version)
        assert (aot.complaint() is None) == good
        assert aot.versions()["jax"] == version


def test_what_no_time_is_left_for_is_named(tmp_path):
    check = StageCheck("", tmp_path, "own", True, "h100", deadline=-math.inf)
    assert check.measure("late", lambda: 1) is None
    told = json.loads((tmp_path / "own.partial.json").read_text())
    assert told == {"not_measured": ["late"]}


def test_a_dry_run_compiles_and_rehearses(tmp_path, modules, for_cuda, monkeypatch):
    one = modules("one_program", ONE_PROGRAM)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (result,) = stages.run([one], settings(tmp_path, small=False, dry_run=True))
    assert result["ok"], result
    assert (tmp_path / "out" / "one_program.json").exists()
    compiled, rehearsed = result["parts"]["compile"], result["parts"]["rehearse"]
    assert compiled["figures"]["card"].startswith("NVIDIA H100")
    assert compiled["figures"]["scatter"]["host_decisions"] == 0
    assert rehearsed["figures"] == {"device": "cpu", "rehearsed": True}


def test_a_dry_run_says_that_the_compiler_is_missing(tmp_path, modules, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # where no plugin lies
    one = modules("one_program", ONE_PROGRAM)
    (result,) = stages.run([one], settings(tmp_path, dry_run=True))
    assert not result["ok"]
    assert "jax-cuda12-pjrt" in result["parts"]["compile"]["figures"]["skipped"]
    assert result["parts"]["rehearse"]["figures"]["rehearsed"] is True


def test_an_unknown_stage_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--stages = smoek: must be among smoke, decode"):
        call(CHECK, "--stages=smoek", f"--out={tmp_path}")
    with pytest.raises(ConfigError, match="--out = '': must name a folder"):
        call(CHECK, "--stages=smoke", "--small", "--out=")
    chosen = functions_of(CHECK).chosen
    for names in ([], ["all", "smoke"]):
        with pytest.raises(ConfigError, match="must name stages, or be all and nothing else"):
            chosen(names)
    assert chosen(["all"]) == [*STAGES]
    assert [stage.name for stage in chosen(["train", "smoke"])] == ["train", "smoke"]


def test_a_part_of_a_stage_is_named():
    chosen = functions_of(CHECK).chosen
    (part,) = chosen(["decode:no_graphs"])
    assert (part.name, part.file) == ("decode:no_graphs", "decode_no_graphs")
    assert part.parts == {"no_graphs": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}}

    def tasks(dry_run):
        return [*stages._tasks(part, RunSettings(pathlib.Path(), dry_run=dry_run))]

    assert [name for name, *_ in tasks(False)] == ["no_graphs"]
    assert [name for name, *_ in tasks(True)] == ["compile no_graphs", "rehearse no_graphs"]
    with pytest.raises(ConfigError, match="--stages = decode:graphs: must be among"):
        chosen(["decode:graphs"])


def test_stages_have_what_is_run_of_them():
    for stage in STAGES:
        module = functions_of(stage.module)
        assert callable(module.run) and callable(module.programs)


def test_calls_that_cannot_be_written_are_left_out(monkeypatch, tmp_path):
    for known in (True, False):
        monkeypatch.setattr(triton_call, "knows_legacy", lambda known=known: known)
        found = {}
        for name in ("decode", "smoke"):
            module = functions_of(f"eejax.experiments.gpu_check.{name}")
            check = StageCheck("", tmp_path, name, True, "h100", deadline=0.0)
            found[name] = [program for program, _ in module.programs(check)]
            assert check.figures["call_forms"] == (["ffi", "legacy"] if known else ["ffi"])
        assert ("full 1 legacy" in found["decode"]) == known
        assert "full 1 reference" in found["decode"]
        assert any("older form" in program for program in found["smoke"]) == known


def test_one_wrong_row_of_many_is_found():
    want = np.random.default_rng(0).normal(size=(3, 4096, 16))
    got = want.astype(np.float32)
    assert smoke.difference([got], [want])[0] < 1e-6
    got[1, 77] = 0.0  # as where a cache was not written
    assert smoke.difference([got], [want])[0] > 0.5
    got[1, 77, 3] = np.nan
    assert np.isnan(smoke.difference([got], [want])[0])
    flat = want[0, 0] * 0 + 1.0
    assert smoke.difference([flat + (np.arange(16) == 5) * 0.1], [flat])[0] == pytest.approx(0.1)
    order = np.arange(1000)
    assert smoke.difference([order[::-1]], [order]) == (0.0, 1.0)
    assert "compact" not in smoke.ROUNDED  # whose results must be equal


def test_a_dry_run_compiles_what_the_stages_run(tmp_path):
    """Sizes are those of a GPU, though the process computes on a CPU."""

    def builds(stage, part=""):
        module = functions_of(f"eejax.experiments.gpu_check.{stage}")
        check = StageCheck(part, tmp_path, stage, False, "h100", deadline=0.0)
        return dict(module.programs(check))

    options = builds("helios")["large to depth 1, 32 slots"].keywords["options"]
    assert options.chunk == CHUNKS["gpu"] and 2 not in options.buckets
    for name, build in builds("decode").items():
        assert build.args[1].keywords.get("steps", DECODE_STEPS) == DECODE_STEPS, name


def test_a_step_reads_what_is_filled():
    """Each of `new` steps attends to the prompt, to what came since, and to its own position."""
    decode = functions_of("eejax.experiments.gpu_check.decode")
    each = [512 + step + 1 for step in range(64)]
    assert decode.positions_read(512, 64) == np.mean(each)
    layer = np.zeros((3, 5), np.float16)
    own = types.SimpleNamespace(
        segments=((layer, layer), (layer,)), params={"embed": {"tokens": np.zeros(7, np.int8)}}
    )
    config = types.SimpleNamespace(dtype="float16", n_kv_heads=2, head_dim=4)
    cache = 2 * 2 * 8 * 544.5 * 2 * 4 * 2  # keys and values of 2 layers, 8 texts and 2 heads of 4
    assert decode.bytes_read(own, config, 2, 8, 544.5) == 2 * 30 + cache + 7


def test_exit_efficiency_is_by_bytes():
    decode = functions_of("eejax.experiments.gpu_check.decode")
    found = decode.exit_gain(3.0, by_bytes=2.5, by_layers=4.0)
    assert found["exit_efficiency"] == 1.2 and found["share_of_layer_ratio"] == 0.75


def test_cards_have_the_peaks_of_training():
    for card in aot.CARDS.values():
        device = types.SimpleNamespace(device_kind=card.name, platform="gpu")
        assert peak_flops([device]) == card.flops


def event(name: str, tid: int, ts: float, dur: float, pid: int = 1) -> dict:
    return dict(ph="X", pid=pid, tid=tid, name=name, ts=ts, dur=dur)


def test_a_trace_of_a_gpu_is_read(tmp_path):
    def named(kind, name, tid=0, pid=1):
        return dict(ph="M", pid=pid, tid=tid, name=kind, args={"name": name})

    events = [
        named("process_name", "/device:GPU:0"),
        named("process_name", "/host:CPU", pid=2),
        named("thread_name", "Stream #13(Compute)", 13),
        named("thread_name", "Stream #14(MemcpyD2H)", 14),
        named("thread_name", "XLA Ops", 15),
        event("fusion_1", 13, 0, 10),
        event("fusion_1", 13, 20, 10),
        event("gemm", 13, 40, 5),
        event("MemcpyD2H", 14, 42, 8),
        event("fusion_1", 15, 0, 10),  # the same again, by operation
        event("Buffer::Await", 1, 0, 50, pid=2),
    ]
    path = tmp_path / "t.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = traces.of_events(traces.read(path))
    assert found["kernels"] == 3 and found["host_waits"] == 1
    assert found["copies"] == {"MemcpyD2H": 1, "MemcpyH2D": 0, "MemcpyD2D": 0}
    assert found["busy_ms"] == pytest.approx(0.030)
    assert found["names"] == {"fusion_1": [2, 0.02], "gemm": [1, 0.005]}


def test_texts_are_compared_up_to_their_first_difference():
    decode = functions_of("eejax.experiments.gpu_check.decode")
    fields = dict(
        tokens=np.array([[1, 2, 3], [4, 5, 6]]),
        exits=np.array([[0, 0, 1], [1, 1, 1]]),
        margins=np.array([[1.0, 1e-6, 2.0], [1.0, 0.5, 2.0]]),
    )
    oracle = type("Oracle", (), fields)
    tokens = np.array([[1, 9, 3], [4, 7, 6]])
    found = decode.differences(oracle, tokens, oracle.exits, 1e-4)
    assert found == dict(tokens=2, near_ties=1, others=1, margins=[1e-6, 0.5])


def test_exits_are_apportioned():
    batch = functions_of("eejax.experiments.gpu_check.batch")
    config = batch.SMALL.model.config(64)
    for slots in (8, 64):
        leaving = batch.draw_thresholds(config, slots) == 0
        assert leaving.sum(0).tolist() == [slots // 2, slots // 4]


def test_a_peer_trains():
    pytest.importorskip("torch")
    size = card_programs.ModelSize(2, 32, 2, 64, 96)
    found = torch_peer.trained(size, 2, 16, 3, "cpu")
    assert found["losses"][-1] < found["losses"][0]
    assert found["peer_device"] == "cpu"


@pytest.mark.parametrize("turns", [1, 5])
def test_joules_of_a_run_are_without_those_of_what_precedes_it(monkeypatch, turns):
    """A counter that ticks in tens of joules, and a clock that counts what was run."""
    spent, now = [0.0], [0.0]

    class Counter:
        name = "fake"

        def read(self) -> float:
            return spent[0] // 10 * 10

    def take(joules: float) -> None:
        spent[0] += joules
        now[0] += 1.0

    monkeypatch.setattr(energy, "meter", Counter)
    monkeypatch.setattr(check.time, "perf_counter", lambda: now[0])
    run, before = (lambda: take(40.0)), (lambda: take(70.0))
    assert check.mean_joules(run, before, seconds=2.0 * turns) == pytest.approx(40.0, abs=10)
    monkeypatch.setattr(energy, "meter", lambda: None)
    assert check.mean_joules(run, before, seconds=0.0) is None
