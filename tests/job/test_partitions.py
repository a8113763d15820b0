"""Partitions: the rows of `data/` once more in folders by their values, each once, proven."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
import yaml
from click.testing import CliRunner

import eagle_batch
from eagle_batch.cli import main
from eagle_batch.errors import ConfigError, LedgerError
from eagle_batch.job import partitions
from eagle_batch.job.ledger import latest, read_records
from eagle_batch.job.lock import EXPIRY_S
from eagle_batch.job.store import LocalStore, open_store
from eagle_batch.job.verify import verify
from eagle_batch.report.write import write_reports
from tests.job.fake_job import Watch, load_job, run_in_process, write_job
from tests.job.support import QUICK, Dying
from tests.job.test_formats import FORMS, OUTPUTS, table_of, write

#: A span of one shard, and one that takes all of them.
SPANS = pytest.mark.parametrize("bytes_of_a_span", [1, 1 << 30])
#: Values that are dots in the end, or seem to be.
DOTS = [".", "..", "...", "a.", "a..", "a", "a%2E", "a.%2E", "1.", ".a", "a. ", "%"]
ODD = ["a", "", "x/y", "é\0 😀", "1", None, "a=b", "%41", ".", "..", "a b+c:d&?*", "שלום"]


def job_by(folder: Path, columns: Any, topics: list[Any], **fields: Any) -> Path:
    """A job whose rows are partitioned; the pipeline file."""
    output = {"partition_by": columns} | fields.pop("output", {})
    return write_job(folder, topics, output=output, **fields)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out/by").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Every object of the partitions, and the records of them."""
    out = folder / "out"
    files = [*(out / "by").rglob("*.*"), *(out / "_job/partitions").rglob("*.json")]
    return {str(file.relative_to(out)): file.read_bytes() for file in files if file.is_file()}


def check_on_a_store(url: str, folder: Path) -> None:
    """A job into a store, with keys that a URL has to encode once more; read back, and proven."""
    job = load_job(job_by(folder, ["topic", "sample"], ODD[:5] + ODD[6:], output={"path": url}))
    run_in_process(job)
    report = verify(url)
    assert report.ok, report.findings
    assert report.partitions == "by/: 22 rows in 22 partitions, 22 objects"
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    columns = pa.schema([("topic", pa.string()), ("sample", pa.int32())])
    hive = pyarrow.dataset.partitioning(columns, flavor="hive")
    found = pyarrow.dataset.dataset(f"{root}/by", filesystem=fs, partitioning=hive).to_table()
    wanted = eagle_batch.read(url).to_arrow()
    order = [("n", "ascending"), ("sample", "ascending")]
    assert found.select(wanted.column_names).sort_by(order).equals(wanted)
    run_in_process(job, watch := Watch())
    assert watch.lines == []


def read_back(folder: Path, columns: list[str], ending: str = "parquet") -> pa.Table:
    """The partitions as a reader that knows the types of their columns sees them, in order."""
    whole = table_of(folder)
    types = pa.schema([whole.schema.field(name) for name in columns])
    found = pyarrow.dataset.dataset(
        folder / "out/by",
        format=ending,
        partitioning=pyarrow.dataset.partitioning(types, flavor="hive"),
    ).to_table()
    return found.select(whole.column_names).sort_by([("n", "ascending"), ("sample", "ascending")])


@SPANS
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_the_partitions_hold_the_rows_of_data_whatever_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, bytes_of_a_span: int
) -> None:
    monkeypatch.setattr(partitions, "SPAN_BYTES", bytes_of_a_span)
    stages = [{"name": "one", "prompt": "ask {{ n }}", "sampling": {"max_tokens": 3}}]
    output = {"format": ending}
    run_in_process(load_job(job_by(tmp_path, ["topic"], ODD, output=output, stages=stages)))
    assert read_back(tmp_path, ["topic"], ending).equals(table_of(tmp_path))
    assert len(folders(tmp_path)) == len(ODD)
    assert "topic=__HIVE_DEFAULT_PARTITION__" in folders(tmp_path)
    assert "topic=x%2Fy" in folders(tmp_path)
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert report.partitions == "by/: 24 rows in 12 partitions, 12 objects"


def test_no_folder_ends_with_a_dot_and_values_that_do_read_back(tmp_path: Path) -> None:
    run_in_process(load_job(job_by(tmp_path, ["topic"], DOTS)))
    assert len(folders(tmp_path)) == len(DOTS)
    assert [name for name in folders(tmp_path) if name.endswith(".")] == []
    assert {"topic=%2E", "topic=.%2E", "topic=a%2E"} < {*folders(tmp_path)}
    assert read_back(tmp_path, ["topic"]).equals(table_of(tmp_path))
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    sql = "select distinct topic from read_parquet('{}', hive_partitioning=true)"
    found = duckdb.connect().execute(sql.format(where := f"{tmp_path}/out/by/*/*.parquet"))
    assert {row[0] for row in found.fetchall()} == {*DOTS}
    assert {*pl.scan_parquet(where, hive_partitioning=True).collect()["topic"]} == {*DOTS}


def test_rows_of_one_value_follow_each_other_as_in_the_input(tmp_path: Path) -> None:
    run_in_process(load_job(job_by(tmp_path, "topic", ["a", "b", "a"] * 4)))
    assert folders(tmp_path) == ["topic=a", "topic=b"]
    [file] = (tmp_path / "out/by/topic=a").iterdir()
    assert file.name == "part-00000.parquet"
    whole = table_of(tmp_path).to_pylist()
    wanted = [(row["id"], row["sample"]) for row in whole if row["topic"] == "a"]
    found = pyarrow.parquet.ParquetFile(file).read()
    assert [(row["id"], row["sample"]) for row in found.to_pylist()] == wanted
    assert "topic" not in found.column_names


@pytest.mark.parametrize(
    "values",
    [
        pa.array([dt.date(2024, 5, n % 3 + 1) for n in range(12)]),
        pa.array([dt.date(2024, 5, n % 3 + 1) for n in range(12)], pa.date64()),
        pa.array([1, None, 1_700_000_000_123_456_789] * 4, pa.timestamp("ns", "Europe/Berlin")),
        pa.array([0, 1, 2] * 4, pa.timestamp("s")),
        pa.array([True, False, None] * 4),
        pa.array([-5, 2**62, None] * 4, pa.int64()),
        pa.array(["x", None, "y/z"] * 4, pa.large_string()),
    ],
    ids=lambda values: str(values.type),
)
def test_values_of_each_type_read_back(tmp_path: Path, values: pa.Array) -> None:
    path = job_by(tmp_path, "value", ["t"] * 12)
    rows = pyarrow.parquet.read_table(tmp_path / "in.parquet")
    pyarrow.parquet.write_table(rows.append_column("value", values), tmp_path / "in.parquet")
    run_in_process(load_job(path))
    assert len(folders(tmp_path)) == len(values.unique())
    assert read_back(tmp_path, ["value"]).equals(table_of(tmp_path))
    assert verify(str(tmp_path / "out")).ok


def test_dictionaries_and_several_columns_and_columns_of_any_name(tmp_path: Path) -> None:
    columns = ["kind", "a.b c", "sample"]
    path = write(tmp_path / "job", ("arrow", "zstd"))
    document = yaml.safe_load(path.read_text())
    document["output"]["partition_by"] = columns
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    whole = table_of(tmp_path / "job")
    keys = whole.select(columns).to_pylist()
    files = sorted((tmp_path / "job/out/by").rglob("*.arrow"))
    assert len(files) == len({tuple(key.values()) for key in keys})
    assert all(re.search(r"/kind=\w+/a\.b%20c=[^/]*/sample=\d/part-", str(f)) for f in files)
    ids = [pa.ipc.open_file(file.read_bytes()).read_all()["id"].to_pylist() for file in files]
    assert sorted(itertools.chain(*ids)) == sorted(whole["id"].to_pylist())
    assert verify(str(tmp_path / "job/out")).ok


@FORMS
def test_partitions_come_in_every_form_and_other_readers_know_the_folders(
    tmp_path: Path, form: tuple[str, str]
) -> None:
    folder = tmp_path / "job"
    path = write(folder, form)
    document = yaml.safe_load(path.read_text())
    document["output"]["partition_by"] = "topic"
    path.write_text(yaml.safe_dump(document))
    run_in_process(load_job(path))
    files = [file for file in (folder / "out/by").rglob("*.*") if file.is_file()]
    assert all(file.name.endswith(OUTPUTS[form]) for file in files)
    assert verify(str(folder / "out")).ok
    wanted = sorted(
        (row["id"], row["sample"], row["topic"], row["two"]) for row in table_of(folder).to_pylist()
    )
    sql = "select id, sample, topic, two from {}('{}', hive_partitioning=true)"
    where = f"{folder}/out/by/*/*{OUTPUTS[form]}"
    if form[0] == "arrow":  # Which DuckDB does not read; see above.
        return
    found = duckdb.connect().execute(sql.format(f"read_{form[0].removesuffix('l')}", where))
    assert sorted(found.fetchall()) == wanted
    if form[0] == "parquet":
        frame = pl.scan_parquet(where, hive_partitioning=True).collect()
        assert sorted(frame.select("id", "sample", "topic", "two").rows()) == wanted


@SPANS
@pytest.mark.parametrize("form", [("parquet", "zstd"), ("jsonl", "gzip")], ids=lambda form: form[0])
def test_a_death_at_any_put_leaves_what_a_resume_makes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, str], bytes_of_a_span: int
) -> None:
    """The job is made once; each time the partitions are begun anew, and cut off one put later."""
    monkeypatch.setattr(partitions, "SPAN_BYTES", bytes_of_a_span)
    fields = {"output": {"format": form[0], "compression": form[1]}}
    path = write_job(tmp_path, ["a", "b", "a/b", "b"] * 3, **fields)
    run_in_process(load_job(path))
    out, by = tmp_path / "out", ("output.partition_by=[topic, sample]",)
    wanted: dict[str, bytes] = {}
    puts = 0
    while True:
        for key in contents(tmp_path) if (out / "by").exists() else ():
            (out / key).unlink()
        dying = Dying(str(out), puts, ("by/", "_job/partitions/"))
        try:
            run_in_process(load_job(path, *by), store=dying)
        except KeyboardInterrupt:
            assert not verify(str(out)).ok or puts == 0
            run_in_process(load_job(path, *by))
        else:
            break
        wanted = wanted or contents(tmp_path)
        assert contents(tmp_path) == wanted
        assert verify(str(out)).ok
        puts += 1
    assert puts == len(wanted) == (3 if bytes_of_a_span == 1 else 1) * 7
    assert contents(tmp_path) == wanted


class Slow(LocalStore):
    """A store whose every request takes a good part of the time after which the lock is lost."""

    def __init__(self, root: str) -> None:
        super().__init__(root, QUICK, lambda s: None)
        self.now = self.tended = 0.0

    def tend(self) -> None:
        assert self.now - self.tended < EXPIRY_S
        self.tended = self.now

    def get(self, key: str) -> bytes | None:
        self.now += 50.0
        return super().get(key)

    def list(self, prefix: str) -> dict[str, int]:
        self.now += 50.0
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self.now += 50.0
        super().delete(key)

    def put_new(self, key: str, data: bytes) -> bool:
        self.now += 50.0
        return super().put_new(key, data)


@SPANS
def test_the_lock_is_tended_all_the_while_on_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_of_a_span: int
) -> None:
    """Old partitions, of a shard each, are read, deleted, and made by another column."""
    monkeypatch.setattr(partitions, "SPAN_BYTES", 1)
    path = job_by(tmp_path, "id", ["a", "b"] * 6)
    run_in_process(load_job(path))
    monkeypatch.setattr(partitions, "SPAN_BYTES", bytes_of_a_span)
    slow = Slow(str(tmp_path / "out"))
    output = load_job(path, "output.partition_by=[topic]").pipeline.output
    commits = [*latest(read_records(slow)).values()]
    slow.tended = slow.now
    partitions.Partitioner(slow, output, commits).write(slow.tend, Watch().say)
    slow.tend()
    assert read_back(tmp_path, ["topic"]).equals(table_of(tmp_path))
    assert verify(str(tmp_path / "out")).ok


def test_objects_of_shards_that_were_taken_together_otherwise_are_ours_and_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "SPAN_BYTES", 1)
    path = job_by(tmp_path, "topic", ["a", "b"] * 6)
    run_in_process(load_job(path))
    (tmp_path / "out/by/topic=a/part-00009.parquet").write_bytes(b"mine")
    monkeypatch.setattr(partitions, "SPAN_BYTES", 1 << 30)
    found = {
        each.where: (each.kind, each.message) for each in verify(str(tmp_path / "out")).findings
    }
    records = [f"_job/partitions/part-0000{n}.json" for n in range(3)]
    stranger = "by/topic=a/part-00009.parquet"
    assert list(found) == [*records, stranger]
    assert [found[each][0] for each in records] == ["mismatch", "foreign", "foreign"]
    assert "so; what it tells of in by/ is stale; run the job again" in found[records[1]][1]
    assert found[stranger] == ("foreign", "this job did not write it")
    (tmp_path / "out" / stranger).unlink()
    run_in_process(load_job(path))
    assert verify(str(tmp_path / "out")).ok


def test_a_complete_output_gets_partitions_others_and_none(tmp_path: Path) -> None:
    """What was made stays as it is; no worker starts."""
    path = write_job(tmp_path, ["a", "b", "c"] * 4)
    run_in_process(load_job(path))
    data = {file: file.read_bytes() for file in (tmp_path / "out/data").iterdir()}
    watch = Watch()
    run_in_process(load_job(path, "output.partition_by=topic"), watch)
    assert watch.lines == ["writing partitions by topic"]
    first = contents(tmp_path)
    assert run_in_process(load_job(path, "output.partition_by=topic"), watch).already_complete
    assert len(watch.lines) == 1
    run_in_process(load_job(path, "output.partition_by=n"))
    assert len(folders(tmp_path)) == 12 + 3  # The folders of a disk stay, without files.
    assert read_back(tmp_path, ["n"]).equals(table_of(tmp_path))
    run_in_process(load_job(path))
    assert verify(str(tmp_path / "out")).ok
    run_in_process(load_job(path, "output.partition_by=topic"))
    assert contents(tmp_path) == first
    assert {file: file.read_bytes() for file in (tmp_path / "out/data").iterdir()} == data


def test_a_shard_that_was_lost_and_made_again_renews_its_partitions(tmp_path: Path) -> None:
    path = job_by(tmp_path, "topic", ["a", "b", "c"] * 4)
    run_in_process(load_job(path))
    (tmp_path / "out/data/part-00001.parquet").unlink()
    run_in_process(load_job(path, "output.partition_by=[]", "output.compression=none"))
    [finding] = verify(str(tmp_path / "out")).findings
    assert (finding.kind, finding.where) == ("mismatch", "_job/partitions/part-00000.json")
    run_in_process(load_job(path))
    assert verify(str(tmp_path / "out")).ok
    assert read_back(tmp_path, ["topic"]).equals(table_of(tmp_path))


def test_partitions_are_made_of_what_is_left_without_duplicates(tmp_path: Path) -> None:
    path = job_by(tmp_path, "topic", ["a", "b", "a", "c"] * 3, deduplicate={"column": "topic"})
    run_in_process(load_job(path))
    assert read_back(tmp_path, ["topic"]).equals(table_of(tmp_path))
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.findings
    assert report.partitions == "by/: 3 rows in 3 partitions, 3 objects"


def _lose(out: Path) -> str:
    (out / "by/topic=a/part-00000.parquet").unlink()
    return "missing: by/topic=a/part-00000.parquet"


def _add(out: Path) -> str:
    """A copy that nothing tells of: its rows would be there twice."""
    copy = out / "by/topic=b/part-00009.parquet"
    copy.write_bytes((out / "by/topic=b/part-00000.parquet").read_bytes())
    return "foreign: by/topic=b/part-00009.parquet"


def _swap(out: Path) -> str:
    """The file of another folder, with a record that fits it."""
    place, other = (out / f"by/topic={each}/part-00000.parquet" for each in "ab")
    place.write_bytes(other.read_bytes())
    record = out / "_job/partitions/part-00000.json"
    document = json.loads(record.read_text())
    first, second = document["parts"][:2]
    document["parts"][0] = second | {"key": first["key"]}
    record.write_text(json.dumps(document))
    return "mismatch: by/topic=a/part-00000.parquet"


def _forget(out: Path) -> str:
    """No record, no file: a folder's rows are hidden."""
    (out / "by/topic=a/part-00000.parquet").unlink()
    record = out / "_job/partitions/part-00000.json"
    document = json.loads(record.read_text())
    record.write_text(json.dumps(document | {"parts": document["parts"][1:]}))
    return "lost: _job/partitions/part-00000.json"


def _tear(out: Path) -> str:
    (out / "_job/partitions/part-00000.json").write_text('{"columns": ')
    return "damaged: _job/partitions/part-00000.json"


@pytest.mark.parametrize("harm", [_lose, _add, _swap, _forget, _tear])
def test_harm_to_the_partitions_is_found(harm: Callable[[Path], str], tmp_path: Path) -> None:
    run_in_process(load_job(job_by(tmp_path, "topic", ["a", "b", "c"] * 4)))
    wanted = harm(tmp_path / "out")
    report = verify(str(tmp_path / "out"))
    assert not report.ok
    assert str(report.findings[0]).startswith(wanted)
    assert report.rows_out == 24


def test_files_of_others_are_refused_before_anything_is_put(tmp_path: Path) -> None:
    path = write_job(tmp_path, ["a", "b"] * 6)
    run_in_process(load_job(path))
    stranger = tmp_path / "out/by/topic=z/mine.parquet"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"mine")
    with pytest.raises(LedgerError, match=r"by/topic=z/mine\.parquet, which this job did not"):
        run_in_process(load_job(path, "output.partition_by=topic"))
    assert contents(tmp_path) == {"by/topic=z/mine.parquet": b"mine"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 300, r"found 'x{40}'\.\.\. in row 'row7': the name of its folder has 306 bytes"),
        ("日" * 40, r"in row 'row7': the name of its folder has 366 bytes"),
        ("__HIVE_DEFAULT_PARTITION__", r"in row 'row7': that is how the folder of nulls is named"),
    ],
)
def test_a_value_that_is_no_folder_s_name_is_told_and_the_rows_are_kept(
    tmp_path: Path, value: str, text: str
) -> None:
    topics = ["a"] * 12
    topics[7] = value
    path = job_by(tmp_path, "topic", topics)
    with pytest.raises(ConfigError, match="output.partition_by: column 'topic': .*" + text):
        run_in_process(load_job(path))
    assert not (tmp_path / "out/by").exists()
    assert verify(str(tmp_path / "out")).ok
    assert table_of(tmp_path).num_rows == 24
    assert run_in_process(load_job(path, "output.partition_by=[]")).already_complete


def test_too_many_values_are_told_with_the_column_before_anything_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MOST_FOLDERS", 7)
    path = job_by(tmp_path, ["id", "sample"], ["a"] * 12)
    with pytest.raises(ConfigError, match=r"'id' 4, 'sample' 2; expected at most 7 folders"):
        run_in_process(load_job(path))
    assert not (tmp_path / "out/by").exists()
    assert verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["topc"], "'topc', which is no column; did you mean 'topic'"),
        (["generation"], "'generation', a column of list<"),
        (["topic", "topic"], "'topic' twice"),
        (["a", "b", "c", "d"], "output.partition_by"),
        ([3], "output.partition_by"),
    ],
)
def test_columns_that_cannot_partition_are_refused_before_the_job(
    tmp_path: Path, columns: list[Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=r"output\.partition_by") as caught:
        load_job(job_by(tmp_path, columns, ["a"]))
    assert text in str(caught.value)


def test_what_reads_an_output_reads_data_and_the_card_tells_of_partitions(tmp_path: Path) -> None:
    run_in_process(load_job(job_by(tmp_path, "topic", ["a", "b", "c"] * 4)))
    out = str(tmp_path / "out")
    assert eagle_batch.read(out).to_arrow().num_rows == 24
    result = CliRunner().invoke(main, ["verify", out])
    assert result.exit_code == 0, result.output
    assert "by/: 24 rows in 3 partitions, 3 objects" in result.output
    write_reports(open_store(out))
    card = (tmp_path / "out/README.md").read_text("utf-8")
    assert "by `topic`, in `by/`" in card
    assert "by/*" not in card.partition("\n---\n")[0]


def test_shards_are_taken_together_up_to_a_size(tmp_path: Path) -> None:
    path = write_job(tmp_path, [f"t{n % 2}" for n in range(40)])
    run_in_process(load_job(path))
    commits = list(latest(read_records(open_store(str(tmp_path / "out")))).values())
    for most in (1, 20_000, 40_000, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partitions, "SPAN_BYTES", most)
            taken = [list(span.shards) for span in partitions.spans(commits[::-1])]
        assert [*itertools.chain(*taken)] == sorted(commit.key for commit in commits)
        sizes = {commit.key: commit.data_bytes for commit in commits}
        for span, after in itertools.pairwise(taken):
            assert sum(sizes[key] for key in span) <= most or len(span) == 1
            assert sum(sizes[key] for key in (*span, after[0])) > most
