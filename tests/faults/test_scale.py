"""What the driver costs with many rows, shards and files; docs/scale.md has the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from eagle_batch.data.plan import plan
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_job import write_job

pytestmark = pytest.mark.slow


def test_a_million_rows_over_64_workers_cost_the_driver_little_and_its_memory_is_flat(
    tmp_path: Path, repository: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.scale", str(tmp_path), "1000000", "100", "64"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["rows"], numbers["tasks"]) == (1_000_000, 10_000)
    assert numbers["run_s"] < 50, "fewer than 20,000 rows a second"
    assert numbers["peak_mb"] < 600
    assert numbers["peak_mb"] - numbers["first_mb"] < 60, "the memory grows with the rows"


def test_ten_thousand_input_files_are_listed_and_planned_within_half_a_minute(
    tmp_path: Path,
) -> None:
    path = write_job(tmp_path, ["x"])
    document = yaml.safe_load(path.read_text())
    document["input"] = {"path": "many"}
    path.write_text(yaml.safe_dump(document))
    folder = tmp_path / "many"
    folder.mkdir()
    pq.write_table(pa.table({"topic": ["a", "b"], "n": [1, 2]}), tmp_path / "one.parquet")
    content = (tmp_path / "one.parquet").read_bytes()
    for number in range(10_000):
        (folder / f"{number:05d}.parquet").write_bytes(content)
    pipeline = load_pipeline(path)
    begun = time.monotonic()
    planned = plan(pipeline)
    assert time.monotonic() - begun < 30
    assert (len(planned.files), planned.rows) == (10_000, 20_000)
