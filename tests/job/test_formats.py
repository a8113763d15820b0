"""A job in Parquet, Arrow and JSON lines: the same rows, the same promises."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

import eagle_batch
from eagle_batch.cli import main
from eagle_batch.data.describe import check, describe
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job.ledger import read_identity
from eagle_batch.job.openai_files import lines
from eagle_batch.job.replay import replay
from eagle_batch.job.status import read_status
from eagle_batch.job.store import open_store
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import load_pipeline
from eagle_batch.report.write import write_reports
from tests.job.fake_engine import LONG
from tests.job.fake_job import load_job, run_in_process, write_job
from tests.job.support import Dying

TOPICS = [LONG if n == 5 else f"topic {n % 7}" for n in range(12)]
#: Section `output` -> how the names of its objects end.
OUTPUTS = {
    ("parquet", "zstd"): ".parquet",
    ("arrow", "zstd"): ".arrow",
    ("jsonl", "none"): ".jsonl",
    ("jsonl", "zstd"): ".jsonl.zst",
    ("jsonl", "gzip"): ".jsonl.gz",
}
FORMS = pytest.mark.parametrize("form", OUTPUTS, ids="-".join)


def write(folder: Path, form: tuple[str, str], **fields: Any) -> Path:
    """A job over rows with columns of many types."""
    output = {"format": form[0], "compression": form[1]}
    fields = {"limits": {"max_error_rate": 0.9}, "output": output} | fields
    path = write_job(folder, TOPICS, **fields)
    count = len(TOPICS)
    set_source(
        folder,
        pq.read_table(folder / "in.parquet")
        .append_column("price", pa.array([decimal.Decimal("1.50"), None] * 6, pa.decimal128(9, 2)))
        .append_column("at", pa.array([None, 1] * 6, pa.timestamp("ns", "Europe/Berlin")))
        .append_column("day", pa.array([dt.date(2024, 5, 6)] * count, pa.date64()))
        .append_column("raw", pa.array([b"\xff", None] * 6))
        .append_column("kind", pa.array(["a", "b", None] * 4).dictionary_encode())
        .append_column("deep", pa.array([{"x": [{"y": b"1", "z": None}]}, None] * 6))
        .append_column("a.b c", pa.array(["é\0\r\n😀", ""] * 6)),
    )
    # The model is a folder, whose place must not differ between the rows that are compared.
    document = yaml.safe_load(path.read_text())
    (folder.parent / "model").mkdir(exist_ok=True)
    (folder.parent / "model" / "config.json").write_text('{"model_type": "llama"}')
    document["target"] = {"model": str(folder.parent / "model")}
    document["input"]["path"] = "in.arrow"
    path.write_text(yaml.safe_dump(document))
    return path


def set_source(folder: Path, table: pa.Table) -> None:
    """Arrow has every type."""
    with pa.ipc.new_file(folder / "in.arrow", table.schema) as writer:
        writer.write_table(table)


def source(folder: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(folder / "in.arrow"))).read_all()


def table_of(folder: Path) -> pa.Table:
    return eagle_batch.read(str(folder / "out")).to_arrow()


def objects(folder: Path) -> dict[str, bytes]:
    found = (path for name in ("data", "errors") for path in (folder / "out" / name).iterdir())
    return {str(path.relative_to(folder / "out")): path.read_bytes() for path in found}


def test_the_same_job_reads_back_as_the_same_table_in_every_form(tmp_path: Path) -> None:
    tables, errors = {}, {}
    for form, ending in OUTPUTS.items():
        folder = tmp_path / "-".join(form)
        run_in_process(load_job(write(folder, form)))
        assert all(name.endswith(ending) for name in objects(folder))
        tables[form] = table_of(folder)
        errors[form] = eagle_batch.read(str(folder / "out")).errors()
        assert verify(str(folder / "out")).findings == ()
        assert verify(str(folder / "out")).ok
    wanted = tables["parquet", "zstd"]
    assert wanted.num_rows == 22
    assert wanted.schema.field("at").type == pa.timestamp("ns", "Europe/Berlin")
    assert wanted.schema.field("day").type == pa.date64()
    assert pa.types.is_dictionary(wanted.schema.field("kind").type)
    for form, table in tables.items():
        assert table.schema.equals(wanted.schema), form
        assert table.to_pylist() == wanted.to_pylist(), form
        assert errors[form].equals(errors["parquet", "zstd"]), form


@FORMS
def test_status_show_report_card_and_batch_files_read_every_form(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    folder = tmp_path / "job"
    job = load_job(write(folder, form, samples=1))
    run_in_process(job)
    out, ending = str(folder / "out"), OUTPUTS[form]
    status = read_status(out)
    assert (status.state, status.rows, status.quarantined) == ("complete", 11, 1)
    shown = CliRunner().invoke(main, ["show", out, "--row", "row3"])
    assert shown.exit_code == 0, shown.output
    assert "topic 3" in shown.output
    store = open_store(out)
    write_reports(store)
    page = (folder / "out" / "report.html").read_text("utf-8")
    assert any(text in page for text in table_of(folder)["two"].to_pylist())
    assert "prompt_too_long" in page
    assert f"data/*{ending}" in (folder / "out" / "README.md").read_text("utf-8")
    found = list(lines(store, read_identity(store)))
    assert [line.file for line in found].count("output.jsonl") == 11
    assert describe(job.pipeline).first_key == f"data/part-00000{ending}"
    again = replay(job.pipeline)
    assert again is not None
    assert pq.read_table(Path(again.input.path[0]))["id"].to_pylist() == ["row5"]


@FORMS
def test_objects_without_a_record_are_adopted_and_lost_ones_made_again(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    folder = tmp_path / "job"
    path = write(folder, form)
    run_in_process(load_job(path))
    before, ending = objects(folder), OUTPUTS[form]
    for record in (folder / "out" / "_job" / "commits").iterdir():
        record.unlink()
    (folder / f"out/errors/part-00001{ending}").unlink()
    assert run_in_process(load_job(path)).already_complete
    assert objects(folder) == before
    assert verify(str(folder / "out")).ok
    (folder / f"out/data/part-00002{ending}").unlink()
    assert not run_in_process(load_job(path)).already_complete
    assert objects(folder).keys() == before.keys()
    assert verify(str(folder / "out")).ok


@FORMS
def test_an_object_that_was_cut_is_moved_away_and_made_again(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    """The record of a crash is missing, and the disk has lost the end of the object."""
    folder = tmp_path / "job"
    path = write(folder, form)
    run_in_process(load_job(path))
    wanted = table_of(folder)
    for record in (folder / "out" / "_job" / "commits").iterdir():
        record.unlink()
    torn = folder / f"out/data/part-00001{OUTPUTS[form]}"
    torn.write_bytes(torn.read_bytes()[:-20])
    run_in_process(load_job(path))
    assert (folder / f"out/_job/damaged/part-00001{OUTPUTS[form]}").exists()
    assert table_of(folder).drop_columns(["generation"]).equals(wanted.drop_columns(["generation"]))
    assert verify(str(folder / "out")).ok


@FORMS
def test_verify_names_a_changed_object_in_every_form(tmp_path: Path, form: tuple[str, str]) -> None:
    folder = tmp_path / "job"
    run_in_process(load_job(write(folder, form)))
    ending = OUTPUTS[form]
    first, second = (folder / f"out/data/part-0000{n}{ending}" for n in (0, 2))
    first.write_bytes(second.read_bytes())
    errors = folder / f"out/errors/part-00001{ending}"
    errors.write_bytes((folder / f"out/errors/part-00000{ending}").read_bytes())
    report = verify(str(folder / "out"))
    assert not report.ok
    where = {finding.where for finding in report.findings}
    assert f"data/part-00000{ending}" in where
    assert {f"data/part-00001{ending}", f"errors/part-00001{ending}"} & where


@pytest.mark.parametrize("ending", [".jsonl"])
def test_a_damaged_stamp_is_told_and_the_shard_made_again(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "job"
    path = write(folder, ("jsonl", "none"))
    run_in_process(load_job(path))
    before = objects(folder)
    [stamp] = (folder / "out/_job/stamps").glob("part-00000-*")
    stamp.write_bytes(stamp.read_bytes()[:100])
    report = verify(str(folder / "out"))
    assert [finding.kind for finding in report.findings if "part-00000" in finding.where] == [
        "damaged"
    ]
    with pytest.raises(LedgerError, match="eagle-batch verify"):
        table_of(folder)
    for record in (folder / "out" / "_job" / "commits").iterdir():
        record.unlink()
    run_in_process(load_job(path))
    assert objects(folder).keys() == before.keys()
    assert verify(str(folder / "out")).ok


FOLDERS = ("data/", "errors/", "raw/", "_job/stamps/", "_job/finished/")


@pytest.mark.parametrize("form", [("jsonl", "none"), ("arrow", "lz4")], ids=lambda form: form[0])
def test_a_death_at_any_put_of_a_job_that_takes_out_duplicates_changes_nothing(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    fields: dict[str, Any] = {"deduplicate": {"column": "topic"}, "samples": 1}
    run_in_process(load_job(write(tmp_path / "whole", form, **fields)))
    wanted = table_of(tmp_path / "whole")
    assert wanted.num_rows == 6
    puts = 0
    while True:
        folder = tmp_path / f"dead{puts}"
        path = write(folder, form, **fields)
        try:
            run_in_process(load_job(path), store=Dying(str(folder / "out"), puts, FOLDERS))
        except KeyboardInterrupt:
            run_in_process(load_job(path))
        else:
            break
        assert table_of(folder).equals(wanted)
        assert verify(str(folder / "out")).ok
        puts += 3
    assert puts > 10


def test_a_value_that_json_lacks_sends_its_row_to_the_errors(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    path = write(folder, ("jsonl", "none"))
    numbers = pa.array([float("nan") if n == 2 else 1.5 for n in range(12)])
    set_source(folder, pa.table(source(folder).to_pydict() | {"x": numbers}))
    run_in_process(load_job(path))
    errors = eagle_batch.read(str(folder / "out")).errors().to_pylist()
    assert {(row["id"], row["reason"]) for row in errors} == {
        ("row2", "out_of_range"),
        ("row5", "prompt_too_long"),
    }
    assert "column 'x' has a value that JSON has not" in errors[0]["message"]


def test_a_column_that_json_lines_cannot_hold_is_told_by_validate(tmp_path: Path) -> None:
    path = write(tmp_path / "job", ("jsonl", "none"))
    names = pa.array([b"x" * 16] * 12, pa.binary(16)).cast(pa.uuid())
    columns = {"id": [f"row{n}" for n in range(12)], "topic": TOPICS, "who": names}
    set_source(tmp_path / "job", pa.table(columns))
    with pytest.raises(ConfigError, match=r"'who' of type .*uuid.* cannot be written to JSONL"):
        check(load_pipeline(path))


def test_the_form_of_an_output_stays_what_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "job", ("jsonl", "none"))
    run_in_process(load_job(path))
    for override in ("output.format=arrow", "output.compression=gzip"):
        others = [override] if "gzip" in override else [override, "output.compression=none"]
        with pytest.raises(LedgerError, match=override.partition("=")[0]):
            run_in_process(load_job(path, *others))
    other = write(tmp_path / "other", ("arrow", "zstd"))
    run_in_process(load_job(other))
    assert run_in_process(load_job(other, "output.compression=none")).already_complete


@pytest.mark.parametrize(
    ("form", "compression"), [("jsonl", "snappy"), ("jsonl", "lz4"), ("arrow", "gzip")]
)
def test_a_compression_that_a_form_lacks_is_told(
    tmp_path: Path, form: str, compression: str
) -> None:
    path = write_job(tmp_path, ["a"], output={"format": form, "compression": compression})
    with pytest.raises(ConfigError, match=rf"output.*found {compression} and {form}; expected one"):
        load_pipeline(path)


@FORMS
def test_two_thousand_columns_of_any_name_pass_through(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    folder = tmp_path / "job"
    path = write(folder, form, samples=1)
    names = [f"c.{n} {{{{x}}}}" for n in range(2000)]
    wide = pa.table(
        {"id": ["row0", "row1"], "topic": ["a", "b"], **{name: [name, None] for name in names}}
    )
    set_source(folder, wide)
    run_in_process(load_job(path))
    assert table_of(folder).select(names).equals(wide.select(names))


def test_lines_of_an_output_are_rows_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    run_in_process(load_job(write(folder, ("jsonl", "none"))))
    first = (folder / "out/data/part-00000.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in first]
    assert [(row["id"], row["sample"]) for row in rows] == [
        (f"row{n}", sample) for n in range(4) for sample in range(2)
    ]
    assert rows[0]["price"] == "1.50"
    assert rows[0]["raw"] == "/w=="
