import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eejax.checkpoint.manager import CHECKSUMS, Checkpoints
from eejax.common.errors import CheckpointError
from eejax.sharding.mesh import MeshConfig, make_mesh


def tree(scale=1.0):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    return {"w": jnp.asarray(x * scale), "deep": {"b": jnp.arange(8, dtype=jnp.int32)}}


def structs(value, mesh=None, spec=None):
    mesh = mesh or make_mesh(MeshConfig())
    sharding = NamedSharding(mesh, spec or P())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), value)


def wanted(_):
    return {"params": structs(tree())}


def write(folder, steps, keep=3):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, {"params": tree(step)}, {"at": step})
    checkpoints.close()


def read(folder, targets=wanted, partial=False, **kwargs):
    checkpoints = Checkpoints(folder, **kwargs)
    try:
        return checkpoints.restore(targets, partial=partial)
    finally:
        checkpoints.close()


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_newest_come_back_and_the_oldest_go(tmp_path):
    write(tmp_path / "c", [1, 5, 9, 12], keep=3)
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.steps() == [5, 9, 12]
    restored = checkpoints.restore(wanted)
    assert (restored.step, restored.metadata) == (12, {"at": 12})
    equal(restored.trees["params"], tree(12))
    equal(checkpoints.restore(wanted, step=5).trees["params"], tree(5))
    with pytest.raises(CheckpointError, match="no checkpoint of step 1, only 5, 9, 12"):
        checkpoints.restore(wanted, step=1)
    checkpoints.close()


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    assert read(tmp_path / "c") is None
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoints(tmp_path / "none", read_only=True)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file where checkpoints go"):
        Checkpoints(tmp_path / "file")


def test_values_may_be_donated_as_soon_as_save_returns(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    overwrite = jax.jit(lambda t: jax.tree.map(lambda a: a * 0 - 1, t), donate_argnums=0)
    for step in range(1, 6):
        value = jax.block_until_ready(jax.tree.map(jnp.copy, tree(step)))
        checkpoints.save(step, {"params": value}, {})
        jax.block_until_ready(overwrite(value))
        checkpoints.wait()
        equal(checkpoints.restore(wanted).trees["params"], tree(step))
    checkpoints.close()


def layered():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embed": {"tokens": draw(300, 256)},
        "layers": {"attn": {"q": draw(6, 256, 16, 64)}, "scale": draw(6, 256)},
        "final": {"head": draw(4000, 256)},
    }


def bytes_read():
    """Bytes this process has asked the system to read so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_a_part_is_read_without_the_rest(tmp_path):
    whole, mesh = layered(), make_mesh(MeshConfig(model=2))
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(3, {"params": whole}, {})
    checkpoints.close()
    part = {
        "embed": structs(whole["embed"], mesh, P("model")),
        "layers": jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype, sharding=a.sharding),
            structs(whole["layers"], mesh),
        ),
    }
    read(tmp_path / "c", lambda _: {"params": part}, read_only=True, partial=True)  # warm
    before = bytes_read()
    trees = read(tmp_path / "c", lambda _: {"params": part}, read_only=True, partial=True).trees
    seen = bytes_read() - before
    equal(trees["params"]["embed"], whole["embed"])
    equal(trees["params"]["layers"], jax.tree.map(lambda a: a[:2], whole["layers"]))
    assert trees["params"].keys() == part.keys()
    needed = sum(a.size * 4 for a in jax.tree.leaves(part))
    everything = sum(a.size * 4 for a in jax.tree.leaves(whole))
    # Once for the checksum and once for the values.
    assert needed < seen < 0.6 * everything

    # What is not asked for may even be gone; what is asked for may not.
    params = tmp_path / "c" / "3" / "params"
    (params / "final.head" / "0.0").unlink()
    (params / "layers.attn.q" / "2.0.0.0").unlink()
    (params / "layers.attn.q" / "5.0.0.0").write_bytes(b"x")
    again = read(tmp_path / "c", lambda _: {"params": part}, read_only=True, partial=True)
    equal(again.trees, trees)
    (params / "layers.attn.q" / "1.0.0.0").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"layers.attn.q/1.0.0.0 is not as it was written"):
        read(tmp_path / "c", lambda _: {"params": part}, read_only=True, partial=True)


def test_a_part_that_was_not_saved_is_refused(tmp_path):
    whole = layered()
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, {"params": whole}, {})
    more = structs(jnp.zeros((7, 256)))
    for part, message in [
        ({"layers": {"scale": more}}, r"\[6, 256\] in the checkpoint, float32\[7, 256\] wanted"),
        ({"exits": {"head": more}}, "params/exits/head: nothing in the checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(lambda _, part=part: {"params": part}, partial=True)
    # Fewer layers are another model unless a part was asked for.
    short = structs(whole)
    short["layers"]["scale"] = structs(whole["layers"]["scale"][:2])
    with pytest.raises(CheckpointError, match="another shape"):
        checkpoints.restore(lambda _: {"params": short})
    checkpoints.close()


# What is noticed even where a kill came before the checksums were written.
WITHOUT_CHECKSUMS = ("truncated", "missing file", "missing item", "no metadata")


def damage(folder, how):
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS]
    chunks = [p for p in files if p.name.replace(".", "").isdigit()]
    data = max(chunks, key=lambda p: p.stat().st_size)
    if how == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 0x10
        data.write_bytes(content)
    elif how == "missing file":
        data.unlink()
    elif how == "missing item":
        shutil.rmtree(folder / "params")
    elif how == "no metadata":
        shutil.rmtree(folder / "meta")
    elif how == "checksums":
        (folder / CHECKSUMS).write_text("{")


# Where a read fails, tensorstore's other reads are abandoned, which Python reports.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    "how, sealed",
    [(how, True) for how in (*WITHOUT_CHECKSUMS, "flipped", "checksums")]
    + [(how, False) for how in WITHOUT_CHECKSUMS],
)
def test_a_damaged_newest_checkpoint_is_reported_and_skipped(tmp_path, caplog, how, sealed):
    write(tmp_path / "c", [1, 2])
    damage(tmp_path / "c" / "2", how)
    if not sealed:
        (tmp_path / "c" / "2" / CHECKSUMS).unlink()
    checkpoints = Checkpoints(tmp_path / "c")
    restored = checkpoints.restore(wanted, set_aside=True)
    assert restored.step == 1
    equal(restored.trees["params"], tree(1))
    gc.collect()  # what was abandoned is reported here and not in the next test
    assert "c/2 is damaged" in caplog.text and "the one before" in caplog.text
    # The step can be saved again.
    checkpoints.save(2, {"params": tree(7)}, {"at": 7})
    checkpoints.close()
    equal(read(tmp_path / "c").trees["params"], tree(7))
    assert (tmp_path / "damaged" / "2").is_dir()


def test_nothing_usable_left_is_an_error_that_lists_the_damage(tmp_path):
    write(tmp_path / "c", [1, 2])
    for step in "12":
        damage(tmp_path / "c" / step, "truncated")
    with pytest.raises(CheckpointError, match="no usable checkpoint(.|\n)*c/2 is dam(.|\n)*c/1 is"):
        read(tmp_path / "c")


def test_another_shape_names_the_leaves_and_is_not_taken_for_damage(tmp_path):
    write(tmp_path / "c", [1, 2])
    other = tree() | {"w": jnp.zeros((64, 16)), "extra": jnp.zeros(3, jnp.bfloat16)}
    with pytest.raises(CheckpointError) as error:
        read(tmp_path / "c", lambda _: {"params": structs(other)})
    assert "params/extra: nothing in the checkpoint, bfloat16[3] wanted" in str(error.value)
    assert "params/w: float32[64, 32] in the checkpoint, float32[64, 16] wanted" in str(error.value)
    assert "model configuration" in str(error.value)


def test_any_mesh_reads_what_any_mesh_wrote(tmp_path):
    big = make_mesh(MeshConfig(data=2, model=4))
    value = jax.device_put(tree(3), NamedSharding(big, P("model")))
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, {"params": value}, {})
    checkpoints.close()
    for mesh, spec in [
        (make_mesh(MeshConfig()), P()),
        (make_mesh(MeshConfig(pipe=8)), P("pipe")),
        (make_mesh(MeshConfig(data=4, model=2)), P(("model",))),
    ]:
        restored = read(tmp_path / "c", lambda _, m=mesh, s=spec: {"params": structs(tree(), m, s)})
        equal(restored.trees["params"], tree(3))
        assert restored.trees["params"]["w"].sharding == NamedSharding(mesh, spec)


def test_a_failed_write_says_so_and_leaves_the_last_good_checkpoint(tmp_path):
    # A limit on the size of files is the full disk that needs no privileges.
    script = """
        import resource, signal, sys
        import jax.numpy as jnp, numpy as np
        from eejax.checkpoint.manager import Checkpoints
        from eejax.common.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        checkpoints = Checkpoints(sys.argv[1])
        noise = lambda n: jnp.asarray(np.random.default_rng(n).normal(size=n).astype(np.float32))
        checkpoints.save(1, {"params": {"w": noise(1000)}}, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            checkpoints.save(2, {"params": {"w": noise(1_000_000)}}, {})
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "saving the checkpoint of step 2" in run.stdout, run.stdout + run.stderr
    assert "last good checkpoint is that of step 1; make room" in run.stdout

    def want(_):
        return {"params": structs({"w": jnp.zeros(1000)})}

    assert read(tmp_path / "c", want).step == 1
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["1"]


@pytest.mark.parametrize(
    "error, fix",
    [
        (ValueError(f"tensorstore: {os.strerror(errno.ENOSPC)} [file=x]"), "make room, or "),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "x"), "make room, or "),
        (ValueError(f"tensorstore: {os.strerror(errno.EACCES)} [file=x]"), "this user may use"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "x"), "give another path, and "),
        (ValueError("keys differ"), "No checkpoint is finished yet; start the same command again"),
    ],
)
def test_only_a_full_disk_asks_for_room(error, fix, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    checkpoints = Checkpoints(tmp_path / "c")
    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save(1, {"params": {}}, {})
    checkpoints.close()
    assert fix in str(raised.value)
    assert ("make room" in fix) == ("make room" in str(raised.value))


def test_checksums_cover_every_file(tmp_path):
    write(tmp_path / "c", [4])
    folder = tmp_path / "c" / "4"
    table = json.loads((folder / CHECKSUMS).read_text())
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(table) == files - {CHECKSUMS}


def test_what_a_killed_save_left_is_removed_by_who_may_write(tmp_path):
    left = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp" / "params"
    left.mkdir(parents=True)
    Checkpoints(tmp_path / "checkpoints", read_only=True).close()
    assert left.exists()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [] and not left.parent.exists()
    checkpoints.close()
    (tmp_path / "checkpoints").rmdir()  # nothing is in it, and no thread looks for it any more
