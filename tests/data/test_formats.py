"""CSV, folders saved by `datasets`, data sets of the hub and files on web servers, as input."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.data.files import format_of
from eagle_batch.data.hub import card_configs, splits_by_name, splits_of_config
from eagle_batch.data.lines import Lines
from eagle_batch.data.sources import GroupReader
from eagle_batch.errors import DataError
from tests.data.fake_hub import COMMIT, Hub, hub
from tests.data.support import topics, write_jsonl
from tests.data.test_sources import read_all, surveyed

__all__ = ["hub"]  # a fixture

# -- CSV ---------------------------------------------------------------------------------------

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30))
@settings(deadline=None)
def test_csv_gives_the_cells_that_python_s_own_reader_gives(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([("a", "b"), *rows])
    (folder / "x.csv").write_text(text.getvalue(), encoding="utf-8", newline="")
    table = read_all(surveyed(folder, "x.csv"))
    oracle = list(csv.DictReader(io.StringIO(text.getvalue(), newline="")))
    assert [_as_printed(row) for row in table.to_pylist()] == oracle


def _as_printed(row: dict[str, Any]) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in row.items()}


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-20", "", "0"], pa.int64()),
        (["1.5", "2", "", "-0.25"], pa.float64()),
        (["007", "1"], pa.string()),
        (["1.50", "2"], pa.string()),
        (["1e5"], pa.string()),
        (["2024-01-01"], pa.string()),
        (["true", "false"], pa.string()),
        (["NA", "NaN", "null"], pa.string()),
        (["", ""], pa.string()),
        (["9999999999999999999"], pa.string()),
        (["0.1234567890123456789"], pa.string()),
    ],
)
def test_a_csv_column_holds_numbers_only_where_each_prints_as_it_is_written(
    tmp_path: Path, cells: list[str], kind: pa.DataType
) -> None:
    (tmp_path / "x.csv").write_text("a,b\n" + "".join(f"{cell},x\n" for cell in cells))
    table = read_all(surveyed(tmp_path, "x.csv"))
    assert table.schema.field("a").type == kind
    empty = "" if kind == pa.string() else None
    expected = [empty if cell == "" else cell for cell in cells]
    shown = (
        [value if value in {None, ""} else f"{value:g}" for value in table["a"].to_pylist()]
        if (kind != pa.string())
        else table["a"].to_pylist()
    )
    assert shown == expected


def test_csv_in_blocks_tabs_and_compression_give_the_same_rows(tmp_path: Path) -> None:
    rows = [(n, f'text "{n}"\nof two, lines') for n in range(3000)]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t").writerows([("id", "text"), *rows])
    (tmp_path / "x.tsv").write_text(text.getvalue(), newline="")
    (tmp_path / "y.tsv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    for name in ("x.tsv", "y.tsv.gz"):
        data = surveyed(tmp_path, name, output__rows_per_shard=1024)
        assert [group.rows for group in data.files[0].groups] == [1024, 1024, 952]
        assert [tuple(row.values()) for row in read_all(data).to_pylist()] == rows
    semicolons = text.getvalue().replace("\t", ";")
    (tmp_path / "z.csv").write_text(semicolons, newline="")
    table = read_all(surveyed(tmp_path, "z.csv", input__delimiter=";"))
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n4,5,6\n", "line 3: found 1 cells; expected 2, as the header has"),
        ('a,b\n1,2\n"3,4\n', "line 3: a quoted cell begins here and does not end"),
        ("a,a\n1,2\n", "more than one column is named 'a'"),
        ("a,b\n\xff,2\n", "cannot be read: "),
    ],
)
def test_a_bad_csv_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        surveyed(tmp_path, "x.csv")
    assert f"{tmp_path}/x.csv: {message}" in str(caught.value)


def test_csv_files_agree_on_the_wider_type(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,1\n")
    (tmp_path / "2.csv").write_text("b,a\n2.5,x\n")
    data = surveyed(tmp_path, "?.csv")
    assert read_all(data).to_pylist() == [{"a": "1", "b": 1.0}, {"a": "x", "b": 2.5}]


# -- compressed text in its order --------------------------------------------------------------


def test_blocks_of_a_compressed_file_are_read_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"id": n} for n in range(5000)])
    plain = (tmp_path / "x.jsonl").read_bytes()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(plain))
    data = surveyed(tmp_path, "x.jsonl.gz")
    opened: list[str] = []
    reopen = Lines._reopen

    def counting(self: Lines, path: str) -> None:
        opened.append(path)
        reopen(self, path)

    monkeypatch.setattr(Lines, "_reopen", counting)
    with GroupReader(data.schema, ["id"]) as reader:
        groups = range(len(data.files[0].groups))
        rows = [row for n in groups for row in reader.read(data.files[0], n)["id"].to_pylist()]
        assert rows == list(range(5000))
        assert len(opened) == 1
        assert reader.read(data.files[0], 0)["id"][0].as_py() == 0  # back again: from the beginning
        assert len(opened) == 2


# -- folders of `datasets` ---------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made = datasets.Dataset.from_dict(
        {"id": list(range(50)), "topic": [f"t{n}" for n in range(50)]}
    )
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    both = datasets.DatasetDict({"train": made, "test": made.select(range(5))})
    both.save_to_disk(str(tmp_path / "both"))
    return tmp_path


def test_a_saved_folder_gives_its_rows_in_order_and_nothing_of_its_cache(saved: Path) -> None:
    (saved / "one" / "cache-0123.arrow").write_bytes(b"not of the data set")
    table = read_all(surveyed(saved, "one"))
    assert table.to_pylist() == datasets.load_from_disk(str(saved / "one")).to_list()


def test_a_split_of_a_saved_folder_is_named(saved: Path) -> None:
    with pytest.raises(
        DataError, match=r"both: input.split: found no split; expected one of train, "
    ):
        surveyed(saved, "both")
    with pytest.raises(DataError, match=r"found 'tain'; did you mean 'train'\? expected one of"):
        surveyed(saved, "both", input__split="tain")
    assert read_all(surveyed(saved, "both", input__split="test")).num_rows == 5
    write_jsonl(saved / "x.jsonl", [{"id": 1}])
    with pytest.raises(
        DataError, match=r"input\.split: found 'test', but input\.path names no such"
    ):
        surveyed(saved, "x.jsonl", input__split="test")


def test_a_saved_selection_by_indices_is_refused_with_the_remedy(saved: Path) -> None:
    state = json.loads((saved / "one" / "state.json").read_text())
    state["_indices_files"] = [{"filename": "indices.arrow"}]
    (saved / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        DataError, match=r"one: holds its rows through a file of indices.*flatten_ind"
    ):
        surveyed(saved, "one")


# -- the hub -----------------------------------------------------------------------------------


def parquet_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: raw
  data_files: raw/*.jsonl
---
# Topics
"""


def test_a_hub_data_set_is_read_by_configuration_and_split_at_a_commit(
    tmp_path: Path, hub: Hub
) -> None:
    hub.repos["me/topics"] = {
        "README.md": CARD,
        "data/train-00000-of-00002.parquet": parquet_of(topics(4)),
        "data/train-00001-of-00002.parquet": parquet_of(topics(3)),
        "data/test-00000-of-00001.parquet": parquet_of(topics(2)),
        "raw/a.jsonl": b'{"id": 9, "topic": "raw"}\n',
    }
    path = "hf://datasets/me/topics"
    data = surveyed(tmp_path, path, input__split="train")
    assert read_all(data).to_pylist() == topics(4).to_pylist() + topics(3).to_pylist()
    assert all(f"me/topics@{COMMIT}/data/train-" in file.path for file in data.files)
    assert (
        read_all(surveyed(tmp_path, path, input__split="test", input__revision="main")).num_rows
        == 2
    )
    assert read_all(surveyed(tmp_path, path, input__config="raw")).to_pylist() == [
        {"id": 9, "topic": "raw"}
    ]
    one = surveyed(tmp_path, f"{path}/data/*-00000-of-*.parquet")
    assert [file.rows for file in one.files] == [2, 4]
    for changes, message in (
        ({}, "input.split: found no split; expected one of train, test"),
        (
            {"input__config": "ra"},
            "input.config: found 'ra'; did you mean 'raw'? expected one of default",
        ),
        ({"input__split": "train", "input__revision": "v9"}, "cannot be read: "),
    ):
        with pytest.raises(DataError) as caught:
            surveyed(tmp_path, path, **changes)
        assert message in str(caught.value)
    with pytest.raises(DataError, match="hf://datasets/me/nothing: cannot be read: "):
        surveyed(tmp_path, "hf://datasets/me/nothing")


@pytest.mark.parametrize(
    ("paths", "splits"),
    [
        (["a.parquet", "b/c.jsonl"], {"train": ["a.parquet", "b/c.jsonl"]}),
        (["README.md", "config.json", ".x.csv"], {}),
        (
            ["data/train-00000-of-00001.parquet", "data/dev_small-00000-of-00001.parquet"],
            {
                "train": ["data/train-00000-of-00001.parquet"],
                "dev_small": ["data/dev_small-00000-of-00001.parquet"],
            },
        ),
        (
            ["my_train_file.csv", "validation/a.csv", "x_eval.csv", "notes.csv"],
            {
                "train": ["my_train_file.csv"],
                "validation": ["validation/a.csv"],
                "test": ["x_eval.csv"],
            },
        ),
    ],
)
def test_splits_follow_the_names_of_files_where_the_card_has_none(
    paths: list[str], splits: dict[str, list[str]]
) -> None:
    assert splits_by_name(paths) == splits


def test_data_files_of_a_card_are_globs_lists_and_folders() -> None:
    paths = ["en/train/a.parquet", "en/b.parquet", "fr/a.parquet", "fr/x.txt"]
    assert splits_of_config({"data_files": "en/*.parquet"}, paths) == {"train": ["en/b.parquet"]}
    assert splits_of_config({"data_files": "**/a.parquet"}, paths) == {
        "train": [paths[0], paths[2]]
    }
    given = [{"split": "all", "path": ["fr/*.parquet", "en/b.parquet"]}]
    assert splits_of_config({"data_files": given}, paths) == {"all": [paths[2], paths[1]]}
    assert splits_of_config({"data_dir": "fr"}, paths) == {"train": ["fr/a.parquet"]}
    assert card_configs("# no front matter --- here ---") == []


# -- web servers -------------------------------------------------------------------------------


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_files_of_a_web_server_are_read_by_their_address(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", topics(3).to_pylist())
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    with web_server(tmp_path) as url:
        paths = [f"{url}/x.jsonl?token=1*2", f"{url}/y.jsonl.gz"]
        data = surveyed(tmp_path, paths)
        assert read_all(data).to_pylist() == topics(3).to_pylist() * 2
        with pytest.raises(DataError, match=r"\*\.jsonl: a web server lists no files"):
            surveyed(tmp_path, f"{url}/*.jsonl")
        with pytest.raises(DataError, match=r"z\.jsonl: no such file"):
            surveyed(tmp_path, f"{url}/z.jsonl")


def test_formats_by_name() -> None:
    names = {
        "a.csv": "csv",
        "a.TSV": "csv",
        "a.csv.zst": "csv",
        "a.jsonl.gz": "jsonl",
        "a.parquet.gz": None,
        "https://x/a.csv?b=c.parquet": "csv",
        "a": None,
    }
    assert {name: format_of(name) for name in names} == names
