"""The number of slots from memory and speed: by tables, and for a model that is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eagle_batch.engine.build import Parts, assemble, slot_bytes
from eagle_batch.engine.memory import free_bytes, host_bytes
from eagle_batch.engine.request import EngineSpec
from eagle_batch.engine.sizing import UNKNOWN, settle
from eagle_batch.engine.testing import byte_tokenizer, tiny_head, tiny_target

MIB = 2**20


def never_full(rows: int) -> float:
    """A pass costs the same for any number of rows."""
    return 1.0


def full_at(most: int) -> Callable[[int], float]:
    """A device that computes so many rows in the time of one, and no more."""
    return lambda rows: max(1.0, rows / most)


@pytest.mark.parametrize(
    ("free", "seconds", "slots", "why"),
    [
        (1000 * MIB, never_full, 500, "500 rows of 1 MiB fit into 50% of 1,000 MiB free"),
        (100_000 * MIB, never_full, 1024, "50000 rows of 1 MiB fit"),
        (1000 * MIB, full_at(64), 64, "128 would make +0% tokens a second; 500 rows"),
        (1000 * MIB, full_at(5), 8, "16 would make +0% tokens a second"),
        (6 * MIB, never_full, 3, "3 rows of 1 MiB fit into 50% of 6 MiB free"),
        (0, never_full, 1, "1 rows of 1 MiB fit"),
        (None, never_full, UNKNOWN, "not known how much memory is free"),
    ],
)
def test_slots_double_while_they_fit_and_pay(
    free: int | None, seconds: Callable[[int], float], slots: int, why: str
) -> None:
    found = settle(free, 0.5, MIB, seconds)
    assert found.slots == slots
    assert why in found.why


def test_no_more_rows_are_timed_than_fit() -> None:
    timed: list[int] = []

    def seconds(rows: int) -> float:
        timed.append(rows)
        return 1.0

    settle(100 * MIB, 0.5, MIB, seconds)
    assert timed == [8, 16, 32, 50]


MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": MEMINFO}, 20_000_000 * 1024),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "8000000\n",
                "/sys/fs/cgroup/memory.current": "5000000\n",
                "/sys/fs/cgroup/memory.stat": "anon 1000\ninactive_file 2000000\n",
            },
            5_000_000,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/memory.current": "5000000\n",
            },
            20_000_000 * 1024,
        ),
        (
            {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "7000000\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "9000000\n",
            },
            0,
        ),
        ({}, None),
    ],
    ids=["host", "container", "no limit", "first version", "unknown"],
)
def test_memory_is_what_host_and_container_leave(
    files: dict[str, str], expected: int | None
) -> None:
    assert host_bytes(files.get) == expected


def test_a_slot_is_as_large_as_what_is_allocated_for_it() -> None:
    target = tiny_target()
    parts = Parts(target, byte_tokenizer(), tiny_head(target))
    spec = EngineSpec("tiny", "head", slots=4, context=64, nodes=6)
    engine = assemble(parts, spec)
    drafter = engine.drafter
    assert drafter is not None
    keys = engine.cache.bytes + drafter.cache.bytes  # type: ignore[attr-defined]
    found = 4 * slot_bytes(parts, spec, 64)
    assert keys < found < 4 * keys


@pytest.mark.parametrize("drafted", [False, True])
def test_an_engine_finds_its_slots_and_says_why(
    drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    parts = Parts(target, byte_tokenizer(), tiny_head(target) if drafted else None)
    spec = EngineSpec(
        "tiny", "head" if drafted else None, slots=16, fit_slots=True, context=64, nodes=6
    )
    slot = slot_bytes(parts, spec, 64)
    monkeypatch.setattr("eagle_batch.engine.build.free_bytes", lambda _: 11 * slot)
    engine = assemble(parts, spec)
    assert engine.slots == 5
    assert "5 rows" in engine.sizing
    assert assemble(parts, replace(spec, fit_slots=False)).slots == 16


def test_the_memory_of_this_machine_is_known() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 0
    assert free_bytes(torch.device("meta")) is None
