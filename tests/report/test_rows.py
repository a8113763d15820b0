"""`show` finds the rows that were asked for, and refuses what it does not understand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from eagle_batch.cli import main
from eagle_batch.errors import ConfigError
from eagle_batch.job.store import Store
from eagle_batch.report.measures import measures, with_measures
from eagle_batch.report.where import filter_rows, parse_where
from tests.report.finished import finished

ROWS = [
    {"id": "a", "n": 1, "topic": "sun", "x.y": 1.5, "maybe": None},
    {"id": "b", "n": 2, "topic": "sunset", "x.y": 2.5, "maybe": "here"},
    {"id": "c", "n": 3, "topic": "moon", "x.y": 3.5, "maybe": ""},
]
TABLE = pa.Table.from_pylist(ROWS)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("n == 2", "b"),
        ("n != 2", "ac"),
        ("1 < n <= 3", "bc"),
        ("n >= 2 and topic == 'moon'", "c"),
        ("n < 2 or not topic == 'sunset'", "ac"),
        ("(n == 1 or n == 2) and x.y > 2", "b"),
        ("topic in ['sun', 'moon']", "ac"),
        ("n not in (1, 2)", "c"),
        ("maybe is None", "a"),
        ("maybe is not None", "bc"),
        ("contains(topic, 'sun')", "ab"),
        ("startswith(topic, 'moo')", "c"),
        ("length(topic) > 3", "bc"),
        ('column("x.y") == 2.5', "b"),
        ("n > -1", "abc"),
    ],
)
def test_expressions_select_rows(text: str, ids: str) -> None:
    found = filter_rows(TABLE, parse_where(text, TABLE.column_names))
    assert "".join(found["id"].to_pylist()) == ids


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "n + 1 == 2",
        "n",
        "n == [1]",
        "n == None",
        "n is 3",
        "lambda: 1",
        "open('x') == 1",
        "n in topic",
        "topic.upper() == 'SUN'",
        "f'{n}' == '1'",
        "n ==",
        "",
    ],
)
def test_everything_else_is_refused_and_nothing_runs(text: str) -> None:
    with pytest.raises(ConfigError, match="--where: "):
        parse_where(text, TABLE.column_names)


def test_an_unknown_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match=r"found 'topik'.*did you mean 'topic'\?"):
        parse_where("topik == 'sun'", TABLE.column_names)


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="--where: cannot compare"):
        filter_rows(TABLE, parse_where("n == 'sun'", TABLE.column_names))


def generation(*items: tuple[int, int]) -> list[dict[str, Any]]:
    names = ("prompt_tokens", "drafted", "accepted")
    return [
        {"stage": stage, "completion_tokens": tokens, "target_passes": passes}
        | {"finish_reason": "eos"}
        | dict.fromkeys(names, 1)
        for stage, (tokens, passes) in zip(("one", "two"), items, strict=False)
    ]


def test_measures_are_of_each_stage_and_of_the_row() -> None:
    table = pa.table({"generation": [generation((6, 3), (4, 1)), generation((5, 0), (1, 1))]})
    found = measures(table["generation"].combine_chunks(), ["one", "two"])
    assert found["one.acceptance"].to_pylist() == [2.0, 5.0]
    assert found["two.tokens"].to_pylist() == [4, 1]
    assert found["tokens"].to_pylist() == [10, 6]
    assert found["acceptance"].to_pylist() == [2.5, 6.0]


def test_texts_that_were_not_kept_and_judges_count_for_their_row() -> None:
    """One row of two candidates and a judge, one where the stage was left out."""
    first, second = generation((6, 3), (4, 1))
    items = [
        first | {"kept": False, "finish_reason": "length"},
        first | {"completion_tokens": 5, "kept": True},
        first | {"stage": "one.0.judge", "completion_tokens": 1, "kept": False},
        second | {"kept": True},
    ]
    table = pa.table({"generation": [items, items[3:]]})
    found = measures(table["generation"].combine_chunks(), ["one", "two"])
    assert found["tokens"].to_pylist() == [16, 4]
    assert found["one.tokens"].to_pylist() == [11, 0]
    assert found["one.finish"].to_pylist() == ["eos", None]
    assert found["two.finish"].to_pylist() == ["eos", "eos"]


def test_a_column_of_the_data_keeps_its_name() -> None:
    table = pa.table({"tokens": ["mine"], "generation": [generation((6, 3))]})
    found = with_measures(table, ["one"])
    assert found["tokens"].to_pylist() == ["mine"]
    assert found["one.tokens"].to_pylist() == [6]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished(tmp_path_factory.mktemp("job"))


def show(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["show", store.root, *arguments])


def test_the_first_rows_are_shown_with_texts_and_numbers(store: Store) -> None:
    result = show(store, "-n", "1")
    assert result.exit_code == 0, result.output
    assert "row0  sample 0" in result.stdout
    assert "topic: tides" in result.stdout
    assert result.stdout.count("sample") == 1
    assert "finish" in result.stdout


def test_one_row_is_shown_with_all_its_samples(store: Store) -> None:
    result = show(store, "--row", "row4")
    assert [s in result.stdout for s in ("row4  sample 0", "row4  sample 1")] == [True, True]
    assert "row0" not in result.stdout


def test_rows_are_sorted_over_all_shards(store: Store) -> None:
    result = show(store, "--sort", "n", "--descending", "-n", "2")
    assert result.stdout.index("row4  sample 0") < result.stdout.index("row4  sample 1")
    assert "row3" not in result.stdout


def test_a_condition_that_no_row_meets_says_so(store: Store) -> None:
    result = show(store, "--where", "acceptance > 100")
    assert result.exit_code == 0
    assert "no such row among the 8" in result.stdout


@pytest.mark.parametrize("option", [("--sort", "beauty"), ("--where", "beauty > 1")])
def test_a_wrong_name_exits_2(store: Store, option: tuple[str, str]) -> None:
    result = show(store, *option)
    assert result.exit_code == 2
    assert f"{option[0]}: found 'beauty'" in result.stderr


def test_a_folder_without_a_job_exits_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["show", str(tmp_path)]).exit_code == 2
