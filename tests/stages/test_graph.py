"""A row's way through any graph of stages is what a plain reading of the file says it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_batch.job.reports import PumpReport
from eagle_batch.job.spec import WorkerSpec
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from tests.job.fake_engine import build_fake
from tests.job.fake_job import CrashError, load_job, read_errors, run_in_process, write_job
from tests.stages.oracle import LostError, Reading

TOPICS = [f"topic {'x' * n}" for n in range(7)]
HOT = {"temperature": 1.0, "max_tokens": 4}


def stage(name: str, prompt: str = "ask {{ topic }}", **fields: Any) -> dict[str, Any]:
    return {"name": name, "prompt": prompt, "sampling": dict(HOT), **fields}


def run(folder: Path, stages: list[dict[str, Any]], topics: Sequence[str] = TOPICS) -> PumpReport:
    job = load_job(write_job(folder, topics, stages=stages, output={"token_ids": True}))
    worker = Worker(WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_fake))
    leases = [
        Lease(Task(shard.key, shard.index, 0, shard.rows), 1, "run") for shard in job.plan.shards
    ]
    return worker.pump(tuple(leases), 60.0)


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "out" / "data").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def readings(
    stages: list[dict[str, Any]], topics: Sequence[str] = TOPICS
) -> dict[tuple[str, int], Reading | None]:
    """What the plain reading says of every row; None where the row is lost."""
    found: dict[tuple[str, int], Reading | None] = {}
    for number, topic in enumerate(topics):
        for sample in range(2):
            name = f"row{number}"
            columns = {"id": name, "topic": topic, "n": number}
            reading = Reading(stages, name, sample, columns)
            try:
                reading.run()
            except LostError:
                found[name, sample] = None
            else:
                found[name, sample] = reading
    return found


def agree(folder: Path, stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a pipeline, hold it against the plain reading, and return its rows."""
    run(folder, stages)
    made, wanted = rows(folder), readings(stages)
    texts = {
        (row["id"], row["sample"]): {item["name"]: row[item["name"]] for item in stages}
        for row in made
    }
    assert texts == {key: reading.texts for key, reading in wanted.items() if reading is not None}
    lost = sorted((row["id"], row["sample"]) for row in read_errors(folder / "out"))
    assert lost == sorted(key for key, reading in wanted.items() if reading is None)
    for row in made:
        reading = wanted[row["id"], row["sample"]]
        assert reading is not None
        calls = [(g["stage"], g["turn"], g["candidate"], g["attempt"]) for g in row["generation"]]
        assert sorted(calls) == sorted(call[:4] for call in reading.calls)
    return made


GRAPHS: dict[str, list[dict[str, Any]]] = {
    "left out": [
        stage("one"),
        stage("two", "{{ one }}!", when="n % 2 == 0"),
        stage("three", "{{ topic }}", when="two == None"),
    ],
    "a loop of one": [stage("one", "more {{ one or '' }} {{ topic }}", repeat={"at_most": 3})],
    "a loop that ends": [
        stage("one", "{{ turn }} {{ topic }}", repeat={"at_most": 9, "until": "one[0] < '8'"})
    ],
    "critique and rewrite": [
        stage("draft"),
        stage("critique", "what of {{ draft }} {{ rewrite or '' }}"),
        stage(
            "rewrite",
            "{{ critique }} so",
            when="critique[0] > '4'",
            repeat={"first": "critique", "at_most": 4, "until": "critique[0] > 'b'"},
        ),
        stage("last", "{{ critique }}"),
    ],
    "all": [stage("one", samples=3, keep="all"), stage("two", "{{ topic }}")],
    "vote": [stage("one", samples=5, keep="vote", vote={"regex": "[0-4]"})],
    "best": [stage("one", samples=4, keep="best"), stage("two", "{{ one }}")],
    "score": [
        stage(
            "one",
            samples=4,
            keep="score",
            validators=[{"expression": "n + one.count('a') * 10"}],
        )
    ],
    "retry": [stage("one", validators=[{"regex": "^[0-7]"}], retry=2), stage("two", "{{ one }}")],
    "retry of several": [
        stage("one", samples=3, keep="all", validators=[{"regex": "^[0-5]"}], retry=1)
    ],
    "drop": [stage("one", validators=[{"regex": "^[0-7]"}], otherwise="drop")],
    "judge": [
        stage(
            "one",
            samples=2,
            keep="score",
            retry=1,
            validators=[
                {"regex": "[a-f]"},
                {
                    "judge": {"prompt": "rate {{ one }}", "sampling": dict(HOT), "score": r"\d+"},
                    "at_least": 5,
                },
            ],
        ),
    ],
    "everything in a loop": [
        stage("seed"),
        stage(
            "one",
            "{{ turn }} {{ seed }} {{ one or '' }}",
            samples=3,
            keep="vote",
            vote={"regex": "[0-9]"},
            validators=[{"regex": "^[0-9]"}],
            retry=2,
            repeat={"at_most": 3, "until": "one[1] == 'a'"},
        ),
    ],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_gives_what_a_plain_reading_gives(name: str, tmp_path: Path) -> None:
    agree(tmp_path, GRAPHS[name])


@pytest.mark.parametrize("name", ["everything in a loop", "judge", "best"])
def test_shards_workers_and_a_crash_change_nothing(name: str, tmp_path: Path) -> None:
    """1. One worker, whole. 2. Two workers and small shards, of which one dies on the way."""

    def sabotage(worker: int, pump: int) -> None:
        if worker == 0 and pump == 3:
            raise CrashError

    run_in_process(load_job(write_job(tmp_path, TOPICS, stages=GRAPHS[name])))
    other = write_job(tmp_path / "other", TOPICS, stages=GRAPHS[name])
    job = load_job(other, "output.rows_per_shard=1", "engine.slots=3")
    run_in_process(job, size=2, sabotage=sabotage)
    made = [{**row, "model": ""} for row in rows(tmp_path)]
    assert made == [{**row, "model": ""} for row in rows(tmp_path / "other")]


def graphs() -> st.SearchStrategy[list[dict[str, Any]]]:
    conditions = st.sampled_from(["n > 2", "a[0] > '7'", "n % 3 != 1"])
    fields = st.fixed_dictionaries(
        {},
        optional={
            "validators": st.sampled_from([[{"regex": "^[0-9a]"}], [{"expression": "n != 4"}]]),
            "repeat": st.sampled_from([{"at_most": 2}, {"at_most": 3, "until": "n > 3"}]),
            "choice": st.sampled_from(
                [
                    {"samples": 3, "keep": "all"},
                    {"samples": 2, "keep": "vote", "vote": {"regex": "[0-9]"}},
                ]
            ),
        },
    )

    def build(parts: list[tuple[dict[str, Any], str | None]]) -> list[dict[str, Any]]:
        stages = [stage("a")]
        for name, (given_fields, when) in zip("bcd", parts, strict=False):
            chosen = dict(given_fields)
            chosen |= chosen.pop("choice", {})
            if "validators" in chosen:
                chosen["retry"] = 1
            if when is not None:
                chosen["when"] = when
            stages.append(stage(name, "{{ a }} of {{ topic }}", **chosen))
        return stages

    parts = st.lists(st.tuples(fields, st.none() | conditions), min_size=1, max_size=3)
    return parts.map(build)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(stages=graphs())
def test_any_graph_gives_what_a_plain_reading_gives(
    stages: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    agree(tmp_path_factory.mktemp("graph"), stages)


def test_texts_stay_when_candidates_a_loop_and_validators_are_added(tmp_path: Path) -> None:
    """1. A plain stage writes its texts. 2. The same stage, with everything, begins with them."""
    run(tmp_path / "plain", [stage("one")])
    validators = [{"length": {"min_characters": 0}}]
    more = stage(
        "one", samples=3, keep="all", validators=validators, retry=2, repeat={"at_most": 1}
    )
    run(tmp_path / "more", [more])
    plain = {(row["id"], row["sample"]): row["one"] for row in rows(tmp_path / "plain")}
    assert plain == {(row["id"], row["sample"]): row["one"][0] for row in rows(tmp_path / "more")}


def test_a_dropped_row_has_a_reason_of_its_own(tmp_path: Path) -> None:
    stages = [stage("one", validators=[{"regex": "^z"}], retry=1, otherwise="drop")]
    run(tmp_path, stages, TOPICS[:1])
    errors = read_errors(tmp_path / "out")
    assert [error["reason"] for error in errors] == ["dropped", "dropped"]
    assert re.match(
        r"one.0.regex: found '\w+'; expected a match \(the last of 2 attempts\)",
        errors[0]["message"],
    )


def test_validators_are_counted(tmp_path: Path) -> None:
    stages = [stage("one", validators=[{"regex": "^[0-7]"}, {"regex": "."}], retry=1)]
    report = run(tmp_path, stages)
    tried = list(readings(stages).values())
    counts = dict(report.checked)
    assert counts["one.0.regex", True] == counts["one.1.regex", True]
    assert counts["one.0.regex", True] == sum(reading is not None for reading in tried)
    retried = sum(len(reading.calls) - 1 for reading in tried if reading is not None)
    assert counts["one.0.regex", False] == retried + 2 * sum(r is None for r in tried)
