"""How many processors this process may use: a container often has fewer than its machine."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

OF_THIS_PROCESS, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable(of: Path = OF_THIS_PROCESS, mounted: Path = MOUNTED) -> int:
    """Return how many processors this process may use: those of its affinity, or its quota, rounded up.

    Args:
        of: names the control groups of a process, as ``cgroups(7)`` describes it.
        mounted: where they are mounted.
    """
    quotas = (quota for group in control_groups("cpu", of, mounted) for quota in _quota(group))
    return min([len(os.sched_getaffinity(0)), *quotas])


def control_groups(controller: str, of: Path = OF_THIS_PROCESS, mounted: Path = MOUNTED) -> Iterator[Path]:
    """Yield the folders of a process's control groups for this controller, and of those above them."""
    lines = of.read_text().splitlines() if of.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path.removeprefix("/"))
            for each in (group, *group.parents):  # a container may see its own as the root
                yield mounted / controllers / each


def _quota(group: Path) -> Iterator[int]:
    """Yield the quota of one control group, of version 2 (``cpu.max``) or 1, if it has one."""
    with contextlib.suppress(FileNotFoundError):
        names = ("cpu.max",) if (group / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = " ".join((group / name).read_text() for name in names).split()
        if quota not in ("max", "-1"):
            yield math.ceil(int(quota) / int(period))
