"""Memory of the pass that collects states, and the memory that is free for them."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from eejax.calibration import memory
from eejax.calibration import states as states_module
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig


@pytest.mark.parametrize("head", ["shared", "own"])
def test_more_exits_need_hardly_more_memory(head):
    """Logits are 8 MB an exit here and all else is little."""
    sizes = []
    for n in (1, 7):
        config = ModelConfig(
            vocab_size=32768,
            n_layers=8,
            d_model=8,
            n_heads=2,
            context_length=16,
            head=head,
            exits=tuple(ExitConfig(b + 1, head=head) for b in range(n)),
        )
        batch = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        made = states_module._pass.lower(
            params.shapes(config), config, {"tokens": batch, "labels": batch}
        ).compile()
        sizes.append(made.memory_analysis().temp_size_in_bytes)
    assert 32768 * 128 * 4 < sizes[0] < sizes[1] < 1.3 * sizes[0]


def test_free_memory_is_what_the_kernel_and_the_groups_leave(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert memory.free(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   5000 kB\n")
    assert memory.free(tmp_path) == 5000 * 1024
    write("proc/self/cgroup", "0::/jobs/mine\n")
    write("sys/fs/cgroup/jobs/mine/memory.max", "max\n")
    write("sys/fs/cgroup/jobs/mine/memory.current", "700000\n")
    assert memory.free(tmp_path) == 5000 * 1024  # no limit
    write("sys/fs/cgroup/jobs/memory.max", "1000000\n")
    write("sys/fs/cgroup/jobs/memory.current", "800000\n")
    assert memory.free(tmp_path) == 200_000  # that of the group above
    # Files that were read are in use until somebody wants the place.
    write("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 300000\nactive_file 7\n")
    assert memory.free(tmp_path) == 500_000
    # Version 1, in a container that does not see its own group's name.
    write("proc/self/cgroup", "5:cpu,memory:/docker/0123\n4:devices:/\n0::/\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "400000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "390000\n")
    stat = "inactive_file 1\ntotal_inactive_file 30000\n"
    write("sys/fs/cgroup/memory/memory.stat", stat)
    assert memory.free(tmp_path) == 40_000
    assert 0 < memory.free() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
