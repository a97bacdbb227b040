"""Settings every test runs under: they must be made before JAX starts."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
import sys

# Sixteen devices on one CPU, so that every mesh up to sixteen runs here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=16".strip()
# Programs that run once are compiled without the newer emitters, in pieces of one, in two thirds of
# the time. jaxlib 0.11 and later have these emitters alone, and end at a flag they do not know.
_FLAGS = os.environ["XLA_FLAGS"]
_OLDER = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11)
if "--xla_backend_optimization_level=0" in _FLAGS:
    if _OLDER and "fusion_emitters" not in _FLAGS:
        _FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    # The first splits each reduction in two, and compiling every one of them walks through all of
    # the program: without it an engine compiles in half the time. The second checks XLA's own work.
    # The others look in vain for loops to simplify, and cut large ones for several threads.
    # Together they take a quarter of what is left.
    _PASSES = (
        "tree_reduction_rewriter",
        "hlo-verifier",
        "simplify-while-loops",
        "simplify-conditional",
        "while-loop-invariant-code-motion",
        "while-loop-constant-sinking",
        "reshape-mover",
        "cpu-parallel-task-assigner",
    )
    if "xla_disable_hlo_passes" not in _FLAGS:
        _FLAGS += f" --xla_disable_hlo_passes={','.join(_PASSES)}"
    os.environ["XLA_FLAGS"] = _FLAGS
os.environ.setdefault("MPLBACKEND", "Agg")
if os.environ["JAX_PLATFORMS"] == "cpu":  # kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = pathlib.Path(__file__).resolve().parent.parent

# Compiling takes most of a run's time. Tests, workers, child processes and later runs compile the
# same programs, and share what was compiled. JAX looks it up by the program, the flags and jaxlib's
# version, so that a change of any of them compiles anew.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Lines of Python beside every operation of a program take a twentieth of a run to write down.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Silent promotion of dtypes and ranks hides mistakes (bf16 computed in fp32, [b] added to [b, t]).
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine: a failure in one run is a failure in all of them.
hypothesis.settings.register_profile("eejax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("eejax")


def pytest_collection_finish():
    """Look for garbage after each module alone, and not among what was imported: tracing makes many
    objects, of which few are garbage."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs():
    """Those of a module go with it: each program maps memory, of which a process may have so many
    pieces (vm.max_map_count), and XLA ends with a segmentation fault where they run out."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def compiled():
    """Names of compilations, as they happen."""
    events = []

    def listener(event, *_, **__):
        return events.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The repository, for tests that start launchers or read its files."""
    return ROOT


@pytest.fixture(scope="session")
def eejax_data() -> pathlib.Path:
    """The folder of real data sets named by EEJAX_DATA; the test skips where there is none."""
    value = os.environ.get("EEJAX_DATA")
    if not value:
        pytest.skip("needs real data: set EEJAX_DATA to the folder of data sets")
    path = pathlib.Path(value).expanduser()
    if not path.is_dir():
        pytest.skip(f"needs real data: EEJAX_DATA = {value!r} is not a folder")
    return path.resolve()


@pytest.fixture(scope="session")
def interpreted():
    """Triton's interpreter, in this process; the test skips where kernels are compiled."""
    pytest.importorskip("triton", reason="needs Triton, which is for Linux alone")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1, which is not set where there is a GPU")


@pytest.fixture(scope="session")
def for_cuda() -> dict[str, str]:
    """An environment in which programs can be lowered for CUDA, and scripts find `tests/support`.

    JAX's CUDA plugin lies apart from other packages, as JAX would try to start it wherever it found
    it.
    """
    folder = pathlib.Path(sys.prefix) / "lowering"
    if not folder.is_dir():
        pytest.skip(f"needs JAX's CUDA plugin in {folder}, where `make env` puts it")
    own = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    support = pathlib.Path(__file__).parent / "support"
    paths = [str(folder), str(support), environment.get("PYTHONPATH")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Its folder: three layers with exits after the first two, over bytes, a context of 128."""
    import shared

    return shared.folder_once(tmp_path_factory, "run", train_small_run) / "run"


def train_small_run(folder: pathlib.Path) -> None:
    import small_runs

    from eejax.train.config import Experiment
    from eejax.train.loop import fit

    small_runs.write_text(folder)
    values = small_runs.config(
        folder, microbatches=1, steps=250, eval_every=0, checkpoint_every=0, log_every=50
    )
    values["model"] |= {
        "n_layers": 3,
        "context_length": 128,
        "exits": [{"boundary": 1}, {"boundary": 2}],
    }
    values["exit_weights"] = {"weights": [0.5, 0.5]}
    fit(Experiment.from_dict(values), folder / "run")
