"""Triton's interpreter: what is mended in it, and that it still has to be."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.kernels import call, interpreter
from eejax.kernels.compact.api import compact
from eejax.kernels.norm_router import arg_specs as norm_router_specs

KERNELS = """
import numpy as np, ml_dtypes, triton, triton.language as tl, sys
from eejax.kernels.interpreter import Tensor, patch

@triton.jit
def dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product)

@triton.jit
def round(a_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(a_ptr + i).to(tl.bfloat16))

if sys.argv[1] == "mended":
    patch()
rng = np.random.default_rng(0)
a, b = (rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16) for _ in "ab")
out = np.zeros((16, 16), np.float32)
dot[(1,)](Tensor(a), Tensor(b), Tensor(out), N=16)
print(np.abs(out - a.astype(np.float32) @ b.astype(np.float32)).max() < 1e-4)
x = rng.standard_normal(256).astype(np.float32)
near = np.zeros(256, ml_dtypes.bfloat16)
round[(1,)](Tensor(x), Tensor(near), N=256)
print((near == x.astype(ml_dtypes.bfloat16)).all())
"""


@pytest.mark.parametrize(
    "how, right", [("mended", True), pytest.param("as it is", False, marks=pytest.mark.slow)]
)
def test_bfloat16_is_right_where_it_is_mended_alone(how, right, interpreted, tmp_path):
    """A canary: where Triton has put this right, `interpreter.patch` is to go."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, "-P", str(file), how], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(right)] * 2


LOOP = """
import sys, numpy as np, triton, triton.language as tl
from eejax.kernels.interpreter import Tensor, patch

@triton.jit
def add(bounds_ptr, out_ptr):
    total = 0
    for i in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1), 3):
        total += i
    for i in tl.range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1), num_stages=2):
        total += i
    tl.store(out_ptr, total)

if sys.argv[1] == "mended":
    patch()
out = np.zeros(1, np.int32)
add[(1,)](Tensor(np.array([4, 9], np.int32)), Tensor(out))
assert out.tolist() == [4 + 7 + 4 + 5 + 6 + 7 + 8]
"""


@pytest.mark.parametrize("how", ["mended", pytest.param("as it is", marks=pytest.mark.slow)])
def test_loops_with_bounds_known_at_run_time_have_to_be_mended(how, interpreted, tmp_path):
    """A canary: where no Triton is used that refuses numpy's arrays as bounds, the patch is to go.

    Triton 3.9 takes them.
    """
    import triton

    right = how == "mended" or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    if np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("numpy < 2.4 makes an integer of any array of one element")
    file = tmp_path / "loop.py"
    file.write_text(LOOP)
    done = subprocess.run([sys.executable, "-P", str(file), how], capture_output=True, text=True)
    assert (done.returncode == 0) == right
    assert right or "only 0-dimensional arrays can be converted" in done.stderr


def test_a_mask_may_be_a_scalars_comparison(interpreted):
    import triton
    import triton.language as tl

    @triton.jit
    def below(x_ptr, m_ptr, out_ptr, N: tl.constexpr):
        i, m = tl.arange(0, N), tl.load(m_ptr)
        tl.store(out_ptr + i, tl.load(x_ptr + i), mask=(i < N - 1) & ((m > 0) & (m < 5)))

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    for m, written in ((4, 7), (5, 0)):
        args = jnp.ones(8), jnp.asarray([m], jnp.int32)
        (out,) = interpreter.launch(*args, kernel=below, grid=(1,), out=[shape], N=8)
        assert np.isnan(out).sum() == 8 - written


def test_what_a_kernel_leaves_out_shows(interpreted):
    import triton
    import triton.language as tl

    @triton.jit
    def half(x_ptr, out_ptr, count_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out_ptr + i, tl.load(x_ptr + i), mask=i < N // 2)

    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)]
    out, count = interpreter.launch(jnp.ones(8), kernel=half, grid=(1,), out=shapes, N=8)
    assert np.isnan(out).tolist() == [False] * 4 + [True] * 4
    assert count.tolist() == [np.iinfo(np.int32).max]


def test_without_its_variable_it_says_what_to_set():
    code = "from eejax.kernels import interpreter; interpreter.patch()"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "set TRITON_INTERPRET=1 before Triton is imported" in done.stderr


@pytest.mark.parametrize(
    "said, word",
    [
        (None, "tf32"),
        ("high", "tf32"),
        ("tensorfloat32", "tf32"),
        ("highest", "ieee"),
        ("float32", "ieee"),
        ("TF32_TF32_F32_X3", "ieee"),
    ],
)
def test_products_are_as_exact_as_jaxs_own(said, word):
    with jax.default_matmul_precision(said):
        assert call.precision(jnp.float32) == word
        assert call.precision(jnp.bfloat16) == "tf32"


def test_a_call_outside_of_a_program_goes_where_its_arguments_are(interpreted, monkeypatch):
    monkeypatch.setattr(call, "available", lambda: True)  # as if there were a GPU too

    def never(launch, x):
        return launch(x, kernel=None, grid=(1,), out=[x])[0]

    monkeypatch.setattr(
        call, "launch", lambda *a, **k: jax.ffi.ffi_call("no_such_call", k["out"])(*a)
    )
    assert call.op(never, lambda x: x + 1)(jnp.ones(2)).tolist() == [2.0, 2.0]


def pretend_gpu(monkeypatch, capability: str):
    """Let this machine seem to have a GPU of NVIDIA's, or of another maker, and its plugin."""
    cpus, gpu = jax.local_devices(), types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: cpus if backend else [gpu])
    monkeypatch.setattr(call, "PLUGINS", ("jax",))


def test_programs_are_for_the_default_device(monkeypatch):
    pretend_gpu(monkeypatch, "9.0")
    assert call.capability() == 90
    for device in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(device):
            assert call.capability() is None
            with call.compute_capability(80):
                assert call.capability() == 80
    pretend_gpu(monkeypatch, "gfx942")
    assert not call.for_gpu()


def test_a_gpu_without_jax_triton_raises(monkeypatch):
    call._available.cache_clear()
    pretend_gpu(monkeypatch, "8.0")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    try:
        with pytest.raises(
            ImportError, match=r"pip install 'eejax\[gpu\]', .* EEJAX_KERNELS=reference"
        ):
            call.op(lambda *_: 0, lambda x: x)(jnp.ones(2))
        x = call.op(lambda *_: 0, lambda x: x, "reference")(jnp.ones(2))
        assert x.sum() == 2
    finally:
        call._available.cache_clear()


@pytest.mark.parametrize("op", ["norm_router", "head_confidence", "linear_cross_entropy"])
def test_states_that_are_not_floating_are_refused(op):
    module = importlib.import_module(f"eejax.kernels.{op}.arg_specs")
    spec = next(s for s in module.SPECS if s.small)
    x, *rest = spec.args()
    with pytest.raises(ConfigError, match="= .*int32.*: must be of a floating dtype"):
        spec.run(x.astype(jnp.int32), *rest)


def test_an_unknown_implementation_is_named_at_once():
    with pytest.raises(ConfigError, match="implementation = 'bogus': must be one of"):
        call.implementation("bogus")
    for keep in (jnp.ones(3, bool), jnp.ones(5000, bool)):
        with pytest.raises(ConfigError, match="implementation = 'bogus'"):
            compact(keep, implementation="bogus")


def test_triton_without_a_gpu_says_what_to_ask_for():
    with pytest.raises(RuntimeError, match="there is no NVIDIA GPU .* Choose 'reference'"):
        compact(jnp.ones(3, bool), implementation="triton")


@pytest.mark.parametrize("value", ["reference", "cuda"])
def test_a_variable_turns_kernels_off(value):
    code = "from eejax.kernels import call; print(call.by_kernels(), call._default.value)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {call.VARIABLE: value},
        capture_output=True,
        text=True,
    )
    if value == "reference":
        assert done.stdout.split() == ["False", "reference"]
    else:
        assert "$EEJAX_KERNELS = 'cuda': must be one of" in done.stderr


def test_an_old_gpu_is_warned_of_and_goes_without(monkeypatch):
    call._available.cache_clear()
    pretend_gpu(monkeypatch, "7.5")
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    try:
        with pytest.warns(UserWarning, match="compute capability is 7.5: kernels need 8.0"):
            assert not call.by_kernels()
        assert call.op(lambda *_: 0, lambda x: x)(jnp.ones(2)).sum() == 2
    finally:
        call._available.cache_clear()


def test_what_another_thread_traces_is_its_own(interpreted):
    run, keep = jax.jit(lambda k: compact(k)), jnp.ones(5, bool)

    def kernels():
        return str(jax.make_jaxpr(run)(keep)).count("pure_callback")

    with call.implementation("interpreter"):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(kernels).result() == 0
        assert kernels() == 1
    assert kernels() == 0


def test_calls_outside_of_programs_compile_once(interpreted, monkeypatch):
    monkeypatch.setattr(call, "available", lambda: True)  # as if there were a GPU too
    traced = []
    run = call.op(lambda launch, x: x, lambda x: traced.append(1) or x + 1)
    for _ in range(3):
        assert run(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert len(traced) == 1


@pytest.mark.parametrize("which", ["reference", "interpreter"])
def test_a_batch_of_nothing(which, interpreted):
    order, counts = jax.vmap(lambda k: compact(k, implementation=which))(jnp.ones((0, 5), bool))
    assert (order.shape, counts.shape) == ((0, 5), (0, 2))
    spec = norm_router_specs.SPECS[0]
    x, *rest, threshold = spec.args()

    def route(x):
        return spec.run(x, *rest, threshold, implementation=which)

    assert jax.vmap(route)(jnp.zeros((0, *x.shape))).confidence.shape == (0, len(x))
