"""What every side of a comparison is given, and what it gives back. Imports nothing but Python.

A side is a script that runs in an environment of its own: it reads a file of `Work`, loads its
engine once, and writes one JSON line for each batch size to the standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Folder of the target as OpenVINO's exporter makes it, in the scratch folder.
OPENVINO_MODEL = "openvino-model"


@dataclass(frozen=True)
class Work:
    """One side's task: every prompt at every batch size, greedily."""

    #: Folder of the target with safetensors, the same in GGUF, and folder of the head.
    model: str
    gguf: str
    head: str
    #: Folder where a side may keep what it converts.
    scratch: str
    dtype: str
    threads: int
    #: `plain`, or the draft as the side names it.
    draft: str
    #: Token ids of all prompts; a batch size takes the first `rows[batch]` of them.
    prompts: list[list[int]]
    rows: dict[str, int]
    tokens: int

    @property
    def context(self) -> int:
        """Longest prompt and its completion."""
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True)
class Run:
    """Texts of all prompts as token ids, and tokens a pass of the target where it is drafted."""

    texts: list[list[int]]
    acceptance_length: float | None = None


class Side(Protocol):
    """An engine that is loaded."""

    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode all prompts greedily, at most `batch` together, up to `tokens` or the end."""
        ...


def main(load: Callable[[Work], Side]) -> None:
    """Run the side named by the first argument's file and write its lines."""
    work = Work(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    # Engines like to talk on the standard output; the lines that count go past them.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = load(work)
    for size, rows in work.rows.items():
        prompts = work.prompts[:rows]
        side.run(prompts[: int(size)], int(size), 8)  # compiles, allocates, fills caches
        start = time.perf_counter()
        done = side.run(prompts, int(size), work.tokens)
        seconds = time.perf_counter() - start
        record = {"batch": int(size), "seconds": seconds, "texts": done.texts}
        lines.write(json.dumps({**record, "acceptance_length": done.acceptance_length}) + "\n")
        lines.flush()
