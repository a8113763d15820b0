"""The job file: every problem at once, and a different output for each tick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_batch.errors import ConfigError
from eagle_batch.schedule.cron import make_schedule
from eagle_batch.schedule.jobfile import (
    load_job,
    output_for,
    overrides_for,
    pipeline_for,
    run_values,
)
from tests.schedule.jobs import NOW, make_job, utc, write_file


def test_every_problem_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path, name="Night Job", overlap="replace", catch_up=-1, shedule={})
    with pytest.raises(ConfigError) as caught:
        load_job(path, NOW)
    problems = caught.value.problems
    assert [problem.split(": ")[1] for problem in problems] == [
        "name",
        "overlap",
        "catch_up",
        "shedule",
    ]
    assert "did you mean 'schedule'?" in problems[-1]
    assert "expected one of name, pipeline, set, schedule" in problems[-1]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            {"schedule": {"cron": "0 0 4 * * *", "timezone": "Mars"}},
            ["schedule.cron: found", "schedule.timezone: found 'Mars'"],
        ),
        ({"set": {}}, ["set.output.path: found null", "runs/nightly/{{ run.date }}"]),
        ({"set": {"output.path": 3}}, ["set.output.path: found 3"]),
        (
            {"set": {"output.path": "o/{{ run.dat }}", "input.path": ["{{ x"]}},
            ["set.output.path: found 'o/{{ run.dat }}', not a valid template", "set.input.path"],
        ),
        (
            {"set": {"output.path": "o/{{ run.__class__.__mro__ }}"}},
            ["not a valid template", "unsafe"],
        ),
        ({"set": {"output.path": "{{ 1 / 0 }}"}}, ["not a valid template"]),
        ({"set": {"output.path": "runs/same"}}, ["'runs/same' for the ticks", "{{ run.date }}"]),
        (
            {"schedule": {"cron": "0 * * * *"}},
            ["for the ticks 20270301T130000Z and 20270301T140000Z", "add {{ run.utc }}"],
        ),
        ({"cluster": {"address": "ray://head:10001"}}, ["cluster.address", "Jobs API"]),
    ],
)
def test_a_wrong_value_is_explained(
    fields: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_file(tmp_path, **fields), NOW)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_the_hour_that_autumn_repeats_is_no_name_for_a_tick(tmp_path: Path) -> None:
    """Local names look unique all year but for one night."""
    with pytest.raises(ConfigError, match="20271031T000000Z and 20271031T010000Z"):
        make_job(
            tmp_path,
            schedule={"cron": "0 * * * *", "timezone": "Europe/Berlin"},
            set={"output.path": "o/{{ run.date }}/{{ run.hour }}"},
        )
    fine = make_job(
        tmp_path,
        schedule={"cron": "0 * * * *", "timezone": "Europe/Berlin"},
        set={"output.path": "o/{{ run.utc }}"},
    )
    assert output_for(fine, utc("2027-10-31T01:00")) == "o/20271031T010000Z"


def test_the_values_of_a_tick_are_those_of_its_zone() -> None:
    berlin = make_schedule("30 0 * * *", "Europe/Berlin")
    assert run_values("nightly", berlin, utc("2027-12-31T23:30")) == {
        "id": "nightly-20271231T233000Z",
        "job": "nightly",
        "utc": "20271231T233000Z",
        "date": "2028-01-01",
        "time": "0030",
        "year": "2028",
        "month": "01",
        "day": "01",
        "hour": "00",
        "week": "2027-W52",
        "yesterday": "2027-12-31",
    }


def test_only_input_and_output_hold_templates(tmp_path: Path) -> None:
    """A prompt's own braces are the pipeline's business."""
    job = make_job(
        tmp_path,
        set={
            "output.path": "s3://bucket/{{ run.date }}/rows",
            "input.path": ["s3://bucket/in/{{ run.yesterday }}.parquet"],
            "stages.0.prompt": "of {{ topic }}",
            "samples": 3,
        },
    )
    pipeline = pipeline_for(job, utc("2027-03-01T04:30"))
    assert pipeline.output.path == "s3://bucket/2027-03-01/rows"
    assert pipeline.input.path == ("s3://bucket/in/2027-02-28.parquet",)
    assert pipeline.stages[0].prompt == "of {{ topic }}"
    assert pipeline.samples == 3


def test_a_pipeline_that_does_not_take_a_change_says_so_by_its_key(tmp_path: Path) -> None:
    job = make_job(tmp_path, set={"output.path": "o/{{ run.date }}", "sample": 3})
    with pytest.raises(ConfigError, match="--set: sample: unknown field"):
        pipeline_for(job, utc("2027-03-01T04:30"))


@pytest.mark.parametrize("text", ['a "quoted" # word', "naïve: yes\nno", "007", "null", "{x: 1}"])
def test_a_text_stays_the_text_it_is(text: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, set={"output.path": "o/{{ run.date }}", "stages.0.prompt": text})
    assert pipeline_for(job, utc("2027-03-01T04:30")).stages[0].prompt == text
    assert len(overrides_for(job, utc("2027-03-01T04:30"))) == 2


@pytest.mark.parametrize(
    ("output", "root"),
    [
        ("runs/nightly/{{ run.date }}", "runs/nightly"),
        ("runs/nightly-{{ run.date }}/x", "runs"),
        ("s3://bucket/a/{{ run.date }}", "s3://bucket/a"),
        ("/{{ run.date }}", "/"),
        ("{{ run.date }}", "."),
    ],
)
def test_records_lie_beside_the_outputs(output: str, root: str, tmp_path: Path) -> None:
    assert make_job(tmp_path, set={"output.path": output}).root == root


def test_the_job_files_of_this_repository_are_valid(repository: Path) -> None:
    files = sorted((repository / "jobs").glob("*.yaml"))
    assert files
    for path in files:
        job = load_job(path)
        assert job.name == path.stem
        assert pipeline_for(job, utc("2027-03-01T04:30")).name
        assert set(yaml.safe_load(path.read_text())) == set(type(job.file).model_fields)
