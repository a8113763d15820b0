"""Kernels on the threads of torch: each item once, by one of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

numba: Any = pytest.importorskip("numba")
threads: Any = importlib.import_module("eagle_batch.models.threads")

THREADS = 3


@numba.njit
def note(arguments: Any, worker: int, item: int) -> None:
    calls_I, workers_I = arguments
    calls_I[item] += 1
    workers_I[item] = worker


@numba.njit
def note_all(calls_I: Any, workers_I: Any, threads_: int) -> None:
    threads.on_threads(note, (calls_I, workers_I), len(calls_I), threads_)


@pytest.mark.parametrize("items", [0, 1, 1000])
@pytest.mark.parametrize("workers", [1, THREADS])
def test_every_item_is_worked_on_once_by_one_of_the_threads(items: int, workers: int) -> None:
    calls_I, workers_I = np.zeros(items, np.int64), np.full(items, -1)
    note_all(calls_I, workers_I, workers)
    assert (calls_I == 1).all()
    assert ((workers_I >= 0) & (workers_I < workers)).all()


def test_the_threads_are_those_of_torch_where_it_brings_its_openmp_library() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists() or "/torch/lib/libgomp" not in maps.read_text():
        pytest.skip("torch has another OpenMP library here")
    assert threads._fork is not threads._alone


def test_without_openmp_the_caller_does_the_work() -> None:
    seen: list[int | None] = []
    threads._alone(threads._WORK(seen.append), 5, THREADS, 0)
    assert seen == [5]
