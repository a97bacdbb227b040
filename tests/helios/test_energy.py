"""Counters of energy by folders and modules that stand for them, and work by hand."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.helios import energy
from eejax.models.config import ExitConfig, ModelConfig

CPU = [types.SimpleNamespace(platform="cpu", local_hardware_id=0)]
GPUS = [types.SimpleNamespace(platform="gpu", local_hardware_id=i) for i in range(2)]


def domain(root, folder: str, name: str, microjoules: int, most: int = 1000):
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path / "energy_uj"


def test_packages_are_summed_and_begin_anew(tmp_path):
    first = domain(tmp_path, "intel-rapl:0", "package-0", 900)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 100, most=5_000_000)
    others = [
        domain(tmp_path, "intel-rapl:0:0", "core", 0),
        domain(tmp_path, "intel-rapl:2", "psys", 0),
        domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    meter = energy.meter(CPU, tmp_path)
    assert meter.name == "rapl" and meter.read() == 0
    for path in others:
        path.write_text("999\n")
    second.write_text("4000100\n")
    assert meter.read() == pytest.approx(4.0)
    first.write_text("50\n")  # 150 on
    second.write_text("50\n")  # 999 950 on
    assert meter.read() == pytest.approx(5.0001)
    assert meter.read() == pytest.approx(5.0001)


def test_what_cannot_be_read_is_no_meter(tmp_path):
    assert energy.meter(CPU, tmp_path / "none") is None and energy.meter(CPU, tmp_path) is None
    domain(tmp_path, "intel-rapl:0", "package-0", 1)
    path = domain(tmp_path, "intel-rapl:1", "package-1", 1)
    path.unlink()
    path.mkdir()  # cannot be read, by root either
    assert energy.meter(CPU, tmp_path) is None
    path.rmdir()
    path.write_text("\n")
    assert energy.meter(CPU, tmp_path) is None


class Library(types.ModuleType):
    """As much of NVML as is used, of GPUs that count `millijoules`; None: that do not."""

    class NVMLError(Exception):
        pass

    def __init__(self, *millijoules: int | None):
        super().__init__("pynvml")
        self.millijoules, self.uuids, self.started = [*millijoules], {"GPU-b": 1}, False

    def nvmlInit(self):
        self.started = True

    def nvmlDeviceGetHandleByIndex(self, index):
        if not self.started or index >= len(self.millijoules):
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self.uuids[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.millijoules[handle] is None:
            raise self.NVMLError
        return self.millijoules[handle]


@pytest.mark.parametrize(
    "visible, devices, joules",
    [
        (None, GPUS[:1], 2.0),
        (None, GPUS, 7.5),
        ("", GPUS[1:], 5.5),
        ("2,0", GPUS[:1], 11.0),
        ("2, 0", GPUS[1:], 2.0),
        ("GPU-b", GPUS[:1], 5.5),
    ],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch, visible, devices, joules):
    library = Library(2000, 5500, 11000)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = energy.meter(devices)
    assert meter.name == "nvml" and meter.read() == joules
    library.millijoules = [n + 500 for n in library.millijoules]
    assert meter.read() == joules + 0.5 * len(devices)
    library.millijoules = [None] * 3  # as after a reset of the GPU
    with pytest.raises(OSError, match="NVML cannot read"):
        meter.read()


def test_gpus_that_do_not_count(monkeypatch, tmp_path):
    """Their host's counters do not stand for them."""
    domain(tmp_path, "intel-rapl:0", "package-0", 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for library in (None, Library(), Library(None)):
        monkeypatch.setitem(sys.modules, "pynvml", library)  # None: as if not installed
        assert energy.meter(GPUS[:1], tmp_path) is None
    monkeypatch.setitem(sys.modules, "pynvml", Library(2000))
    assert energy.meter(GPUS, tmp_path) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert energy.meter(GPUS, tmp_path) is None
    tpu = [types.SimpleNamespace(platform="tpu", local_hardware_id=0)]
    assert energy.meter(tpu, tmp_path) is None and energy.meter(CPU + GPUS, tmp_path) is None
    assert energy.meter(root=tmp_path).name == "rapl"  # of the devices that tests have


D, F, V = 8, 20, 56
CONFIG = ModelConfig(
    vocab_size=50,
    vocab_multiple=8,
    n_layers=6,
    d_model=D,
    n_heads=2,
    n_kv_heads=1,
    d_ff=F,
    context_length=32,
    mlp_gated=True,
    dtype="bfloat16",
    sliding_window=(None, 3, None, 3, 3, 3),
    exits=(ExitConfig(0, norm=False), ExitConfig(2, head="own", router=3, mlp=True)),
)
HEAD, MLP = V * D, 3 * D * F
LAYER = 2 * D * D + 2 * D * D // 2 + MLP  # half as many heads of keys and values


def test_work_by_hand():
    first, second, last = (energy.token_work(CONFIG, e) for e in range(3))
    assert first == (2 * HEAD, 2 * HEAD)
    assert second.flops == 2 * (2 * HEAD + 2 * LAYER + MLP)
    norms = 4 * (2 * 2 * D + 2 * D)  # float32: two of each layer, the exit's and its MLP's
    assert second.bytes == 2 * (2 * HEAD + 2 * LAYER + MLP) + norms
    assert last.flops == 2 * (3 * HEAD + 6 * LAYER + MLP)
    assert last.bytes == 2 * (3 * HEAD + 6 * LAYER + MLP) + norms + 4 * (4 * 2 * D + D)


def test_an_exit_multiplies_with_the_tokens_that_it_knows():
    first, second = CONFIG.exits
    few = CONFIG.replace(exits=(dataclasses.replace(first, vocabulary=10), second))
    assert energy.token_work(few, 0) == (2 * 10 * D, 2 * 10 * D)
    whole, fewer = (energy.token_work(c, 2).flops for c in (CONFIG, few))
    assert whole - fewer == 2 * (HEAD - 10 * D)


def test_a_head_of_few_dimensions_is_two_small_matrices():
    first, second = CONFIG.exits
    narrow = CONFIG.replace(exits=(dataclasses.replace(first, head_rank=3), second))
    assert energy.token_work(narrow, 0) == (2 * (D + V) * 3, 2 * (D + V) * 3)


def test_a_batch_shares_weights_but_no_keys_and_values():
    alone, four = (energy.token_work(CONFIG, 2, batch=n) for n in (1, 4))
    assert four == (alone.flops, alone.bytes / 4)
    seen = energy.token_work(CONFIG, 2, batch=4, cached=10)
    looked = 2 * 10 + 4 * 3
    assert seen.flops == alone.flops + 4 * D * looked
    assert seen.bytes == four.bytes + 2 * 2 * (D // 2) * looked


def test_layers_of_segments_by_hand():
    assert energy.layer_flops(CONFIG) == (0, 2 * 2 * LAYER, 2 * 4 * LAYER)


def test_rows_of_a_text_by_hand():
    """Whoever goes deeper takes along who waits; at the cap all go."""
    rows = energy.segment_rows
    assert rows([], 3, 4) == [0, 0, 0]
    assert rows([0, 0, 2, 0], 3, 4) == [4, 3, 3]
    assert rows([0, 1, 0], 3, 4) == [3, 2, 0]
    assert rows([0] * 5, 3, 4) == [5, 4, 4]  # four waited when the fifth began
    assert rows([0] * 9, 3, 4) == [9, 8, 8]
    assert rows([1, 0, 0, 0], 2, 16) == [4, 1]
    assert rows([0, 0], 1, 1) == [2]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_no_token_is_run_twice_and_no_more_wait_than_may(exits, cap):
    got = energy.segment_rows(exits, 4, cap)
    assert got == sorted(got, reverse=True) and got[0] == len(exits)
    assert all(got[s] >= sum(e >= s for e in exits) for s in range(4))
    assert got[0] - got[-1] <= cap


@pytest.mark.parametrize(
    "asked, names",
    [
        (dict(exit=3), "exit = 3: must be in 0..2"),
        (dict(exit=-1), "exit = -1"),
        (dict(exit=0, batch=0), "batch = 0"),
        (dict(exit=0, cached=-1), "cached = -1"),
    ],
)
def test_what_cannot_be_is_named(asked, names):
    with pytest.raises(ConfigError, match=names):
        energy.token_work(CONFIG, **asked)
