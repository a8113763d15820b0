"""What the rows of an output tell: sums and lengths by stage, and the rows worth a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_batch.report.measures import measures
from eagle_batch.report.output import MOST_OBJECTS, Objects, OutputFacts, read_table, spread
from eagle_batch.report.spans import pieces, stage_spans

#: Rows in each list, and rows that are shown as samples.
LISTED = 8
SAMPLES = 4
#: Characters of a text that are shown.
SHOWN = 700


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage over all the rows that were read."""

    name: str
    rows: int
    tokens: int
    passes: int
    drafted: int
    accepted: int
    #: Completion tokens of each row.
    lengths: np.ndarray
    finishes: dict[str, int]

    @property
    def acceptance(self) -> float:
        """Tokens for each target pass, the bonus token included."""
        return self.tokens / max(1, self.passes)


@dataclass(frozen=True, slots=True)
class RowNote:
    """One row worth a look."""

    id: str
    sample: int
    tokens: int
    passes: int
    acceptance: float
    #: Column -> text: what was passed through, then the stages' texts.
    inputs: dict[str, str]
    texts: dict[str, str]
    #: Stage -> characters that were drafted and the target's own, in turn; see `spans`.
    spans: dict[str, list[int]]

    def pieces(self, stage: str) -> list[tuple[str, bool]]:
        """Return a stage's text in pieces, each with whether it was drafted."""
        text = self.texts[stage]
        return list(pieces(text, self.spans[stage])) if stage in self.spans else [(text, False)]


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """What the report says of the rows."""

    rows: int
    objects_read: int
    objects: int
    stages: tuple[StageNumbers, ...]
    #: Most target passes, which is what a row's time is made of; fewest tokens a pass.
    slowest: tuple[RowNote, ...]
    lowest: tuple[RowNote, ...]
    samples: tuple[RowNote, ...]


def read_statistics(store: Objects, facts: OutputFacts) -> RowStatistics:
    """Read the data objects of an output, one after the other."""
    keys = spread(facts.data_keys, MOST_OBJECTS)
    shown = set(spread(keys, SAMPLES))
    parts: list[pa.Table] = []
    slowest: list[RowNote] = []
    lowest: list[RowNote] = []
    samples: list[RowNote] = []
    for key in keys:
        table = read_table(store, key)
        numbers = pa.table(measures(table["generation"].combine_chunks(), facts.stages))
        parts.append(numbers)
        slow, low = _order(numbers, "passes", "descending"), _order(numbers, "acceptance")
        slowest = _keep(slowest + _notes(table.take(slow), facts), _by_passes)
        lowest = _keep(lowest + _notes(table.take(low), facts), _by_acceptance)
        if key in shown:
            samples += _notes(table.slice(0, SAMPLES), facts)
    everything = pa.concat_tables(parts) if parts else None
    return RowStatistics(
        rows=0 if everything is None else everything.num_rows,
        objects_read=len(keys),
        objects=len(facts.data_keys),
        stages=tuple(_stage(everything, name) for name in facts.stages) if parts else (),
        slowest=tuple(slowest),
        lowest=tuple(lowest),
        samples=tuple(spread(samples, SAMPLES)),
    )


def _order(numbers: pa.Table, measure: str, order: str = "ascending") -> Any:
    return pc.sort_indices(numbers, sort_keys=[(measure, order)])[:LISTED]


def _notes(table: pa.Table, facts: OutputFacts) -> list[RowNote]:
    return [_note(row, facts) for row in table.to_pylist()]


def _note(row: dict[str, Any], facts: OutputFacts) -> RowNote:
    tokens = sum(item["completion_tokens"] for item in row["generation"])
    passes = sum(item["target_passes"] for item in row["generation"])
    passed = list(row)[2 : list(row).index(facts.stages[0])]
    inputs = {name: _short(row[name]) for name in passed}
    texts = {name: _short(row[name]) for name in facts.stages}
    acceptance = tokens / max(1, passes)
    # A column of a JSON schema or of several texts is no text that spans could cut.
    found = {name: stage_spans(row, name) for name in facts.stages if isinstance(row[name], str)}
    spans = {name: characters for name, characters in found.items() if characters is not None}
    return RowNote(row["id"], row["sample"], tokens, passes, acceptance, inputs, texts, spans)


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def _keep(notes: list[RowNote], key: Callable[[RowNote], Any]) -> list[RowNote]:
    return sorted(notes, key=key)[:LISTED]


def _by_passes(note: RowNote) -> tuple[int, str, int]:
    return -note.passes, note.id, note.sample


def _by_acceptance(note: RowNote) -> tuple[float, str, int]:
    return note.acceptance, note.id, note.sample


def _stage(table: pa.Table, name: str) -> StageNumbers:
    def total(measure: str) -> int:
        return int(pc.sum(table[f"{name}.{measure}"]).as_py() or 0)

    finishes = Counter(table[f"{name}.finish"].to_pylist())
    return StageNumbers(
        name=name,
        rows=table.num_rows,
        tokens=total("tokens"),
        passes=total("passes"),
        drafted=total("drafted"),
        accepted=total("accepted"),
        lengths=np.asarray(table[f"{name}.tokens"].combine_chunks()),
        finishes=dict(finishes.most_common()),
    )
