"""One task in the hands of a worker: its rows, how far each is, and the tables that come of it.

A flow is one (row, sample) on its way through the stages. Flows go on independently of each other;
the tables are in input order, then sample order, whatever finished first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from eagle_batch.data.rows import Rows
from eagle_batch.data.schema import ErrorRow, Generation, OutputRow, error_table, output_table
from eagle_batch.engine.request import Completion
from eagle_batch.errors import Reason
from eagle_batch.job.tasks import Lease
from eagle_batch.pipeline import Pipeline


@dataclass(slots=True)
class Flow:
    """One row and sample, between two stages or in one."""

    work: TaskWork
    row: int
    sample: int
    #: Stage it is in, or goes into next.
    stage: int = 0
    completions: list[Completion] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    #: Characters of each stage's spans, where the output has them.
    spans: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def row_id(self) -> str:
        """The input row's id."""
        return self.work.rows.ids[self.row]

    @property
    def request_id(self) -> str:
        """Handle of the current stage's request, unique in one engine."""
        lease = self.work.lease
        return f"{lease.task.key}#{lease.attempt}/{self.row}/{self.sample}/{self.stage}"


class TaskWork:
    """The rows of one lease and what became of them."""

    def __init__(self, pipeline: Pipeline, lease: Lease, rows: Rows) -> None:
        self.lease = lease
        self.rows = rows
        self._pipeline = pipeline
        self._stages = [stage.name for stage in pipeline.stages]
        self._flows = self._all_flows(pipeline.samples)
        self._outcomes: list[OutputRow | ErrorRow | None] = [None] * (
            len(rows.ids) * pipeline.samples
        )
        self._left = len(self._outcomes)
        self.tokens = 0

    def _all_flows(self, samples: int) -> Iterator[Flow]:
        for row in range(len(self.rows.ids)):
            for sample in range(samples):
                yield Flow(self, row, sample)

    @property
    def done(self) -> bool:
        """Whether every flow ended, as a row or in quarantine."""
        return self._left == 0

    def next_flow(self) -> Flow | None:
        """Return a flow that was not started yet, in order; None when all were."""
        return next(self._flows, None)

    def values(self, flow: Flow) -> dict[str, object]:
        """Return what the next stage's template sees: the row's columns and the texts so far.

        Raises RequestError where a value of the row cannot be read.
        """
        texts = {
            name: completion.text
            for name, completion in zip(self._stages, flow.completions, strict=False)
        }
        return self.rows.values(flow.row) | texts

    def complete(self, flow: Flow) -> None:
        """Keep a flow that went through every stage."""
        self.tokens += sum(len(completion.token_ids) for completion in flow.completions)
        keep_ids = self._pipeline.output.token_ids
        self._settle(
            flow,
            OutputRow(
                id=flow.row_id,
                sample=flow.sample,
                row=flow.row,
                texts=tuple(completion.text for completion in flow.completions),
                generation=tuple(self._generations(flow)),
                token_ids=tuple(c.token_ids for c in flow.completions) if keep_ids else (),
                spans=tuple(flow.spans),
            ),
        )

    def quarantine(self, flow: Flow, reason: Reason, message: str) -> None:
        """Send a flow to the error table; a crash does not tell in which stage it was."""
        self._settle(
            flow,
            ErrorRow(
                id=flow.row_id,
                sample=flow.sample,
                stage="" if reason is Reason.WORKER_CRASH else self._stages[flow.stage],
                reason=reason,
                message=message,
                attempt=self.lease.attempt,
                row=self.rows.row_json(flow.row),
            ),
        )

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows and the quarantined rows, in input order, then sample order."""
        assert self.done
        rows = [item for item in self._outcomes if isinstance(item, OutputRow)]
        errors = [item for item in self._outcomes if isinstance(item, ErrorRow)]
        return output_table(self._pipeline, rows, self.rows.table), error_table(errors)

    def _settle(self, flow: Flow, outcome: OutputRow | ErrorRow) -> None:
        place = flow.row * self._pipeline.samples + flow.sample
        assert self._outcomes[place] is None, f"{flow.request_id} ended twice"
        self._outcomes[place] = outcome
        self._left -= 1

    def _generations(self, flow: Flow) -> Iterator[Generation]:
        for name, done, seed in zip(self._stages, flow.completions, flow.seeds, strict=True):
            yield Generation(
                stage=name,
                prompt_tokens=done.prompt_tokens,
                completion_tokens=len(done.token_ids),
                finish_reason=done.finish_reason,
                target_passes=done.target_passes,
                drafted=done.drafted,
                accepted=done.accepted,
                acceptance_length=done.acceptance_length,
                seed=seed,
            )


def lost_rows(pipeline: Pipeline, lease: Lease, rows: Rows, message: str) -> TaskWork:
    """Return the work of a task whose every row is quarantined because it kills workers."""
    work = TaskWork(pipeline, lease, rows)
    while (flow := work.next_flow()) is not None:
        work.quarantine(flow, Reason.WORKER_CRASH, message)
    return work


def no_rows(pipeline: Pipeline, source: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Return the empty tables that close a task's key."""
    return output_table(pipeline, [], source.empty_table()), error_table([])
