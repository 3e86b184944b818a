"""The memory that is left is the kernel's number, or less where a control group has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.platform.host_memory import read_available

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a file system whose kernel has 1000 MiB left."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 4096000 kB\nMemFree: 1 kB\nMemAvailable:   {1000 * 1024} kB\n")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limit_v2(folder: Path, limit: object, used: int, cache: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used * MIB)
    write(folder / "memory.stat", f"anon 5\ninactive_file {cache * MIB}\nactive_file 7")


def test_without_control_groups_it_is_what_the_kernel_says(root: Path) -> None:
    available = read_available(root)
    assert (available.size, available.source) == (1000 * MIB, "MemAvailable")


def test_the_tightest_group_around_the_process_counts(root: Path) -> None:
    groups = root / "sys/fs/cgroup"
    write(groups / "cgroup.controllers", "memory")
    write(root / "proc/self/cgroup", "0::/jobs/mine")
    limit_v2(groups / "jobs", 700 * MIB, used=200, cache=30)
    limit_v2(groups / "jobs/mine", "max", used=50)
    available = read_available(root)
    assert available.size == 530 * MIB
    assert available.source == f"the limit of control group {groups / 'jobs'}"
    limit_v2(groups / "jobs/mine", 100 * MIB, used=150)
    assert read_available(root).size == 0


def test_a_generous_group_is_no_bound(root: Path) -> None:
    write(root / "sys/fs/cgroup/cgroup.controllers", "memory")
    write(root / "proc/self/cgroup", "0::/")
    limit_v2(root / "sys/fs/cgroup", 5000 * MIB, used=200)
    assert read_available(root).source == "MemAvailable"


def test_groups_of_version_1_are_read_too_and_their_mount_point_where_the_path_is_the_hosts(root: Path) -> None:
    memory = root / "sys/fs/cgroup/memory"
    write(root / "proc/self/cgroup", "4:memory:/docker/0123\n1:cpu:/docker/0123\n0::/")
    write(memory / "memory.limit_in_bytes", 600 * MIB)
    write(memory / "memory.usage_in_bytes", 250 * MIB)
    write(memory / "memory.stat", f"cache 1\ntotal_inactive_file {50 * MIB}")
    available = read_available(root)
    assert (available.size, available.source) == (400 * MIB, f"the limit of control group {memory}")
    write(memory / "memory.limit_in_bytes", 9223372036854771712)
    assert read_available(root).source == "MemAvailable"


def test_this_machine_has_some() -> None:
    assert 0 < read_available().size < 1 << 50
