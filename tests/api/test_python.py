"""The Python API: pipelines, outputs, and generation inside a program of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import eagle_batch
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.pipeline import Sampling, load_pipeline
from tests.job.fake_engine import LONG, build_fake
from tests.job.fake_job import load_job, run_in_process, write_job
from tests.test_docs import REPOSITORY, blocks

TOPICS = [LONG if n == 5 else f"topic {n}" for n in range(12)]


@pytest.fixture
def output(tmp_path: Path) -> eagle_batch.Output:
    """The output of a job whose row 5 is quarantined."""
    run_in_process(load_job(write_job(tmp_path, TOPICS, limits={"max_error_rate": 0.9})))
    return eagle_batch.read(str(tmp_path / "out"))


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, eagle_batch; print([m for m in sys.modules if 'eagle_batch.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(eagle_batch, name) for name in eagle_batch.__all__)
    assert set(eagle_batch.__all__) <= set(dir(eagle_batch))
    with pytest.raises(AttributeError, match="has no attribute 'sumbit'"):
        _ = eagle_batch.sumbit


def test_a_pipeline_of_keywords_is_the_one_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, TOPICS)
    monkeypatch.chdir(tmp_path)
    fields: dict[str, Any] = load_pipeline(path).model_dump(mode="json")
    fields["input"]["path"] = Path("in.parquet")
    fields["stages"][0]["sampling"] = Sampling(max_tokens=3)
    assert eagle_batch.Pipeline(**fields) == load_pipeline(path) == eagle_batch.load(path)
    with pytest.raises(ConfigError) as caught:
        eagle_batch.Pipeline(**{**fields, "sampels": 3, "seed": -1})
    assert "Pipeline(...): sampels" in str(caught.value)
    assert "Pipeline(...): seed" in str(caught.value)


def test_an_output_gives_its_rows_in_every_form(output: eagle_batch.Output, tmp_path: Path) -> None:
    files = sorted((tmp_path / "out" / "data").glob("*.parquet"))
    expected = pa.concat_tables(map(pq.read_table, files)).to_pylist()
    assert output.to_arrow().to_pylist() == expected
    assert output.to_dataset().to_list() == expected
    assert [table.num_rows for table in output.batches()] == [8, 6, 8]
    assert output.errors()["id"].to_pylist() == ["row5", "row5"]
    assert (output.rows, output.quarantined, output.complete) == (22, 2, True)
    assert repr(output).endswith("22 rows, 2 quarantined, of 24>")
    assert output.pipeline["name"] == "fake"
    assert output.verify().ok
    with pytest.raises(LedgerError, match="expected the output folder"):
        eagle_batch.read(str(tmp_path))


def test_batches_of_any_size_give_the_rows_of_a_job(
    output: eagle_batch.Output, tmp_path: Path
) -> None:
    pipeline = load_job(tmp_path / "pipeline.yaml").pipeline
    source = pq.read_table(tmp_path / "in.parquet")
    names = ["id", "sample", "topic", "n", "one", "two"]
    expected = output.to_arrow().select(names).to_pylist()
    for size in (1, 5, 12):
        generate = eagle_batch.Generate(pipeline, "cpu", build_fake)
        starts = range(0, 12, size)
        made = pa.concat_tables([generate(source.slice(start, size)) for start in starts])
        rows = made.to_pylist()
        assert [{name: row[name] for name in names} for row in rows if row["error"] is None] == (
            expected
        )
        lost = [row for row in rows if row["error"] is not None]
        assert [(row["id"], row["topic"], row["one"]) for row in lost] == [("row5", LONG, None)] * 2
        assert lost[0]["error"] == "prompt_too_long: the prompt is too long"
        assert [row["id"] for row in rows] == [f"row{n}" for n in range(12) for _ in range(2)]


def test_generation_by_batches_needs_ids_and_takes_every_row(tmp_path: Path) -> None:
    pipeline = load_job(write_job(tmp_path, TOPICS)).pipeline
    for changes, message in (
        ({"id": None}, "input.id: found null; expected the column"),
        ({"limit": 3}, "filter, sample or limit the Ray Dataset"),
        ({"where": "n > 1"}, "filter, sample or limit the Ray Dataset"),
    ):
        source = pipeline.input.model_copy(update=changes)
        with pytest.raises(ConfigError, match=message):
            eagle_batch.Generate(pipeline.model_copy(update={"input": source}))


@pytest.mark.exhaustive
def test_shards_that_ray_cannot_read_keep_their_types_in_a_ray_data_set(tmp_path: Path) -> None:
    output = {"format": "jsonl", "compression": "none"}
    run_in_process(load_job(write_job(tmp_path, TOPICS[:5], output=output)))
    code = (
        "import eagle_batch\n"
        "output = eagle_batch.read('out')\n"
        "rows = sorted(output.to_ray().take_all(), key=lambda row: (row['id'], row['sample']))\n"
        "assert [row['one'] for row in rows] == output.to_arrow()['one'].to_pylist()\n"
        "print(output.to_ray().schema().base_schema.field('sample').type)\n"
    )
    assert run_program(tmp_path, code).split()[-1] == "int32"


@pytest.mark.exhaustive
def test_the_page_s_code_does_what_it_says(tmp_path: Path, demo_target: Path) -> None:
    """In two programs, as the page says: a job of its own, and a program that has a Ray."""
    rows = [{"id": f"t{n}", "topic": topic} for n, topic in enumerate(["rain", "wind", "snow"])]
    (tmp_path / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    define, submit, read, generate = blocks(
        (REPOSITORY / "docs" / "python.md").read_text("utf-8"), "python"
    )
    assert "3 rows, 0 quarantined, of 3" in run_program(tmp_path, define + submit + read)
    last = 'print(eagle_batch.read("runs/answers").to_ray().count())\n'
    assert run_program(tmp_path, define + generate + last).splitlines()[-1] == "3"


def run_program(folder: Path, code: str) -> str:
    (folder / "program.py").write_text(code)
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
