"""Limits of a process, from files as systems with control groups of either version have them."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine.limits import Limit
from ridgeline.probe import measure
from ridgeline.probe.host import fingerprint
from ridgeline.probe.host.control_groups import (
    Grant,
    core_set,
    cpu_quota,
    memory_limit,
    process_limit,
)
from ridgeline.probe.host.limits import limits
from ridgeline.probe.host.mounts import Mount, mount_of, mounts

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as shutil's own
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "\n".join(
    f"3{number} 24 0:3{number} {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
    for number, (name, root) in enumerate(
        [("cpu", "/"), ("memory", "/docker/abc"), ("cpuset", "/"), ("pids", "/")]
    )
)


def write(root: Path, files: dict[str, str]) -> Path:
    """The root of a system with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def host(root: Path, files: dict[str, str]) -> Path:
    """A host of 64 cores and 128 GiB with these files, too."""
    usual = {
        "sys/devices/system/cpu/online": "0-63",
        "proc/meminfo": f"MemTotal: {128 << 20} kB\nMemFree: 1 kB",
        "proc/self/status": "Name: python\nCpus_allowed_list:\t0-63\nMems_allowed_list: 0",
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units\n"
            "Max locked memory         unlimited            unlimited            bytes\n"
            "Max open files            unlimited            unlimited            files"
        ),
    }
    return write(root, usual | files)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """Each limit with its amount, who says so and what follows."""
    group = "sys/fs/cgroup"
    root = host(
        tmp_path,
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/",
            f"{group}/cpu.max": "250000 100000",
            f"{group}/memory.max": str(8 << 30),
            f"{group}/cpuset.cpus.effective": "0-3,8-11",
            f"{group}/pids.max": "512",
            "proc/self/status": "Cpus_allowed_list: 0-3",
            "proc/self/limits": (
                "Max locked memory  65536 65536 bytes\nMax open files  1024  524288  files"
            ),
        },
    )
    found = limits(root)
    assert [str(limit) for limit in found] == [
        "cores: 2.5 of 64 (cgroup cpu.max)",
        "cores: 8 of 64 (cgroup cpuset.cpus.effective)",
        "cores: 4 of 64 (affinity)",
        "memory: 8.00 GiB of 128 GiB (cgroup memory.max)",
        "processes: 512 (cgroup pids.max)",
        "locked memory: 64.0 KiB (ulimit -l)",
        "open files: 1024 of 524288 (ulimit -n)",
    ]
    assert found[0].follows == (
        "workers and threads are planned for 2: where more run, all stand still for the rest of a period once its "
        "share is used up"
    )
    assert found[1].follows == "workers and threads are planned for 8 at most"
    assert found[2].follows == (
        "workers and threads are planned for 4 at most; they were chosen where this process was started"
    )
    assert found[-1].follows.endswith("; `ulimit -n` raises it to the second number")
    assert all(limit.follows for limit in found)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    """Each controller has its own hierarchy; a container sees its part of one below another path."""
    group = "sys/fs/cgroup"
    root = host(
        tmp_path,
        {
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpuset:/\n2:cpu,cpuacct:/\n1:pids:/",
            f"{group}/cpu/cpu.cfs_quota_us": "400000",
            f"{group}/cpu/cpu.cfs_period_us": "100000",
            f"{group}/memory/memory.limit_in_bytes": str(4 << 30),
            f"{group}/cpuset/cpuset.cpus": "0-1",
            f"{group}/pids/pids.max": "max",
        },
    )
    assert [str(limit) for limit in limits(root)] == [
        "cores: 4 of 64 (cgroup cpu.cfs_quota_us)",
        "cores: 2 of 64 (cgroup cpuset.cpus)",
        "memory: 4.00 GiB of 128 GiB (cgroup memory.limit_in_bytes)",
    ]


def test_without_limits_there_are_none(tmp_path: Path) -> None:
    """`max`, -1, and the largest number of version 1 limit nothing; nor does a system without such files."""
    group = "sys/fs/cgroup"
    root = host(
        tmp_path / "v1",
        {
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpuset:/\n2:cpu:/\n1:pids:/",
            f"{group}/cpu/cpu.cfs_quota_us": "-1",
            f"{group}/cpu/cpu.cfs_period_us": "100000",
            f"{group}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{group}/cpuset/cpuset.cpus": "0-63",
            f"{group}/pids/pids.max": "max",
        },
    )
    assert limits(root) == ()
    root = host(
        tmp_path / "v2",
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/user.slice",
            f"{group}/user.slice/cpu.max": "max 100000",
            f"{group}/user.slice/memory.max": "max",
            f"{group}/user.slice/pids.max": "max",
        },
    )
    assert limits(root) == ()
    assert limits(tmp_path / "none") == ()


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 1 << 40)), min_size=4, max_size=4),
    st.integers(0, 3),
)
def test_the_tightest_group_above_counts(
    tmp_path_factory: pytest.TempPathFactory, grants: list[int | None], depth: int
) -> None:
    """A group cannot have more than those above it; those below it are others."""
    root = tmp_path_factory.mktemp("root")
    folders = ["sys/fs/cgroup", "sys/fs/cgroup/a", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a/b/c"]
    files = {
        f"{folder}/memory.max": "max" if grant is None else str(grant)
        for folder, grant in zip(folders, grants, strict=True)
    }
    mine = "/" + "/".join(("a", "b", "c")[:depth])
    write(root, files | {"proc/self/mountinfo": V2, "proc/self/cgroup": f"0::{mine}"})
    seen = [grant for grant in grants[: depth + 1] if grant is not None]
    wanted = Grant(min(seen), "cgroup memory.max") if seen else None
    assert memory_limit(root) == wanted


def test_quotas_sets_and_processes_are_the_least_above(tmp_path: Path) -> None:
    """A quota is compared as a share, whatever its period."""
    group = "sys/fs/cgroup/a"
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/cpu.max": "30000 20000",
            f"{group}/cpu.max": "200000 100000",
            "sys/fs/cgroup/pids.max": "100",
            f"{group}/pids.max": "200",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
            f"{group}/cpuset.cpus.effective": "1,3",
        },
    )
    assert cpu_quota(root) == Grant(1.5, "cgroup cpu.max")
    assert process_limit(root) == Grant(100, "cgroup pids.max")
    assert core_set(root) == Grant(2, "cgroup cpuset.cpus.effective")


def test_a_group_outside_of_what_is_seen_is_where_it_is_mounted(tmp_path: Path) -> None:
    """Containers without a namespace of groups read paths of the host, or paths that lead out of theirs."""
    seen = V2.replace(" / /sys", " /kubepods/pod2 /sys")
    for number, (path, mounted) in enumerate(
        [("/kubepods/pod1", seen), ("/../../other", seen), ("/../../other", V2)]
    ):
        root = write(
            tmp_path / str(number),
            {
                "proc/self/mountinfo": mounted,
                "proc/self/cgroup": f"0::{path}",
                "sys/fs/cgroup/memory.max": "1000",
            },
        )
        (root / "sys/other").mkdir()
        (root / "sys/other/memory.max").write_text("1\n")
        assert memory_limit(root) == Grant(1000, "cgroup memory.max")


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A path of one version is no path of the other."""
    group = "sys/fs/cgroup"
    unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": f"{V1.replace('/docker/abc', '/')}\n{unified}",
            "proc/self/cgroup": "4:memory:/mine\n0::/session",
            f"{group}/memory/mine/memory.limit_in_bytes": "3000",
            f"{group}/memory/session/memory.limit_in_bytes": "1000",
            f"{group}/unified/mine/memory.max": "2000",
        },
    )
    assert memory_limit(root) == Grant(3000, "cgroup memory.limit_in_bytes")


@pytest.mark.parametrize(("total", "is_told"), [(64 << 20, True), (64 << 30, False)])
def test_little_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, is_told: bool
) -> None:
    """Docker's 64 MiB are told of, the system's own half of the memory is not."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, 0, total))
    found = [str(limit) for limit in limits(host(tmp_path, {}))]
    assert found == (["shared memory: 64.0 MiB (size of /dev/shm)"] if is_told else [])


def test_mounts_with_spaces_and_optional_words(tmp_path: Path) -> None:
    """Blanks are written as octal numbers; the last mount on one point is what is seen there."""
    lines = [
        "22 1 254:0 / / rw - ext4 /dev/vda rw,discard",
        f"23 22 0:5 / {tmp_path!s}/my\\040disk rw master:1 - xfs /dev/sda rw",
        f"24 22 0:6 /part {tmp_path!s}/my\\040disk rw - nfs4 server:/a rw",
        "broken line",
    ]
    root = write(tmp_path / "root", {"proc/self/mountinfo": "\n".join(lines)})
    assert mounts(root)[0] == Mount(Path("/"), "ext4", "/", ("rw", "discard"))
    folder = tmp_path / "my disk" / "runs"
    folder.mkdir(parents=True)
    assert mount_of(folder, root) == Mount(tmp_path / "my disk", "nfs4", "/part", ("rw",))
    assert mount_of(tmp_path, root).kind == "ext4"
    assert mount_of(tmp_path, tmp_path / "none") == Mount(Path("/"), "unknown")


def test_this_host_is_planned_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores and memory of a profile are what is granted, whole cores and at least one."""
    monkeypatch.setattr(fingerprint, "cpu_quota", lambda: Grant(0.5, "cgroup"))
    monkeypatch.setattr(fingerprint, "memory_limit", lambda: Grant(1 << 20, "cgroup"))
    assert (fingerprint.num_cores(), fingerprint.host().memory_bytes) == (1, 1 << 20)
    monkeypatch.setattr(fingerprint, "cpu_quota", lambda: None)
    monkeypatch.setattr(fingerprint, "memory_limit", lambda: Grant(2.0**62, "cgroup"))
    assert fingerprint.num_cores() == len(os.sched_getaffinity(0))
    assert fingerprint.host().memory_bytes < 1 << 62


def test_numbers_of_limits() -> None:
    """Bytes have units, counts do not; large ones are written out."""
    assert str(Limit(what="processes", granted=4194304, by="x")) == "processes: 4194304 (x)"
    assert Limit(what="cores", granted=1.5, whole=4, by="x").amount == "1.5 of 4"
    assert Limit(what="memory", granted=1 << 20, unit="B", by="x").amount == "1.00 MiB"


def test_limits_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A profile from the cache has the limits of who asks, quick or not, and not of who measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = (Limit(what="processes", granted=100, by="x"),)
    monkeypatch.setattr(measure, "limits", lambda: seen)
    first = measure.measure(settings=())
    assert first.limits == seen
    measure._kept(first)
    monkeypatch.setattr(measure, "limits", tuple)
    assert measure.measure(settings=()) == msgspec.structs.replace(first, limits=())
    assert measure.known_machine().machine.limits == ()
