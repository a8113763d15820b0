"""Between a job's driver and the process that trains its head: starts it, feeds it, hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from eagle_batch.job.adapting import HEAD, WEIGHTS, Adaptation, Round, Switch, Text
from eagle_batch.job.reports import Failure, HeadTrainer
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import NewHead
from eagle_batch.pipeline import Pipeline
from eagle_batch.training.learnt import Learnt

#: (first start of the job) -> the process that trains its head.
MakeTrainer = Callable[[float], HeadTrainer]


class Adapter:
    """Performs what `Adaptation` decides; does nothing for a pipeline that does not adapt.

    Whatever becomes of the trainer, the job goes on.
    """

    def __init__(
        self, pipeline: Pipeline, store: Store, make_trainer: MakeTrainer | None, started: float
    ) -> None:
        """Start nothing yet: a short job never loads a second target.

        Raises StoreError where the store cannot tell whether there is a head already.
        """
        self._budget = pipeline.speculation.adapt
        self._adaptation: Adaptation | None = None
        self._make = make_trainer
        if self._budget is not None and make_trainer is not None:
            found = WEIGHTS in store.list(HEAD)
            self._adaptation = Adaptation(self._budget, version=1 if found else 0)
        self._started = started
        self._trainer: HeadTrainer | None = None
        #: Seconds that a round may take beyond its time, and when it must have ended.
        self._patience_s = pipeline.limits.stall_seconds
        self._until = 0.0
        #: Number of the head that each worker was told of.
        self._told: dict[int, int] = {}

    def news(self, worker: int) -> tuple[NewHead, ...]:
        """Return what the worker is to be told of, once."""
        newest = 0 if self._adaptation is None else self._adaptation.version
        if newest == self._told.get(worker, 0):
            return ()
        self._told[worker] = newest
        return (NewHead(newest),)

    def take(self, texts: tuple[Text, ...]) -> None:
        """Keep finished texts for the next round."""
        if self._adaptation is not None:
            self._adaptation.take(texts)

    def tend(self, at: float, left: float | None) -> Iterator[Switch]:
        """Begin what is due and yield what came about, `at` seconds into the run."""
        adaptation = self._adaptation
        if adaptation is None or adaptation.stopped:
            return
        try:
            yield from self._tend(adaptation, at, left)
        except Exception as error:  # noqa: BLE001 - the job goes on without
            yield self._give_up(adaptation, Failure.of(error).message, at)

    def _tend(self, adaptation: Adaptation, at: float, left: float | None) -> Iterator[Switch]:
        found = None if self._trainer is None else self._trainer.poll()
        if isinstance(found, Learnt):
            yield adaptation.learnt(found, at)
        elif isinstance(found, Failure):
            yield self._give_up(adaptation, found.message, at)
        elif adaptation.busy and at > self._until:
            yield self._give_up(adaptation, self._silence(), at)
        work = adaptation.next_round(at, left)
        if work is not None:
            self._begin(work, at)

    def _begin(self, work: Round, at: float) -> None:
        assert self._make is not None, "nothing is learnt without a trainer"
        if self._trainer is None:
            self._trainer = self._make(self._started)
        self._trainer.begin(work)
        self._until = at + work.seconds + self._patience_s

    def _silence(self) -> str:
        assert self._budget is not None, "nobody was asked"
        needs = f"{self._budget.cpus} CPU cores and {self._budget.gpus:g} GPUs"
        return f"the trainer does not answer; has the cluster room for {needs}?"

    def _give_up(self, adaptation: Adaptation, reason: str, at: float) -> Switch:
        self.close()
        return adaptation.failed(reason, at)

    def document(self) -> dict[str, Any]:
        """Return what happened, as plain data for `_job/metrics.json`."""
        if self._adaptation is None:
            return {"head": 0, "events": []}
        events = [asdict(event) for event in self._adaptation.events]
        return {"head": self._adaptation.version, "events": events}

    def close(self) -> None:
        """End the trainer, if there is one."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
