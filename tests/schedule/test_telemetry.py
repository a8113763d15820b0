"""Ray metrics: read as Prometheus reads them, and the dashboard over them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.reports import Failure, PumpReport
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.telemetry import COUNTERS, GAUGES, LABELS, PREFIX, amounts
from tests.job.fake_engine import LONG
from tests.job.fake_job import write_job


def test_a_pump_s_numbers_go_to_the_counters_that_name_them() -> None:
    metrics = EngineMetrics(
        completion_tokens=7, drafted_at=(5, 4), accepted_at=(3, 1), draft_s=0.5, row_passes=9
    )
    lease = Lease(Task("part-00000", 0, 0, 4), 1, "run")
    report = PumpReport(failed=((lease, Failure("no")),), metrics=metrics, units=2)
    found = {(name, label): value for name, label, value in amounts(report)}
    assert {name for name, _ in found} == set(COUNTERS)
    assert {name for name, label in found if label} == set(LABELS)
    assert {key: value for key, value in found.items() if value} == {
        ("tokens_total", ""): 7,
        ("rows_total", ""): 2,
        ("failed_shards_total", ""): 1,
        ("row_passes_total", ""): 9,
        ("drafts_total", "1"): 5,
        ("drafts_total", "2"): 4,
        ("accepted_total", "1"): 3,
        ("accepted_total", "2"): 1,
        ("seconds_total", "draft"): 0.5,
    }


def test_the_dashboard_reads_every_metric_and_no_other(repository: Path) -> None:
    text = (repository / "monitoring" / "grafana-dashboard.json").read_text("utf-8")
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    used = set(re.findall(r"\bray_eagle_batch_\w+", " ".join(queries)))
    assert used == {f"ray_{PREFIX}{name}" for name in (*COUNTERS, *GAUGES)}
    for query in queries:
        assert query.count("(") == query.count(")")
        labels = re.findall(r"by \((\w+)\)", query)
        assert set(labels) <= {"pipeline", "WorkerId", *LABELS.values()}


@pytest.mark.slow
def test_prometheus_reads_what_a_job_did(repository: Path, tmp_path: Path) -> None:
    topics = [f"topic {n}" for n in range(7)] + [LONG]
    path = write_job(tmp_path, topics, limits={"max_error_rate": 1.0})
    environment = os.environ | {
        "PYTHONPATH": str(repository),
        "RAY_metrics_report_interval_ms": "500",
    }
    command = [sys.executable, "-m", "tests.schedule.scrape", str(path), "16.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = defaultdict(float)
    workers: set[str] = set()
    for family in text_string_to_metric_families(done.stdout):
        for sample in family.samples:
            assert sample.labels["pipeline"] == "fake"
            workers.add(sample.labels["WorkerId"])
            found[sample.name.removeprefix(f"ray_{PREFIX}")] += sample.value
    assert len(workers) == 1
    numbers = {name.removesuffix("_total"): value for name, value in found.items()}
    # 7 rows of 2 samples and 2 stages with 3 and 2 tokens; 2 samples of the last row are refused.
    assert numbers["rows"] == 16
    assert numbers["quarantined_rows"] == 2
    assert numbers["tokens"] == 7 * 2 * (3 + 2)
    assert numbers["shards"] == 2
    assert numbers["drafts"] == 2 * numbers["accepted"] == 7 * 2 * 2 * 2
    assert numbers["seconds"] == pytest.approx(7 * 2 * 2 * 0.003)
    assert numbers["slots"] == 4
    assert numbers["waiting_requests"] == 0
