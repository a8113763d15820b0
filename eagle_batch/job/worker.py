"""One worker: an engine, at most a few tasks, and a pump that somebody else turns.

`pump` takes in leases, lets the engine run for a while, commits what is finished and reports. There
is no thread: a worker that nobody pumps does nothing, and one that is killed leaves whole objects.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from eagle_batch.data.forms import make_form
from eagle_batch.data.identity import check_target
from eagle_batch.data.prompts import make_prompter
from eagle_batch.data.rows import RowReader
from eagle_batch.engine.request import Completion, EngineMetrics, Request, SamplingParams
from eagle_batch.errors import ConfigError, LedgerError, RequestError, StoreError
from eagle_batch.job.adapting import Texts, head_place
from eagle_batch.job.elastic import ElasticEngine
from eagle_batch.job.head_copy import newest_head
from eagle_batch.job.layers import made_layer
from eagle_batch.job.objects import Objects
from eagle_batch.job.reports import Failure, PumpReport, WorkerInfo
from eagle_batch.job.spans import span_lengths
from eagle_batch.job.spec import WorkerSpec, engine_spec
from eagle_batch.job.spelling import Speller
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Commit, Lease, NewHead, Order, Share, Withdrawal
from eagle_batch.job.work import Flow, TaskWork
from eagle_batch.pipeline.modules import look_in
from eagle_batch.stages.calls import Call, Record
from eagle_batch.stages.graph import Graph

Calls = tuple[tuple[str, Call], ...]


class Worker:
    """Turns leases into committed objects, and into shares of tasks that others commit."""

    def __init__(
        self,
        spec: WorkerSpec,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the engine. Raises ConfigError, HeadError or ModelError when it cannot be."""
        pipeline, plan = spec.pipeline, spec.plan
        look_in(spec.modules)
        check_target(pipeline, plan.target)
        self._pipeline = pipeline
        self._plan = plan
        self._clock = clock
        self._device = spec.device
        started = datetime.fromtimestamp(spec.started, UTC)
        self._prompter = make_prompter(pipeline, lambda: started)
        self._reader = RowReader(pipeline, plan, self._prompter.stages)
        self._graph = Graph(pipeline, self._prompter)
        self._engine = ElasticEngine(spec.build, engine_spec(spec))
        self._speller = Speller(self._engine.tokenizer)
        self._store = store or open_store(pipeline.output.path)
        self._objects = Objects(
            made_layer(self._store, layers=pipeline.deduplicate is not None),
            plan.fingerprint,
            make_form(pipeline.output),
            pipeline.samples,
        )
        self._work: list[TaskWork] = []
        self._flows: dict[str, Flow] = {}
        self._reported = EngineMetrics()
        self._units = 0
        self._unit_tokens = self._unit_tokens_squared = 0
        self._checked: Counter[tuple[str, bool]] = Counter()
        #: Units and tokens of tasks that ended since the last report, and of those for nothing.
        self._settled: Counter[str] = Counter()
        self._discarded: Counter[str] = Counter()
        self._failed: list[tuple[Lease, Failure]] = []
        self._shares: list[tuple[Lease, Share]] = []
        #: What a head is to learn from; None where none does.
        self._texts = None if pipeline.speculation.adapt is None else Texts()
        self._notices: list[str] = []
        #: What drafts, as rows name it.
        self._head = pipeline.speculation.head

    def info(self) -> WorkerInfo:
        """Say where this worker runs."""
        return WorkerInfo(socket.gethostname(), os.getpid(), self._device)

    def pump(self, orders: tuple[Order, ...], seconds: float) -> PumpReport:
        """Take in orders, run for about `seconds` or until nothing is left, and report.

        Takes at least one step. Exceptions that are no fault of a row or of the store escape: the
        engine is then unusable.
        """
        begun = self._clock()
        for order in orders:
            self._obey(order)
        self._fill()
        committed = self._commit_finished()
        while self._engine.has_work:
            for completion in self._engine.step():
                self._advance(completion)
            self._fill()
            committed += self._commit_finished()
            if self._clock() - begun >= seconds:
                break
        return self._report(committed, self._clock() - begun)

    def _obey(self, order: Order) -> None:
        if isinstance(order, NewHead):
            self._take_head(order)
            return
        work = self._find(order)
        if isinstance(order, Lease):
            work = work or self._accept(order)
            if work is not None:
                self._take_over(work, order.shares)
        elif work is not None:
            self._withdraw(work)

    def _take_head(self, head: NewHead) -> None:
        """Draft with the head in the output, or as before where it cannot be had."""
        try:
            place = newest_head(self._pipeline.output.path, self._store)
        except (StoreError, OSError) as error:
            self._notices.append(f"head {head.number} is not used: {error}")
        else:
            if self._engine.use_head(place):
                self._head = head_place(self._pipeline.output.path)

    def _find(self, order: Lease | Withdrawal) -> TaskWork | None:
        """Return what there is of an attempt already."""
        key = order.key if isinstance(order, Withdrawal) else order.task.key
        for work in self._work:
            if (work.lease.task.key, work.lease.attempt) == (key, order.attempt):
                return work
        return None

    def _accept(self, lease: Lease) -> TaskWork | None:
        task = lease.task
        shard = self._plan.shards[task.shard]
        try:
            rows = self._reader.read(shard, task.start, task.stop)
        except (ConfigError, OSError) as error:
            self._failed.append((lease, Failure.of(error)))
            return None
        work = TaskWork(self._pipeline, lease, rows, self._graph)
        self._work.append(work)
        return work

    def _take_over(self, work: TaskWork, shares: tuple[Share, ...]) -> None:
        """Take rows that others made; those that cannot be read are made here."""
        flows = self._flows_of(work)
        for share in shares:
            if share in work.shares:
                continue
            try:
                rows, errors = self._objects.read_share(share)
            except (StoreError, LedgerError) as error:
                self._notices.append(f"makes rows of {share.key} again: {error}")
                continue
            self._waste(work.take_over(share, rows, errors))
        self._abandon(flows)

    def _withdraw(self, work: TaskWork) -> None:
        flows = self._flows_of(work)
        self._work.remove(work)
        self._waste(Counter(units=work.units, tokens=work.spent))
        work.withdraw()
        self._abandon(flows)

    def _flows_of(self, work: TaskWork) -> list[Flow]:
        """Return the flows of a task that are under way, each once."""
        flows = {id(flow): flow for flow in self._flows.values() if flow.work is work}
        return [flow for flow in flows.values() if not flow.ended]

    def _abandon(self, flows: list[Flow]) -> None:
        """Write off those that nobody waits for any more; the engine goes on with them."""
        self._waste(Counter(tokens=sum(flow.tokens for flow in flows if flow.ended)))

    def _waste(self, counts: Counter[str]) -> None:
        """Note units and tokens that come to nothing."""
        self._settled.update(counts)
        self._discarded.update(counts)

    def _fill(self) -> None:
        """Keep one batch waiting behind the one that runs, oldest task first."""
        for work in self._work:
            while self._engine.waiting < self._engine.slots:
                flow = work.next_flow()
                if flow is None:
                    break
                self._go_on(flow, flow.begin, ahead=False)

    def _go_on(self, flow: Flow, take: Callable[[], Calls | None], *, ahead: bool) -> None:
        """Give the engine what a flow needs next, or end it; a row's fault quarantines it.

        ahead: whether its calls go before those of flows that begin.
        """
        try:
            calls = take()
            if calls is None:
                spans = self._spans if self._pipeline.output.spans else None
                flow.work.complete(flow, self._head, spans)
                self._count(flow)
                return
            for handle, call in calls:
                self._engine.add(self._request(flow, handle, call, ahead=ahead))
                self._flows[handle] = flow
        except RequestError as error:
            flow.work.quarantine(flow, error.reason, error.message)
            self._count(flow)

    def _request(self, flow: Flow, handle: str, call: Call, *, ahead: bool) -> Request:
        return Request(
            id=handle,
            prompt_ids=self._speller.prompt_ids(call, flow.walk.records),
            params=self._ended(call),
            noise_key=flow.walk.noise(call),
            ahead=ahead,
        )

    def _ended(self, call: Call) -> SamplingParams:
        """End a user's turn by its token, or by its text where that is more than one."""
        if not call.ending:
            return call.params
        ids = tuple(self._engine.tokenizer.encode(call.ending, add_special_tokens=False))
        if len(ids) == 1:
            known = call.params.stop_token_ids
            return replace(call.params, stop_token_ids=(*known, *ids))
        return replace(call.params, stop=(*call.params.stop, call.ending))

    def _advance(self, completion: Completion) -> None:
        """Move a flow on to its next stage, or to its end."""
        handle = completion.request_id
        flow = self._flows.pop(handle)
        if self._texts is not None:
            self._texts.keep(completion.prompt_ids, completion.token_ids)
        if flow.ended:
            # One that was quarantined, or that another worker made, may have more in the engine.
            self._waste(Counter(tokens=len(completion.token_ids)))
        else:
            self._go_on(flow, lambda: flow.come(handle, completion), ahead=True)

    def _spans(self, record: Record) -> tuple[str, tuple[int, ...]]:
        return record.call.name, span_lengths(record.completion, self._speller.decode)

    def _count(self, flow: Flow) -> None:
        self._units += 1
        self._unit_tokens += flow.tokens
        self._unit_tokens_squared += flow.tokens * flow.tokens
        self._checked.update(flow.walk.checked)

    def _commit_finished(self) -> list[tuple[Lease, Commit]]:
        finished = [work for work in self._work if work.done]
        committed: list[tuple[Lease, Commit]] = []
        for work in finished:
            self._work.remove(work)
            own = Counter(units=work.units, tokens=work.spent)
            self._settled.update(own)
            try:
                commit = self._put(work)
            except (StoreError, LedgerError) as error:
                self._discarded.update(own)
                self._failed.append((work.lease, Failure.of(error)))
                continue
            if commit is None:
                continue
            if commit.attempt != work.lease.id:
                self._discarded.update(own)
            committed.append((replace(work.lease, shares=work.shares), commit))
        return committed

    def _put(self, work: TaskWork) -> Commit | None:
        """Put what was made; a share is no commit."""
        rows, errors = work.tables()
        if not work.lease.of:
            return self._objects.put(work.lease, rows, errors, work.tokens)
        spent = work.spent + sum(share.spent for share in work.shares)
        share = self._objects.put_share(work.lease, rows, errors, work.tokens, spent)
        self._shares.append((replace(work.lease, shares=work.shares), share))
        return None

    def _report(self, committed: list[tuple[Lease, Commit]], seconds: float) -> PumpReport:
        total = self._engine.metrics()
        report = PumpReport(
            committed=tuple(committed),
            failed=tuple(self._failed),
            shares=tuple(self._shares),
            progress=tuple(work.progress for work in self._work),
            metrics=total - self._reported,
            units=self._units,
            unit_tokens=self._unit_tokens,
            unit_tokens_squared=self._unit_tokens_squared,
            settled=self._settled["units"],
            settled_tokens=self._settled["tokens"],
            discarded=self._discarded["units"],
            discarded_tokens=self._discarded["tokens"],
            under_way=max(0, len(self._flows) - self._engine.waiting),
            seconds=seconds,
            slots=self._engine.slots,
            waiting=self._engine.waiting,
            notices=(*self._engine.notices, *self._notices),
            checked=tuple(self._checked.items()),
            texts=() if self._texts is None else self._texts.take(),
        )
        for counter in (self._checked, self._settled, self._discarded):
            counter.clear()
        self._engine.notices.clear()
        self._reported, self._failed = total, []
        self._shares, self._notices = [], []
        self._units = self._unit_tokens = self._unit_tokens_squared = 0
        return report
