"""Benchmark results as Markdown and as plain records for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_batch.bench.measure import PLAIN, Measurement
from eagle_batch.bench.summary import Summary
from eagle_batch.bench.use import Workload

_SPEEDS = (
    "batch",
    "draft",
    "tokens/s",
    "ratio",
    "tokens a pass",
    "accepted at 1, 2, ...",
    "MFU",
    "memory",
    "same text",
)
_COSTS = (
    "batch",
    "draft",
    "a round (ms)",
    "drafting (ms)",
    "verifying (ms)",
    "drafting in plain passes",
    "verifying in plain passes",
)


#: Positions of a draft whose acceptance the table shows.
_SHOWN = 5


def _head(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def markdown(measurements: Sequence[Measurement], workload: Workload) -> str:
    """Return the table of speeds, one line for each batch and shape."""
    lines = _head(_SPEEDS)
    for item, record in zip(measurements, records(measurements, workload), strict=True):
        accepted = " ".join(_rates_shown(record["accepted_at"])) or "-"
        lines.append(
            f"| {item.batch} | {item.shape.name} | {item.tokens_per_second:.1f} "
            f"| {record['ratio']:.2f} | {record['acceptance_length']:.2f} | {accepted} "
            f"| {record['mfu']:.0%} | {record['memory_use']:.0%} "
            f"| {item.identical}/{item.rows} |"
        )
    return "\n".join(lines)


def _rates_shown(rates: Sequence[float]) -> list[str]:
    """Return the first rates as texts; a long branch has many, which the records list in full."""
    more = ["..."] if len(rates) > _SHOWN else []
    return [f"{rate:.2f}" for rate in rates[:_SHOWN]] + more


def costs(measurements: Sequence[Measurement], workload: Workload) -> str:
    """Return the table of what a round costs, in milliseconds and in plain passes."""
    found = records(measurements, workload)
    plain = {record["batch"]: record["verify_ms"] for record in found if record["draft"] == "plain"}
    lines = _head(_COSTS)
    for record in found:
        base = plain[record["batch"]] or 1.0
        draft, verify = record["draft_ms"], record["verify_ms"]
        lines.append(
            f"| {record['batch']} | {record['draft']} | {draft + verify:.1f} | {draft:.1f} "
            f"| {verify:.1f} | {draft / base:.2f} | {verify / base:.2f} |"
        )
    return "\n".join(lines)


def page(
    measurements: Sequence[Measurement], workload: Workload, summary: Summary, about: dict[str, Any]
) -> str:
    """Return everything as one Markdown page: headline, advice, tables, and how it was measured."""
    tables = markdown(measurements, workload), costs(measurements, workload)
    parts = [f"**{summary.headline}**", summary.advice, tables[0], "What a round costs:", tables[1]]
    return "\n\n".join([*parts, _conditions(about), f"    {about['command']}"])


def _conditions(about: dict[str, Any]) -> str:
    """Return one paragraph on what was measured, and on what."""
    device = about["device"]
    names = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    peak = f"{device['flops'] / 1e12:,.2f} TFLOP/s and {device['bytes_per_s'] / 1e9:,.1f} GB/s"
    return (
        f"{about['target']} in {about['dtype']}, head {about['head'] or 'none'}; "
        f"{about['max_tokens']} new tokens, temperature {about['temperature']:g}; {names}. "
        f"{device['name']}: {peak}, {device['source']}."
    )


def records(measurements: Sequence[Measurement], workload: Workload) -> list[dict[str, Any]]:
    """Return the results as JSON-ready records, each with its ratio to plain decoding."""
    plain = {m.batch: m.tokens_per_second for m in measurements if m.shape == PLAIN}
    return [_record(m, workload, plain[m.batch]) for m in measurements]


def _record(m: Measurement, workload: Workload, plain: float) -> dict[str, Any]:
    passes = max(1, m.metrics.target_passes)
    return {
        "batch": m.batch,
        "draft": m.shape.name,
        "tokens": m.tokens,
        "seconds": round(m.seconds, 3),
        "tokens_per_second": round(m.tokens_per_second, 2),
        "tokens_per_hour": round(3600 * m.tokens_per_second),
        "ratio": round(m.tokens_per_second / plain, 3),
        "acceptance_length": round(m.metrics.acceptance_length, 3),
        "accepted_at": _rates(m),
        "mfu": round(workload.flops_use(m), 4),
        "memory_use": round(workload.memory_use(m), 4),
        "draft_ms": round(1000 * m.metrics.draft_s / passes, 3),
        "verify_ms": round(1000 * m.metrics.verify_s / passes, 3),
        "prefill_s": round(m.metrics.prefill_s, 3),
        "draft_s": round(m.metrics.draft_s, 3),
        "verify_s": round(m.metrics.verify_s, 3),
        "host_s": round(m.metrics.host_s, 3),
        "identical_rows": m.identical,
        "rows": m.rows,
    }


def _rates(measurement: Measurement) -> list[float]:
    """Return the share of rounds that accepted at least 1, 2, ... drafted tokens."""
    metrics = measurement.metrics
    pairs = zip(metrics.accepted_at, metrics.drafted_at, strict=True)
    return [round(accepted / drafted, 3) for accepted, drafted in pairs if drafted]
