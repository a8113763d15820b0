"""A job whose input and output lie in one store: found, read by row group, proven, told apart."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import eagle_batch
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job.verify import verify
from tests.job.fake_job import load_job, run_in_process, write_job

ROWS = [{"id": f"row{n}", "topic": f"topic {n} é😀"} for n in range(20)]


def put(url: str, data: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, data)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue()


def arrow(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def check_input_from_a_store(url: str, folder: Path) -> None:
    """Files by a glob, a folder and a name, into the same store."""
    put(f"{url}/in/a one.parquet", parquet(ROWS[:7]))
    put(f"{url}/in/b.parquet", parquet(ROWS[7:12]))
    put(f"{url}/more/deep/c.jsonl.gz", gzip.compress(lines(ROWS[12:15])))
    put(f"{url}/more/_skipped.jsonl", lines(ROWS[:1]))
    put(f"{url}/more/d.arrow", arrow(ROWS[15:18]))
    put(f"{url}/e.csv", b"id,topic\r\n" + b"".join(_csv(row) for row in ROWS[18:]))
    places = [f"{url}/in/*.parquet", f"{url}/more", f"{url}/e.csv"]
    fields = {"input": {"path": places}, "output": {"path": f"{url}/out"}, "samples": 1}
    job = load_job(path := write_job(folder, ["unused"], **fields))
    assert job.plan.rows == len(ROWS)
    run_in_process(job)
    report = verify(f"{url}/out")
    assert (report.ok, report.not_compared) == (True, ""), report.findings
    made = eagle_batch.read(f"{url}/out").to_arrow()
    assert sorted(made.select(["id", "topic"]).to_pylist(), key=str) == sorted(ROWS, key=str)
    assert run_in_process(load_job(path)).already_complete
    put(f"{url}/in/b.parquet", parquet([*ROWS[7:11], {"id": "row11", "topic": "another"}]))
    with pytest.raises(LedgerError, match=r"b\.parquet"):
        run_in_process(load_job(path))
    with pytest.raises(ConfigError, match="no file has this name"):
        load_job(path, f"input.path={url}/in/nothing.parquet")


def _csv(row: dict[str, Any]) -> bytes:
    return f"{row['id']},{row['topic']}\r\n".encode()
