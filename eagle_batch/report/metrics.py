"""The numbers of a job, read from its `_job/metrics.json`, as a table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """What one run of a job measured."""

    state: str
    units: int
    rows: int
    quarantined: int
    #: Rows that this run made; those of earlier runs are only in `rows`.
    rows_this_run: int
    tokens: int
    #: Of those, tokens that a lost worker took along, or that two workers made.
    discarded_tokens: int
    prompt_tokens: int
    #: Of those, tokens that were not computed: a slot or a shared prefix held them.
    reused_tokens: int
    #: From the first worker that was ready on.
    generating_seconds: float
    tokens_per_s: float
    rows_per_s: float
    acceptance_length: float
    #: Share of the drafted tokens that was accepted, by depth.
    acceptance_at: tuple[float, ...]
    occupancy: float
    #: Share of the engines' time in prefill, draft, verify and host.
    time_share: dict[str, float]
    workers: int
    #: Rows that were left out on purpose.
    dropped: int = 0
    #: Of each validator: texts that it passed, and that it refused.
    validators: tuple[tuple[str, int, int], ...] = ()
    #: Heads that were trained beside the job and took over.
    heads: int = 0

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> JobMetrics:
        """Read the document that a driver wrote; raises KeyError when it is another one."""
        engine = document["engine"]
        names = ("state", "units", "rows", "quarantined", "rows_this_run", "generating_seconds")
        return cls(
            **{name: document[name] for name in names},
            tokens=engine["completion_tokens"],
            discarded_tokens=document["discarded_tokens"],
            prompt_tokens=engine["prompt_tokens"],
            reused_tokens=engine["cached_prompt_tokens"],
            tokens_per_s=document["tokens_per_s"],
            rows_per_s=document["rows_per_s"],
            acceptance_length=engine["acceptance_length"],
            acceptance_at=tuple(engine["acceptance_at"]),
            occupancy=engine["occupancy"],
            time_share=dict(engine["time_share"]),
            workers=len(document["workers"]),
            dropped=document.get("dropped", 0),
            validators=tuple(
                (name, counts["passed"], counts["failed"])
                for name, counts in document.get("validators", {}).items()
            ),
            heads=sum(
                event["kind"] == "switch"
                for event in document.get("adaptation", {}).get("events", ())
            ),
        )


def metrics_table(metrics: JobMetrics) -> Table:
    """Return the final table of a run."""
    table = Table(title=f"Job {metrics.state}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _lines(metrics):
        table.add_row(name, value)
    return table


def _generated(metrics: JobMetrics) -> str:
    lost = f", {metrics.discarded_tokens:,} of them for nothing"
    return f"{metrics.tokens:,}" + (lost if metrics.discarded_tokens else "")


def _lines(metrics: JobMetrics) -> list[tuple[str, str]]:
    lines = [
        ("rows out", f"{metrics.rows:,} of {metrics.units:,}"),
        ("quarantined", f"{metrics.quarantined:,}"),
        ("made in this run", f"{metrics.rows_this_run:,}"),
        ("generated tokens", _generated(metrics)),
        ("prompt tokens", f"{metrics.prompt_tokens:,}, {metrics.reused_tokens:,} of them reused"),
        ("generating", f"{metrics.generating_seconds:.1f} s, workers {metrics.workers}"),
        ("output tokens/s", f"{metrics.tokens_per_s:,.1f}"),
        ("rows/s", f"{metrics.rows_per_s:,.2f}"),
        ("tokens a target pass", f"{metrics.acceptance_length:.2f}"),
    ]
    if metrics.dropped:
        lines.insert(2, ("dropped", f"{metrics.dropped:,}"))
    for name, passed, failed in metrics.validators:
        lines.append((f"{name} refused", f"{failed:,} of {passed + failed:,}"))
    if metrics.heads:
        lines.append(("trained heads that took over", f"{metrics.heads:,}"))
    if any(metrics.acceptance_at):
        rates = "  ".join(f"{rate:.0%}" for rate in metrics.acceptance_at)
        lines.append(("accepted at depth 1, 2, ...", rates))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in metrics.time_share.items())
    return [*lines, ("slots in use", f"{metrics.occupancy:.0%}"), ("time in", shares)]
