"""Duplicates and contaminated rows: what is left depends on the plan alone, and is proven."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.data.contamination import Contamination
from eagle_batch.data.words import words
from eagle_batch.errors import ConfigError
from eagle_batch.job.job import JobResult
from eagle_batch.job.replay import replay
from eagle_batch.job.status import read_status
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import Decontaminate, load_pipeline
from eagle_batch.stages.duplicates import SIGNATURE, Alike, Same, bands
from tests.job.fake_job import CrashError, load_job, read_errors, run_in_process, write_job
from tests.job.support import Dying
from tests.stages.test_graph import rows, stage

#: The texts are the topics themselves: `one` is what is compared, and follows from nothing else.
TOPICS = ["a", "b", "a", "c", "b", "d", "a", "e", "f", "c", "g", "a"]
LAST = [8, 9, 10]


def write(folder: Path, topics: list[str] = TOPICS, **fields: Any) -> Path:
    fields = {"deduplicate": {"column": "topic"}, "samples": 1} | fields
    return write_job(folder, topics, stages=[stage("one")], **fields)


def kept(folder: Path) -> list[str]:
    return [row["id"] for row in rows(folder)]


def first_of_each(topics: list[str]) -> list[str]:
    """The oracle: the first row of every topic, in the order of the input."""
    return [f"row{n}" for n, topic in enumerate(topics) if topic not in topics[:n]]


def test_the_first_row_of_each_group_is_kept_and_the_others_are_listed(tmp_path: Path) -> None:
    result = run_in_process(load_job(write(tmp_path)))
    assert kept(tmp_path) == first_of_each(TOPICS)
    errors = read_errors(tmp_path / "out")
    assert {error["reason"] for error in errors} == {"duplicate"}
    assert [error["id"] for error in errors] == ["row2", "row4", "row6", "row9", "row11"]
    assert errors[1]["message"] == "topic repeats that of id 'row1', sample 0"
    assert json.loads(errors[0]["row"])["one"]
    assert (result.rows, result.quarantined, result.dropped) == (7, 0, 5)


def test_what_is_kept_does_not_depend_on_the_shards_or_the_workers(tmp_path: Path) -> None:
    for rows_per_shard, size in ((1, 1), (5, 2), (100, 1)):
        folder = tmp_path / f"{rows_per_shard}"
        path = write(folder, output={"rows_per_shard": rows_per_shard})
        run_in_process(load_job(path), size=size)
        assert kept(folder) == first_of_each(TOPICS)


def test_an_output_without_duplicates_proves_itself_and_knows_its_state(tmp_path: Path) -> None:
    run_in_process(load_job(write(tmp_path)))
    report = verify(str(tmp_path / "out"))
    assert report.findings == ()
    assert (report.rows_in, report.rows_out, report.dropped) == (12, 7, 5)
    assert report.ok
    status = read_status(str(tmp_path / "out"))
    assert (status.state, status.rows, status.dropped) == ("complete", 7, 5)


def test_a_second_start_finds_everything_done(tmp_path: Path) -> None:
    job = load_job(write(tmp_path))
    first = run_in_process(job)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.parquet")}
    again = run_in_process(job)
    assert again.already_complete
    assert (again.rows, again.dropped) == (first.rows, first.dropped)
    assert {path: path.stat().st_mtime_ns for path in before} == before


FOLDERS = ("data/", "errors/", "_job/finished/")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for name in ("data", "errors") for path in (folder / name).rglob("*.parquet")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_death_at_any_put_of_the_last_pass_changes_nothing(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    run_in_process(load_job(whole))
    wanted = rows(tmp_path / "whole"), read_errors(tmp_path / "whole/out")
    puts = 0
    while True:
        folder = tmp_path / f"dead{puts}"
        path = write(folder)
        dying = Dying(str(folder / "out"), puts, FOLDERS)
        try:
            run_in_process(load_job(path), store=dying)
        except KeyboardInterrupt:
            assert read_status(str(folder / "out")).state == "stopped"
        else:
            break
        run_in_process(load_job(path))
        assert _without_model(rows(folder)) == _without_model(wanted[0])
        assert read_errors(folder / "out") == wanted[1]
        assert verify(str(folder / "out")).ok
        puts += 1
    assert puts == 3 * 2 + 1


def _without_model(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name != "model"} for row in found]


def test_a_crash_of_a_worker_changes_nothing(tmp_path: Path) -> None:
    def sabotage(worker: int, pump: int) -> None:
        if worker == 0 and pump == 2:
            raise CrashError

    run_in_process(load_job(write(tmp_path)), sabotage=sabotage)
    assert kept(tmp_path) == first_of_each(TOPICS)
    assert verify(str(tmp_path / "out")).ok


def _lose_a_shard(output: Path) -> None:
    (output / "data/part-00001.parquet").unlink()


def _hide_a_row(output: Path) -> None:
    """Put the shard back as it would be had a duplicate been kept."""
    shutil.copy(output / "raw/data/part-00000.parquet", output / "data/part-00000.parquet")


def _lose_a_raw_shard(output: Path) -> None:
    (output / "raw/data/part-00002.parquet").unlink()


@pytest.mark.parametrize(
    ("harm", "where"),
    [
        (_lose_a_shard, "data/part-00001.parquet"),
        (_hide_a_row, "data/part-00000.parquet"),
        (_lose_a_raw_shard, "raw/data/part-00002.parquet"),
    ],
)
def test_harm_to_either_layer_is_found(
    harm: Callable[[Path], None], where: str, tmp_path: Path
) -> None:
    run_in_process(load_job(write(tmp_path)))
    harm(tmp_path / "out")
    report = verify(str(tmp_path / "out"))
    assert not report.ok
    assert where in {finding.where for finding in report.findings}


def test_drops_do_not_count_as_errors_and_are_not_replayed(tmp_path: Path) -> None:
    """Half of the rows go, far more than limits.max_error_rate."""
    path = write(tmp_path, ["a"] * 12, limits={"max_error_rate": 0.0})
    result: JobResult = run_in_process(load_job(path))
    assert (result.rows, result.quarantined, result.dropped) == (1, 0, 11)
    assert replay(load_pipeline(path)) is None


def test_rows_dropped_by_a_validator_do_not_stop_the_job(tmp_path: Path) -> None:
    validators = [{"expression": "n % 3 == 0"}]
    stages = [stage("one", validators=validators, otherwise="drop")]
    path = write_job(tmp_path, TOPICS, stages=stages, limits={"max_error_rate": 0.0})
    result = run_in_process(load_job(path))
    assert (result.rows, result.quarantined, result.dropped) == (8, 0, 16)
    assert result.metrics is not None
    assert result.metrics["validators"] == {"one.0.expression": {"passed": 8, "failed": 16}}
    assert verify(str(tmp_path / "out")).dropped == 16


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"column": "topc"}, "did you mean 'topic'?"),
        ({"column": "n"}, "a column of int64"),
        ({"column": "generation"}, "expected one of topic, one"),
        ({"column": "topic", "method": "magic"}, "'exact' or 'minhash'"),
        ({"column": "topic", "threshold": 2}, "at most 1"),
    ],
)
def test_a_column_that_cannot_be_compared_is_refused(
    section: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="deduplicate") as caught:
        load_job(write(tmp_path, deduplicate=section))
    assert text in str(caught.value)


@given(st.lists(st.sampled_from(["", "a", "b", "a b", "A"]), max_size=20))
def test_same_is_equality(texts: list[str]) -> None:
    same, distinct = Same(), list[str]()
    for text in texts:
        wanted = distinct.index(text) if text in distinct else None
        assert same.add(text) == wanted
        if wanted is None:
            distinct.append(text)


def jaccard(a: str, b: str) -> float:
    sets = [
        {tuple(w[n : n + 5]) for n in range(len(w) - 4)} or {tuple(w)} for w in (words(a), words(b))
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 10**6))
def test_alike_is_close_to_the_true_share_of_runs(changed: int, seed: int) -> None:
    """Texts of 200 words, some replaced: far from the threshold, the estimate cannot be wrong."""
    base = [f"w{seed + n}" for n in range(200)]
    other = [f"x{n}" if n * 7 % 200 < changed else word for n, word in enumerate(base)]
    alike, true = Alike(0.7), jaccard(" ".join(base), " ".join(other))
    alike.add(" ".join(base))
    found = alike.add(" ".join(other))
    if abs(true - 0.7) > 0.17:  # four standard errors of 128 numbers
        assert (found == 0) == (true > 0.7)


def test_near_duplicates_are_taken_out_of_a_job(tmp_path: Path) -> None:
    base = " ".join(f"word{n}" for n in range(120))
    topics = [base, "something else", base + " more", base.upper(), "something other"]
    path = write(tmp_path, topics, deduplicate={"column": "topic", "method": "minhash"})
    run_in_process(load_job(path))
    assert kept(tmp_path) == ["row0", "row1", "row4"]
    assert verify(str(tmp_path / "out")).ok


@pytest.mark.parametrize("alike", [0.3, 0.5, 0.7, 0.9])
def test_the_bands_find_most_pairs_of_the_threshold(alike: float) -> None:
    b = bands(alike - 0.1)
    assert 1 - (1 - alike ** (SIGNATURE // b)) ** b > 0.8


def benchmark(folder: Path, *texts: str | None) -> Path:
    path = folder / "benchmark.parquet"
    pq.write_table(pa.table({"question": list(texts)}), path)
    return path


TEST_TEXT = "How many apples does Ann have left when she gives two of her five to Bob today?"


def section(path: Path, ngram: int = 5) -> Decontaminate:
    values = {"stages": "one", "against": [str(path)], "column": "question", "ngram": ngram}
    return Decontaminate.model_validate(values)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So: how MANY apples -- does Ann, have?", "how many apples does ann"),
        ("how many apples does Bob have", None),
        ("apples does ann have", None),
        ("", None),
        ("今天有多少人", "今 天 有 多 少"),
    ],
)
def test_a_run_of_words_is_found_whatever_stands_between(
    text: str, found: str | None, tmp_path: Path
) -> None:
    known = Contamination(section(benchmark(tmp_path, TEST_TEXT, None, "short", "今天有多少。")))
    assert known.find(text) == found


def test_contaminated_rows_are_left_out_and_the_files_belong_to_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    stages = [
        {"name": "one", "prompt": "{{ topic }}", "sampling": {"max_tokens": 3}},
    ]
    plain = write_job(folder, TOPICS, stages=stages, samples=1)
    run_in_process(load_job(plain))
    made = {row["id"]: row["one"] for row in rows(folder)}
    bad = {made["row3"], made["row5"]}
    path = benchmark(tmp_path, *bad)
    other = tmp_path / "other"
    decontaminate = section(path, 1).model_dump(mode="json")
    job = load_job(write_job(other, TOPICS, stages=stages, samples=1, decontaminate=decontaminate))
    result = run_in_process(job)
    lost = [error["id"] for error in read_errors(other / "out")]
    assert lost == [name for name, text in made.items() if text in bad]
    assert {error["reason"] for error in read_errors(other / "out")} == {"contaminated"}
    assert result.dropped == len(lost)
    assert verify(str(other / "out")).ok
    benchmark(tmp_path, "another text")
    changed = load_job(other / "pipeline.yaml")
    with pytest.raises(Exception, match=r"decontaminate.against/benchmark.parquet changed"):
        run_in_process(changed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stages": "two"}, "decontaminate.stages: found two; expected stages: one"),
        ({"against": "gone.parquet"}, "decontaminate.against"),
        ({"column": "text"}, "has no column 'text'"),
        ({"ngram": 50}, "lower decontaminate.ngram"),
    ],
)
def test_what_cannot_be_compared_with_is_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    values = section(benchmark(tmp_path, TEST_TEXT)).model_dump(mode="json") | changes
    with pytest.raises(ConfigError) as caught:
        load_job(write(tmp_path, deduplicate=None, decontaminate=values))
    assert text in str(caught.value)
