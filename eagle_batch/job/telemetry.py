"""A worker's counters as Ray metrics, for Prometheus; `monitoring/` has a dashboard over them.

Ray exports them on every node, with the worker's id; a worker that is replaced starts anew at zero,
so that sums over workers are made of rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.reports import PumpReport

PREFIX = "eagle_batch_"
#: Counter -> what it counts. Ray puts `ray_` before each name.
COUNTERS = {
    "tokens_total": "Generated tokens.",
    "prompt_tokens_total": "Tokens of prompts.",
    "reused_prompt_tokens_total": "Tokens of prompts that were there already.",
    "rows_total": "Rows x samples that were generated or quarantined.",
    "quarantined_rows_total": "Rows x samples that were committed as quarantined.",
    "dropped_rows_total": "Rows x samples that were committed as left out on purpose.",
    "shards_total": "Shards that were committed.",
    "failed_shards_total": "Shards that could not be made.",
    "shares_total": "Times that rows were made of another worker's shard.",
    "target_passes_total": "Verification passes of the target.",
    "row_passes_total": "Rows that took part in those passes.",
    "slot_passes_total": "Slots that there were in those passes.",
    "round_tokens_total": "Tokens that those passes gained.",
    "drafts_total": "Drafts that were offered, by depth.",
    "accepted_total": "Drafts that were accepted, by depth.",
    "seconds_total": "Seconds of the engine, by phase.",
}
#: Gauge -> what it shows.
GAUGES = {
    "slots": "Rows decoded together at most.",
    "waiting_requests": "Requests that have no slot yet.",
}
#: Counters with a label beside the pipeline's name.
LABELS = {"drafts_total": "depth", "accepted_total": "depth", "seconds_total": "phase"}
_PHASES = ("prefill", "draft", "verify", "host")


class Telemetry:
    """The metrics of the worker in this process; to be used inside a Ray actor."""

    def __init__(self, pipeline: str) -> None:
        """Register the metrics, labelled with the pipeline's name."""
        from ray.util.metrics import Counter, Gauge

        self._tags = {"pipeline": pipeline}
        self._counters: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            keys = ("pipeline", LABELS[name]) if name in LABELS else ("pipeline",)
            self._counters[name] = Counter(PREFIX + name, description=text, tag_keys=keys)
        self._gauges = {
            name: Gauge(PREFIX + name, description=text, tag_keys=("pipeline",))
            for name, text in GAUGES.items()
        }

    def count(self, report: PumpReport) -> None:
        """Add what happened in one pump."""
        for name, label, value in amounts(report):
            if value > 0:  # Ray refuses to add nothing
                tags = self._tags | ({LABELS[name]: label} if label else {})
                self._counters[name].inc(value, tags=tags)
        self._gauges["slots"].set(report.slots, tags=self._tags)
        self._gauges["waiting_requests"].set(report.waiting, tags=self._tags)


def amounts(report: PumpReport) -> Iterator[tuple[str, str, float]]:
    """Yield (counter, label or nothing, amount) of one pump."""
    metrics = report.metrics
    yield "tokens_total", "", metrics.completion_tokens
    yield "prompt_tokens_total", "", metrics.prompt_tokens
    yield "reused_prompt_tokens_total", "", metrics.cached_prompt_tokens
    yield "rows_total", "", report.units
    commits = [commit for _, commit in report.committed]
    yield "quarantined_rows_total", "", sum(commit.quarantined for commit in commits)
    yield "dropped_rows_total", "", sum(commit.dropped for commit in commits)
    yield "shards_total", "", len(report.committed)
    yield "failed_shards_total", "", len(report.failed)
    yield "shares_total", "", len(report.shares)
    yield "target_passes_total", "", metrics.target_passes
    yield "row_passes_total", "", metrics.row_passes
    yield "slot_passes_total", "", metrics.slot_passes
    yield "round_tokens_total", "", metrics.round_tokens
    yield from _by_depth(metrics)
    for phase in _PHASES:
        yield "seconds_total", phase, getattr(metrics, f"{phase}_s")


def _by_depth(metrics: EngineMetrics) -> Iterator[tuple[str, str, float]]:
    for depth, drafts in enumerate(metrics.drafted_at, start=1):
        yield "drafts_total", str(depth), drafts
    for depth, accepted in enumerate(metrics.accepted_at, start=1):
        yield "accepted_total", str(depth), accepted
