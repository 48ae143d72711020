"""How much host memory there is to swap into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

SAFE_SHARE = 0.5  # of free memory: the data loader and the page cache want some, too
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def free_host_bytes() -> int:
    """Bytes that this process may still allocate: the system's, or its control group's if lower."""
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_cgroup_free(_CGROUPS, _own_cgroup())]))


def default_host_budget() -> int:
    """A safe share of the free host memory."""
    return int(free_host_bytes() * SAFE_SHARE)


def _own_cgroup() -> str:
    """The path of this process's control group below the mount; "" where there is none."""
    if not _OWN_CGROUP.is_file():
        return ""
    for line in _OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            return path.strip("/")
    return ""


def _cgroup_free(mount: Path, own: str) -> Iterator[int]:
    """What is left under the limit of the group and of each group around it, where one is set."""
    for names in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = mount / names[0]
        folder = root / own
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield from _group_free(group, *names[1:])


def _group_free(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    maximum, current = _number(group / limit), _number(group / used)
    if maximum is not None and current is not None:
        yield maximum - current + _reclaimable(group / "memory.stat", cache)


def _reclaimable(statistics: Path, name: str) -> int:
    """File pages that the kernel would drop before it refuses memory."""
    if not statistics.is_file():
        return 0
    rows = (line.split() for line in statistics.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file or no limit."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
