"""Control groups as files like any other: what the script and the launcher both count cores by."""

from __future__ import annotations

from pathlib import Path

# What the kernel says of a process's groups, files that limit them, and for how many cores that
# is CPU time; None: no limit.
CGROUPS = {
    "no limit": ("0::/job\n", {"job/cpu.max": "max 100000"}, None),
    "two and a half": ("0::/job\n", {"job/cpu.max": "250000 100000"}, 3),
    "group above": (
        "0::/slice/my job/step\n",
        {"slice/my job/step/cpu.max": "900000 100000", "slice/cpu.max": "200000 100000"},
        2,
    ),
    "container": ("0::/\n", {"cpu.max": "300000 100000"}, 3),
    "container that sees the host's path": ("0::/docker/01\n", {"cpu.max": "600000 100000"}, 6),
    "path of the host": ("0::/../../pod\n", {"cpu.max": "300000 100000"}, 3),
    "version 1": (
        "5:cpuset:/\n4:cpu,cpuacct:/pod\n1:name=systemd:/pod\n",
        {"cpu/pod/cpu.cfs_quota_us": "500000", "cpu/pod/cpu.cfs_period_us": "100000"},
        5,
    ),
    "version 1, no limit": (
        "4:cpu:/\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        None,
    ),
    "both versions": (
        "0::/job\n4:cpu:/pod\n",
        {
            "job/cpu.max": "300000 100000",
            "cpu/pod/cpu.cfs_quota_us": "400000",
            "cpu/pod/cpu.cfs_period_us": "100000",
        },
        3,
    ),
    "nothing of the kind": ("nothing of the kind\n", {}, None),
    "no /proc": (None, {}, None),
}


def make_cgroups(root: Path, case: str) -> int | None:
    """The files of a case, under proc/ and sys/ of `root`; returns the cores that it leaves."""
    groups, limits, cores = CGROUPS[case]
    if groups:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return cores
