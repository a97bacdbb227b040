"""Processes find each other, agree, and put the rows they have onto any mesh."""

import errno
import json
import os
import signal
import socket

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import start

from eejax.common.errors import ConfigError
from eejax.sharding import distributed
from eejax.sharding.distributed import Processes
from eejax.sharding.mesh import MeshConfig, make_mesh


@pytest.mark.parametrize(
    "values, message",
    [
        ({"processes": 2}, "coordinator, process missing: .* given together"),
        ({"coordinator": "a:1", "process": 0}, "processes missing"),
        (
            {"coordinator": "a", "processes": 2, "process": 0},
            "coordinator = 'a': must be HOST:PORT",
        ),
        ({"coordinator": ":1", "processes": 2, "process": 0}, "must be HOST:PORT"),
        ({"coordinator": "a:70000", "processes": 2, "process": 0}, "must be HOST:PORT"),
        ({"coordinator": "a:1", "processes": 0, "process": 0}, "processes = 0: must be > 0"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "process = 2: .*, 0 to 1"),
        ({"coordinator": "a:1", "processes": 2, "process": -1}, "process = -1: .*, 0 to 1"),
        ({"heartbeat_seconds": 0}, "heartbeat_seconds = 0: must be > 0"),
    ],
)
def test_settings_that_cannot_be_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Processes(**values)


def test_a_coordinator_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="nosuch.invalid:1234': no such host"):
        distributed.start(Processes("nosuch.invalid:1234", 2, 1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used here"):
            distributed.start(Processes(f"127.0.0.1:{port}", 2, 0))
    with pytest.raises(ConfigError, match="nothing answers there after 1 s .*Start process 0"):
        distributed.start(Processes(f"127.0.0.1:{port}", 2, 1, connect_seconds=1))
    assert not jax.distributed.is_initialized()


def test_alone_everything_is_what_it_says():
    assert distributed.is_first() and not distributed.is_multiprocess() and distributed.index() == 0
    assert distributed.broadcast_value("x") == "x"
    assert distributed.broadcast_from_process_zero(lambda: 3) == 3
    assert distributed.any_process(True) and not distributed.any_process(False)
    distributed.wait()
    with pytest.raises(KeyError):
        distributed.broadcast_from_process_zero(lambda: {}["none"])
    mesh = make_mesh(MeshConfig(data=4))
    distributed.check_mesh(mesh)
    assert distributed.shard(mesh) == (0, 1)
    assert int(distributed.MaxVote(mesh).cast(7)) == 7
    assert distributed.peer_failure_message(jax.errors.JaxRuntimeError("UNKNOWN: anything")) is None


@given(st.integers(1, 12), st.data())
def test_a_part_is_all_rows_that_are_wanted_and_no_others_or_everything(size, data):
    mine = data.draw(st.sets(st.integers(0, size - 1)) | st.integers(0, size).map(range).map(set))
    index, count = distributed.part_of(mine, size)
    assert size % count == 0 and 0 <= index < count
    held = set(range(index * size // count, (index + 1) * size // count))
    equal = [(i, n) for n in range(1, size + 1) for i in range(n) if size % n == 0]
    fits = [(i, n) for i, n in equal if mine == set(range(i * size // n, (i + 1) * size // n))]
    assert [(index, count)] == (fits or [(0, 1)]) and mine <= held


PROGRAM = """
import itertools, json, sys
import jax, numpy as np
from eejax.common.errors import CheckpointError
from eejax.sharding import distributed
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.step import put_batch
how = dict(a.removeprefix("--").split("=") for a in sys.argv[1:])
address = how.pop("coordinator")
distributed.start(distributed.Processes(address, **{k: int(v) for k, v in how.items()}))
me = distributed.index()
said = {"several": distributed.is_multiprocess(), "first": distributed.is_first()}
said["agreed"] = distributed.broadcast_value({"from": me, "long": "x" * 5000})["from"]
said["done by"] = distributed.broadcast_from_process_zero(lambda: me)
said["any"] = [distributed.any_process(me == 1), distributed.any_process(False)]

def fail(error):
    try:
        distributed.broadcast_from_process_zero(lambda: (_ for _ in ()).throw(error))
    except Exception as raised:
        return [type(raised).__name__, str(raised)]

class Local(Exception):
    "Cannot be pickled where it is thrown together like this."
    def __init__(self, a, b): super().__init__(a + b)

said["errors"] = [fail(e) for e in (
    OSError(28, "No space left on device", "/a/b"), CheckpointError("damaged"), Local("a", "b"),
)]
mesh = make_mesh(MeshConfig(data=8))
said["ballot"] = int(distributed.MaxVote(mesh).cast(15 * (me == 1)))
try:
    distributed.check_mesh(make_mesh(MeshConfig(data=4)))
except ValueError as error:
    said["small mesh"] = str(error)

# Rows of every layout of (data, pipe, model), in the order of the devices and in others.
whole = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
total = jax.jit(lambda a: (a * (1 + np.arange(16, dtype=np.int32))[:, None]).sum())
orders = {"as they are": list(range(8)), "alternating": [0, 4, 1, 5, 2, 6, 3, 7]}
said["meshes"] = {}
for (name, order), sizes in itertools.product(
    orders.items(), [(8, 1, 1), (4, 2, 1), (2, 2, 2), (2, 4, 1), (1, 8, 1), (1, 2, 4)]
):
    mesh = make_mesh(MeshConfig(*sizes), [jax.devices()[i] for i in order])
    index, count = shard = distributed.shard(mesh)
    rows = len(whole) // count
    mine = {"tokens": whole[index * rows : (index + 1) * rows]}
    placed = put_batch(mine, mesh, shard)["tokens"]
    for piece in placed.addressable_shards:
        np.testing.assert_array_equal(piece.data, whole[piece.index])
    assert int(total(placed)) == int(total(whole)), (name, sizes)
    everything = put_batch({"tokens": whole}, mesh)["tokens"]
    assert int(total(everything)) == int(total(whole)), (name, sizes)
    said["meshes"][f"{name} {sizes}"] = shard
print(json.dumps(said))
"""


def test_two_processes_agree_and_place_their_rows(tmp_path):
    with start(tmp_path, "-P", "-c", PROGRAM) as group:
        assert group.wait() == [0, 0], group.err(0) + group.err(1)
    first, second = (json.loads(group.out(i).splitlines()[-1]) for i in (0, 1))
    assert (first.pop("first"), second.pop("first")) == (True, False)
    ours, theirs = first.pop("meshes"), second.pop("meshes")
    assert (first["errors"].pop(), second["errors"].pop()) == (
        ["Local", "ab"],
        ["RuntimeError", "process 0: Local: ab"],  # as it cannot be sent
    )
    assert first == second
    assert first["several"] and first["agreed"] == 0 and first["done by"] == 0
    assert first["any"] == [True, False] and first["ballot"] == signal.SIGTERM
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b")
    assert first["errors"][0] == ["OSError", str(full)]
    assert first["errors"][1] == ["CheckpointError", "damaged"]
    assert "takes 4 of the 8 devices of 2 processes" in first["small mesh"]
    # Only the rows of its own devices where these are half of the batch, else all.
    for name in ("(8, 1, 1)", "(4, 2, 1)", "(2, 2, 2)", "(2, 4, 1)"):
        assert (ours[f"as they are {name}"], theirs[f"as they are {name}"]) == ([0, 2], [1, 2])
    for places in (ours, theirs):
        assert places["as they are (1, 8, 1)"] == [0, 1]  # pipeline stages on both hosts
        assert places["alternating (4, 2, 1)"] == places["alternating (8, 1, 1)"] == [0, 1]


def test_processes_that_do_not_come_together_are_told_so(tmp_path):
    with start(tmp_path, "-P", "-c", PROGRAM, only=[0], connect=2) as group:
        assert group.wait(seconds=60) == [1]
    last = group.err(0).strip().splitlines()[-1]
    assert last.startswith("error: the processes of this run did not come together at 127.0.0.1:")
