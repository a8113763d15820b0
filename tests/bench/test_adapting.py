"""The sums of the benchmark of adaptation."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from eagle_batch.pipeline import parse_pipeline
from tests.bench.adapting import Third, pipeline, thirds, write_rows


def test_thirds_are_thirds_of_the_rows_not_of_the_time() -> None:
    """Ten tokens a row; the last third of the rows takes half the time of the others."""
    moments = ((0, 0, 0), (10, 10, 100), (20, 20, 200), (25, 30, 250))
    series = [
        {"at": at, "units": rows, "tokens": 10 * rows, "row_passes": n, "round_tokens": 10 * rows}
        for at, rows, n in moments
    ]
    assert thirds(series) == [Third(10.0, 1.0), Third(10.0, 1.0), Third(20.0, 2.0)]


def test_rows_differ_and_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / name, 300)
    rows = pq.read_table(tmp_path / "a").to_pylist()
    assert rows == pq.read_table(tmp_path / "b").to_pylist()
    assert len({(row["topic"], row["angle"], row["level"]) for row in rows}) == 300
    parse_pipeline(pipeline(tmp_path, "x", 300, 2, {"adapt": True}), "bench")
