"""One task in the hands of a worker: its rows, how far each is, and the tables that come of it.

A flow is one (row, sample) on its way through the stages. Flows go on independently of each other;
the tables are in input order, then sample order, whatever finished first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa

from eagle_batch.data.forms import make_form
from eagle_batch.data.rows import Rows
from eagle_batch.data.schema import (
    ERROR_SCHEMA,
    ErrorRow,
    Generation,
    OutputRow,
    TokenIds,
    TokenLogprobs,
    error_table,
    output_table,
    passthrough_columns,
)
from eagle_batch.engine.request import Completion
from eagle_batch.errors import Reason
from eagle_batch.job.tasks import Lease, Progress, Share
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

    @property
    def ended(self) -> bool:
        """Whether it came out, here or elsewhere, or nobody wants it: what still comes is lost."""
        return self.work.is_over(self.row, self.sample)

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
        self.work.check(self.row)
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
    """The rows of one lease and what became of them.

    A row is not begun yet, under way, out (made or quarantined), or part of a share that another
    worker made. A share takes its rows whatever they were here.
    """

    def __init__(
        self, pipeline: Pipeline, lease: Lease, rows: Rows, graph: Graph | None = None
    ) -> None:
        """Begin; without a graph, rows cannot begin and can only be quarantined."""
        self.lease = lease
        self.rows = rows
        self._pipeline = pipeline
        self._graph = graph
        self._stages = [stage.name for stage in pipeline.stages]
        self._samples = pipeline.samples
        self._form = make_form(pipeline.output)
        passed = passthrough_columns(pipeline, rows.table.schema)
        self._passed = rows.table.select(list(passed))
        self._outcomes: list[OutputRow | ErrorRow | Share | None] = [None] * (
            len(rows.ids) * pipeline.samples
        )
        #: Generated tokens of each that came out here.
        self._tokens = [0] * len(self._outcomes)
        self._shared: dict[Share, tuple[pa.Table, pa.Table]] = {}
        self._left = len(self._outcomes)
        #: Place of the first that was not begun, and how many before it are under way.
        self._next = self._open = 0
        self._withdrawn = False

    @property
    def units(self) -> int:
        """Rows x samples that came out here."""
        return sum(isinstance(item, OutputRow | ErrorRow) for item in self._outcomes)

    @property
    def spent(self) -> int:
        """Generated tokens of those, quarantined ones too."""
        return sum(self._tokens)

    @property
    def tokens(self) -> int:
        """Generated tokens of the rows, those of shares too."""
        pairs = zip(self._outcomes, self._tokens, strict=True)
        own = sum(tokens for item, tokens in pairs if isinstance(item, OutputRow))
        return own + sum(share.tokens for share in self.shares)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares that rows are taken from, in their order."""
        return tuple(dict.fromkeys(item for item in self._outcomes if isinstance(item, Share)))

    @property
    def progress(self) -> Progress:
        """How far this is."""
        begun = self.lease.task.start + -(-self._next // self._samples)
        return Progress(self.lease.task.key, self.lease.attempt, begun, self._open)

    @property
    def done(self) -> bool:
        """Whether every flow ended, as a row or in quarantine."""
        return self._left == 0

    def check(self, row: int) -> None:
        """Raise RequestError where a row cannot be written as the output wants it."""
        self._form.check_row(self._passed.slice(row, 1))

    def next_flow(self) -> Flow | None:
        """Return a flow that was not begun yet, in order; None when all were."""
        assert self._graph is not None
        while self._next < len(self._outcomes) and self._outcomes[self._next] is not None:
            self._next += 1
        if self._next == len(self._outcomes):
            return None
        row, sample = divmod(self._next, self._samples)
        self._next += 1
        self._open += 1
        walk = Walk(self._graph, self.rows.ids[row], sample)
        return Flow(self, row, sample, walk, walk.run())

    def complete(self, flow: Flow, head: str | None, spans: Spans | None = None) -> None:
        """Keep a flow that went through every stage; `spans` tells what of a text was drafted."""
        kept = [record for record in flow.walk.records if record.kept]
        keep_ids = self._pipeline.output.token_ids
        row = OutputRow(
            id=flow.row_id,
            sample=flow.sample,
            row=flow.row,
            texts=tuple(flow.walk.texts[name] for name in self._stages),
            generation=tuple(map(_generation, flow.walk.records)),
            head=head,
            token_ids=tuple(map(_token_ids, kept)) if keep_ids else (),
            logprobs=tuple(map(_logprobs, kept)) if self._pipeline.output.logprobs else (),
            spans=() if spans is None else tuple(spans(r) for r in kept),
        )
        self._settle(flow, row)

    def quarantine(self, flow: Flow, reason: Reason, message: str) -> None:
        """Send a flow to the error table."""
        stage = self._stages[flow.walk.stage]
        self._settle(flow, self._lost(flow.row, flow.sample, stage, reason, message))

    def quarantine_all(self, reason: Reason, message: str) -> None:
        """Send every row to the error table; a crash does not tell in which stage it was."""
        for place in range(len(self._outcomes)):
            lost = self._lost(*divmod(place, self._samples), "", reason, message)
            self._outcomes[place] = lost
        self._left = 0

    def _lost(self, row: int, sample: int, stage: str, reason: Reason, message: str) -> ErrorRow:
        return ErrorRow(
            id=self.rows.ids[row],
            sample=sample,
            stage=stage,
            reason=reason,
            message=message.encode("utf-8", "replace").decode(),
            attempt=self.lease.attempt,
            row=self.rows.row_json(row),
        )

    def _settle(self, flow: Flow, outcome: OutputRow | ErrorRow) -> None:
        place = flow.row * self._samples + flow.sample
        assert self._outcomes[place] is None, f"row {flow.row}, sample {flow.sample} ended twice"
        self._outcomes[place] = outcome
        self._tokens[place] = flow.tokens
        self._left -= 1
        self._open -= 1

    # -- what others do ----------------------------------------------------------------------

    def is_over(self, row: int, sample: int) -> bool:
        """Whether nothing more is to be done for a row and sample."""
        return self._withdrawn or self._outcomes[row * self._samples + sample] is not None

    def withdraw(self) -> None:
        """Make nothing more of this."""
        self._withdrawn = True

    def take_over(self, share: Share, rows: pa.Table, errors: pa.Table) -> Counter[str]:
        """Take rows that another worker made; return the units and tokens that came out here too.

        Shares lie within each other or apart; the larger one counts.
        """
        start = self.lease.task.start
        places = range((share.start - start) * self._samples, (share.stop - start) * self._samples)
        twice: Counter[str] = Counter()
        if all(isinstance(self._outcomes[place], Share) for place in places):
            return twice
        for place in places:
            match self._outcomes[place]:
                case None:
                    self._left -= 1
                    self._open -= place < self._next
                case OutputRow() | ErrorRow():
                    twice.update(units=1, tokens=self._tokens[place])
                    self._tokens[place] = 0
            self._outcomes[place] = share
        self._shared[share] = rows, errors
        return twice

    # -- what comes of it --------------------------------------------------------------------

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows and the quarantined rows, in input order, then sample order."""
        assert self.done
        if not self._shared:
            return self._made(self._outcomes)
        pieces = [
            self._made(list(items)) if share is None else self._shared[share]
            for share, items in groupby(self._outcomes, _share_of)
        ]
        # Parquet gives some types back as others, such as seconds as milliseconds.
        schema = self._made([])[0].schema
        rows = pa.concat_tables([rows.cast(schema) for rows, _ in pieces])
        return rows, pa.concat_tables([errors.cast(ERROR_SCHEMA) for _, errors in pieces])

    def _made(self, items: Sequence[object]) -> tuple[pa.Table, pa.Table]:
        rows = [item for item in items if isinstance(item, OutputRow)]
        errors = [item for item in items if isinstance(item, ErrorRow)]
        return output_table(self._pipeline, rows, self.rows.table), error_table(errors)


def _share_of(outcome: object) -> Share | None:
    return outcome if isinstance(outcome, Share) else None


def _token_ids(record: Record) -> TokenIds:
    done = record.completion
    return TokenIds(record.call.name, done.prompt_ids, done.token_ids)


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


def _logprobs(record: Record) -> TokenLogprobs:
    done = record.completion
    best = done.top_logprobs or ()
    return TokenLogprobs(
        stage=record.call.name,
        chosen=done.logprobs or (),
        best_ids=tuple(tuple(token for token, _ in place) for place in best),
        best=tuple(tuple(value for _, value in place) for place in best),
    )


def lost_rows(pipeline: Pipeline, lease: Lease, rows: Rows, message: str) -> TaskWork:
    """Return the work of a task whose every row is quarantined because it kills workers."""
    work = TaskWork(pipeline, lease, rows)
    work.quarantine_all(Reason.WORKER_CRASH, message)
    return work


def no_rows(pipeline: Pipeline, source: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Return the empty tables that close a task's key."""
    return output_table(pipeline, [], source.empty_table()), error_table([])
