"""Benchmark results as Markdown and as plain records for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_batch.bench.measure import PLAIN, Measurement

_HEADER = (
    "| batch | draft | tokens/s | ratio | acceptance length | accepted at 1, 2, ... | same text |",
    "|---|---|---|---|---|---|---|",
)


def markdown(measurements: Sequence[Measurement]) -> str:
    """Return a table, one line for each batch and shape."""
    lines = [*_HEADER]
    for item, record in zip(measurements, records(measurements), strict=True):
        accepted = " ".join(f"{rate:.2f}" for rate in record["accepted_at"]) or "-"
        lines.append(
            f"| {item.batch} | {item.shape.name} | {item.tokens_per_second:.1f} "
            f"| {record['ratio']:.2f} | {record['acceptance_length']:.2f} | {accepted} "
            f"| {item.identical}/{item.rows} |"
        )
    return "\n".join(lines)


def records(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the results as JSON-ready records, each with its ratio to plain decoding."""
    plain = {m.batch: m.tokens_per_second for m in measurements if m.shape == PLAIN}
    return [
        {
            "batch": m.batch,
            "draft": m.shape.name,
            "tokens": m.tokens,
            "seconds": round(m.seconds, 3),
            "tokens_per_second": round(m.tokens_per_second, 2),
            "ratio": round(m.tokens_per_second / plain[m.batch], 3),
            "acceptance_length": round(m.metrics.acceptance_length, 3),
            "accepted_at": _rates(m),
            "prefill_s": round(m.metrics.prefill_s, 3),
            "draft_s": round(m.metrics.draft_s, 3),
            "verify_s": round(m.metrics.verify_s, 3),
            "host_s": round(m.metrics.host_s, 3),
            "identical_rows": m.identical,
            "rows": m.rows,
        }
        for m in measurements
    ]


def _rates(measurement: Measurement) -> list[float]:
    """Return the share of rounds that accepted at least 1, 2, ... drafted tokens."""
    metrics = measurement.metrics
    pairs = zip(metrics.accepted_at, metrics.drafted_at, strict=True)
    return [round(accepted / drafted, 3) for accepted, drafted in pairs if drafted]
