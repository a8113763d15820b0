"""Runs `eagle-batch` as a user does: a process of its own, watched through its output folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

COMMAND = [sys.executable, "-m", "eagle_batch"]
#: Long enough for a busy machine of two cores; a job that takes it has hung.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    text: str


def eagle_batch(*arguments: str | Path, cwd: Path) -> Outcome:
    """Run a command to its end."""
    return outcome([*COMMAND, *map(str, arguments)], cwd=cwd)


def outcome(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Outcome:
    """Run any process to its end."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=patience_s,
    )
    return Outcome(done.returncode, done.stdout)


class RunningJob:
    """A submitted job that a test disturbs while it runs."""

    def __init__(self, *arguments: str | Path, output: Path, log: Path) -> None:
        self.output = output
        self.log = log
        with log.open("w") as handle:
            self.process = subprocess.Popen(
                [*COMMAND, "submit", *map(str, arguments)],
                cwd=log.parent,
                stdout=handle,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing running, whatever became of the test."""
        if self.process.poll() is None:
            self.kill_driver()

    def wait_for_shards(self, count: int) -> None:
        """Return when at least `count` shards are there and the job still runs."""
        self._wait(lambda: len(shards(self.output)) >= count)
        assert self.process.poll() is None, f"the job ended too early:\n{self.log.read_text()}"

    def actors(self) -> list[psutil.Process]:
        """Return the processes of the job's workers, which Ray names after their class."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = child.cmdline()
            except psutil.Error:
                continue
            if command and command[0].startswith("ray::WorkerActor"):
                found.append(child)
        return found

    def kill_driver(self) -> None:
        """End the driver without a chance to clean up, and wait for what hung on it."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in family:
            # The raylet and its workers notice the loss by themselves, but only after a while.
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)

    def finish(self) -> Outcome:
        """Wait for the job's end."""
        return Outcome(self.process.wait(PATIENCE_S), self.log.read_text())

    def _wait(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not reached() and self.process.poll() is None:
            assert time.monotonic() < end, f"nothing happened:\n{self.log.read_text()}"
            time.sleep(0.05)


def shards(output: Path) -> list[Path]:
    """Return the data files of an output."""
    return sorted((output / "data").glob("*.parquet"))


def read(output: Path) -> pa.Table:
    """Return all rows of an output, by id and sample."""
    table = pa.concat_tables(pq.read_table(path) for path in shards(output))
    return table.sort_by([("id", "ascending"), ("sample", "ascending")])


def texts(output: Path, *columns: str) -> dict[tuple[str, int], tuple[object, ...]]:
    """Return what was generated for each (id, sample)."""
    table = read(output).select(["id", "sample", *columns])
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert len({row[:2] for row in rows}) == len(rows), "a row is there twice"
    return {(row[0], row[1]): row[2:] for row in rows}


@dataclass(frozen=True)
class DemoRun:
    """A job over the demo pipeline, made small."""

    pipeline: Path
    output: Path
    rows: int

    def submit(self, *more: str) -> Outcome:
        """Submit it, or resume it; `more` are further fields to set."""
        fields = [
            f"input.limit={self.rows}",
            f"output.path={self.output}",
            "output.rows_per_shard=8",
            # Two jobs with two threads each on two cores spend their time waiting for each other.
            "engine.threads=1",
            # Left to itself a job of one thread may well decode plainly.
            "speculation.method=eagle",
            "speculation.depth=3",
            "speculation.nodes=5",
            "stages.0.sampling.max_tokens=16",
            "stages.1.sampling.max_tokens=32",
            *more,
        ]
        flags = [part for field in fields for part in ("--set", field)]
        return eagle_batch("submit", self.pipeline, *flags, cwd=self.output.parent)
