"""One task in the hands of a worker: its rows, how far each is, and the tables that come of it.

A flow is one (row, sample) on its way through the stages. Flows go on independently of each other;
the tables are in input order, then sample order, whatever finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from eagle_batch.data.rows import Rows
from eagle_batch.data.schema import ErrorRow, Generation, OutputRow, error_table, output_table
from eagle_batch.engine.request import Completion
from eagle_batch.errors import Reason
from eagle_batch.job.tasks import Lease
from eagle_batch.pipeline import Pipeline
from eagle_batch.stages.calls import Call, Record
from eagle_batch.stages.graph import Graph
from eagle_batch.stages.walk import Walk

#: Stage and characters of the spans of a record's text.
Spans = Callable[[Record], tuple[str, tuple[int, ...]]]
Steps = Generator[tuple[Call, ...], tuple[Completion, ...], None]


@dataclass(slots=True)
class Flow:
    """One row and sample on its way; see `Walk` for where it is."""

    work: TaskWork
    row: int
    sample: int
    walk: Walk
    _steps: Steps
    #: What it waits for, in the order it asked, and what of that has come.
    _asked: tuple[str, ...] = ()
    _came: dict[str, Completion] = field(default_factory=dict)
    _count: int = 0
    #: Whether it came out or is quarantined; what still comes for it is dropped.
    ended: bool = False

    @property
    def row_id(self) -> str:
        """The input row's id."""
        return self.work.rows.ids[self.row]

    @property
    def tokens(self) -> int:
        """Generated tokens so far."""
        return sum(len(record.completion.token_ids) for record in self.walk.records)

    def begin(self) -> tuple[tuple[str, Call], ...] | None:
        """Return the first calls, each with a handle; None where the row needs none.

        Raises RequestError where the row cannot go on, here and below.
        """
        self.walk.columns = self.work.rows.values(self.row)
        return self._take(lambda: next(self._steps))

    def come(self, handle: str, completion: Completion) -> tuple[tuple[str, Call], ...] | None:
        """Take in a completion; return the calls that follow, none while others are awaited.

        None tells that the row is through.
        """
        self._came[handle] = completion
        if len(self._came) < len(self._asked):
            return ()
        came = tuple(self._came[each] for each in self._asked)
        return self._take(lambda: self._steps.send(came))

    def _take(self, go_on: Callable[[], tuple[Call, ...]]) -> tuple[tuple[str, Call], ...] | None:
        try:
            calls = go_on()
        except StopIteration:
            return None
        lease = self.work.lease
        prefix = f"{lease.task.key}#{lease.attempt}/{self.row}/{self.sample}"
        self._asked = tuple(f"{prefix}/{self._count + n}" for n in range(len(calls)))
        self._count += len(calls)
        self._came = {}
        return tuple(zip(self._asked, calls, strict=True))


class TaskWork:
    """The rows of one lease and what became of them."""

    def __init__(
        self, pipeline: Pipeline, lease: Lease, rows: Rows, graph: Graph | None = None
    ) -> None:
        """Begin; without a graph, rows cannot begin and can only be quarantined."""
        self.lease = lease
        self.rows = rows
        self._pipeline = pipeline
        self._graph = graph
        self._stages = [stage.name for stage in pipeline.stages]
        self._flows = self._all_flows(pipeline.samples)
        self._outcomes: list[OutputRow | ErrorRow | None] = [None] * (
            len(rows.ids) * pipeline.samples
        )
        self._left = len(self._outcomes)
        self.tokens = 0
        #: Generated tokens of all rows that ended, in quarantine too.
        self.spent = 0

    def _all_flows(self, samples: int) -> Iterator[tuple[int, int]]:
        for row in range(len(self.rows.ids)):
            for sample in range(samples):
                yield row, sample

    @property
    def units(self) -> int:
        """Rows x samples."""
        return len(self._outcomes)

    @property
    def done(self) -> bool:
        """Whether every flow ended, as a row or in quarantine."""
        return self._left == 0

    def next_flow(self) -> Flow | None:
        """Return a flow that was not begun yet, in order; None when all were."""
        assert self._graph is not None
        place = next(self._flows, None)
        if place is None:
            return None
        row, sample = place
        walk = Walk(self._graph, self.rows.ids[row], sample)
        return Flow(self, row, sample, walk, walk.run())

    def complete(self, flow: Flow, spans: Spans | None = None) -> None:
        """Keep a flow that went through every stage; `spans` tells what of a text was drafted."""
        flow.ended = True
        self.tokens += flow.tokens
        kept = [record for record in flow.walk.records if record.kept]
        keep_ids = self._pipeline.output.token_ids
        row = OutputRow(
            id=flow.row_id,
            sample=flow.sample,
            row=flow.row,
            texts=tuple(flow.walk.texts[name] for name in self._stages),
            generation=tuple(map(_generation, flow.walk.records)),
            token_ids=tuple((r.call.name, r.completion.token_ids) for r in kept)
            if keep_ids
            else (),
            spans=() if spans is None else tuple(spans(r) for r in kept),
        )
        self._settle(flow.row, flow.sample, row)

    def quarantine(self, flow: Flow, reason: Reason, message: str) -> None:
        """Send a flow to the error table."""
        flow.ended = True
        self._lose(flow.row, flow.sample, self._stages[flow.walk.stage], reason, message)

    def quarantine_all(self, reason: Reason, message: str) -> None:
        """Send every row to the error table; a crash does not tell in which stage it was."""
        for row, sample in self._flows:
            self._lose(row, sample, "", reason, message)

    def _lose(self, row: int, sample: int, stage: str, reason: Reason, message: str) -> None:
        lost = ErrorRow(
            id=self.rows.ids[row],
            sample=sample,
            stage=stage,
            reason=reason,
            message=message.encode("utf-8", "replace").decode(),
            attempt=self.lease.attempt,
            row=self.rows.row_json(row),
        )
        self._settle(row, sample, lost)

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows and the quarantined rows, in input order, then sample order."""
        assert self.done
        rows = [item for item in self._outcomes if isinstance(item, OutputRow)]
        errors = [item for item in self._outcomes if isinstance(item, ErrorRow)]
        return output_table(self._pipeline, rows, self.rows.table), error_table(errors)

    def _settle(self, row: int, sample: int, outcome: OutputRow | ErrorRow) -> None:
        place = row * self._pipeline.samples + sample
        assert self._outcomes[place] is None, f"row {row}, sample {sample} ended twice"
        self._outcomes[place] = outcome
        self._left -= 1


def _generation(record: Record) -> Generation:
    call, done = record.call, record.completion
    return Generation(
        stage=call.name,
        prompt_tokens=done.prompt_tokens,
        completion_tokens=len(done.token_ids),
        finish_reason=done.finish_reason,
        target_passes=done.target_passes,
        drafted=done.drafted,
        accepted=done.accepted,
        acceptance_length=done.acceptance_length,
        seed=record.seed,
        turn=call.turn,
        candidate=call.candidate,
        attempt=call.attempt,
        kept=record.kept,
        score=record.score,
    )


def lost_rows(pipeline: Pipeline, lease: Lease, rows: Rows, message: str) -> TaskWork:
    """Return the work of a task whose every row is quarantined because it kills workers."""
    work = TaskWork(pipeline, lease, rows)
    work.quarantine_all(Reason.WORKER_CRASH, message)
    return work


def no_rows(pipeline: Pipeline, source: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Return the empty tables that close a task's key."""
    return output_table(pipeline, [], source.empty_table()), error_table([])
