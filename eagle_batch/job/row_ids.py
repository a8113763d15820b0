"""Which rows an output must hold, and which it holds twice; for `verify`, in bounded memory.

Where the input can still be read, the ids of each task are compared with it: no more than one group
of the input is held. Where it cannot, eight bytes a row tell whether any row is there twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from eagle_batch.data.finding import find_files
from eagle_batch.data.plan import Plan, ShardSpec, as_text
from eagle_batch.data.rows import derived_ids
from eagle_batch.data.selection import SelectedReader, SelectionError
from eagle_batch.errors import DataError
from eagle_batch.job.ledger import Identity
from eagle_batch.job.tasks import Task

#: A row of the output: its id and its sample.
Row = tuple[str, int]


class InputIds:
    """The ids of the input's rows, read from where they came."""

    def __init__(self, plan: Plan, column: str | None, samples: int) -> None:
        self._plan = plan
        self._column = column
        self._samples = samples
        columns = [] if column is None else [column]
        self._reader = SelectedReader(plan.selection, plan.schema, columns)

    def rows(self, task: Task) -> set[Row]:
        """Return every row that a task must account for; raises DataError."""
        shard = self._plan.shards[task.shard]
        ids = self._ids(shard)[task.start : task.stop]
        return {(name, sample) for name in ids for sample in range(self._samples)}

    def _ids(self, shard: ShardSpec) -> Sequence[str]:
        file = self._plan.files[shard.file]
        table, places = self._reader.group(file, shard.row_group)
        if table is None:
            return derived_ids(file.name, shard.group_row, places[shard.start : shard.stop])
        column = table.column(self._column).slice(shard.start, shard.rows)
        ids: list[str] = as_text(column).to_pylist()
        return ids

    def selection_problems(self, limit: int | None) -> list[str]:
        """Return one line for each way in which the plan takes other rows than it should.

        Groups that gave no rows are looked at too: nothing else says that they have none to give.
        """
        plan, problems = self._plan, list[str]()
        reader = SelectedReader(plan.selection, plan.schema, [])
        for file in plan.files:
            for index in range(len(file.groups)):
                try:
                    reader.group(file, index)
                except SelectionError as error:
                    problems += error.problems
        counts, taken = plan.counts, sum(g.taken for file in plan.files for g in file.groups)
        seen = sum(file.rows for file in plan.files)
        if (counts.seen, counts.filtered + counts.unsampled) != (seen, seen - taken):
            problems.append(f"{counts} does not agree with {seen} rows of which {taken} are taken")
        wanted = taken if limit is None else min(limit, taken)
        if plan.rows != wanted:
            problems.append(f"it holds {plan.rows} rows; the input gives {wanted}")
        return problems

    def account(self) -> str:
        """Say what became of the input's rows that are in no shard; empty where there are none."""
        return self._plan.account()


def input_ids(identity: Identity) -> InputIds:
    """Return the ids of a job's input.

    Raises DataError, saying why, where the input is gone, changed or cannot be reached.
    """
    try:
        plan = Plan.from_json(json.dumps(identity.plan))
        column = identity.resolved["input"]["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("_job/plan.json does not say where the rows came from") from error
    for file in plan.files:
        [found] = find_files([file.path], file.format)
        if (found.size, found.tag) != (file.size, file.tag):
            raise DataError(f"{file.path}: changed since the job was planned")
    return InputIds(plan, column, identity.samples)


class SeenRows:
    """Rows that were seen, as a number each."""

    def __init__(self) -> None:
        self._numbers: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, key: str, rows: Iterable[Row]) -> None:
        """Note the rows of an object."""
        numbers = np.fromiter((hash(row) for row in rows), np.int64)
        self._numbers[key] = np.unique(numbers)

    def duplicates(self, read: Callable[[str], Iterable[Row]]) -> Iterator[tuple[str, Row, str]]:
        """Yield (object, row, object before) of every row that is in two objects.

        Numbers alone may agree by chance, so the objects they point to are read again.
        """
        if not self._numbers:
            return
        numbers, counts = np.unique(np.concatenate([*self._numbers.values()]), return_counts=True)
        twice = numbers[counts > 1]
        first: dict[Row, str] = {}
        for key, own in self._numbers.items():
            if not np.isin(own, twice).any():
                continue
            wanted = set(np.intersect1d(own, twice).tolist())
            for row in dict.fromkeys(read(key)):
                if hash(row) in wanted and first.setdefault(row, key) != key:
                    yield key, row, first[row]
