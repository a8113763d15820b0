"""How much memory a device has left for rows.

A GPU says so itself, and what torch holds in reserve counts as free. On the CPU it is what the
system can give without swapping, or what a container's limit leaves, whichever is less.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

#: Returns the text of a file, None where there is none.
Read = Callable[[str], str | None]

#: Limit and use of a container's memory: control groups of the second and of the first version.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device can still give, None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return host_bytes(_read) if device.type == "cpu" else None


def host_bytes(read: Read) -> int | None:
    """Return the bytes that this process can still have of its host or container."""
    known = [value for value in (_available(read), *_left(read)) if value is not None]
    return min(known, default=None)


def _available(read: Read) -> int | None:
    fields = _fields(read("/proc/meminfo"), ":")
    return fields["MemAvailable"] * 1024 if "MemAvailable" in fields else None


def _left(read: Read) -> list[int]:
    """Return what the limits of control groups leave; files that can be dropped count as free."""
    found = []
    for limit_path, use_path, stat_path in _GROUPS:
        limit, use = read(limit_path), read(use_path)
        if limit is not None and use is not None and limit.strip().isdigit():
            droppable = _fields(read(stat_path), " ").get("inactive_file", 0)
            found.append(max(0, int(limit) - int(use) + droppable))
    return found


def _fields(text: str | None, separator: str) -> dict[str, int]:
    """Read lines of a name, a separator and a number, whose unit is left out."""
    pairs = (line.partition(separator) for line in (text or "").splitlines())
    return {name: int(value.split()[0]) for name, _, value in pairs if value.split()[:1]}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
