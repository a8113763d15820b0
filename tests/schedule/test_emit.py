"""Manifests are what their schedulers accept, and mean the ticks that the job file means."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from eagle_batch.errors import ConfigError, ExitCode
from eagle_batch.schedule.cron import ticks
from eagle_batch.schedule.emit.airflow import DATE, airflow_dag
from eagle_batch.schedule.emit.command import Place, portable_cron
from eagle_batch.schedule.emit.kubernetes import cron_job, ray_cron_job
from eagle_batch.schedule.emit.local import crontab, systemd
from tests.schedule.jobs import make_job, utc
from tests.test_cluster_files import KUBERAY, KUBERAY_VARIABLE, strict

PLACE = Place(job_file="/home/ray/jobs/nightly.yaml", folder="/home/ray")
ODD = Place(command="/opt/my env/bin/eagle-batch", job_file="/a b/it's 5%.yaml", folder="/a b/100%")
BERLIN = {"cron": "30 4 * * *", "timezone": "Europe/Berlin"}


def document(files: dict[str, str]) -> dict[str, Any]:
    (text,) = files.values()
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_kubernetes_accepts_the_cron_job(tmp_path: Path) -> None:
    manifest = document(cron_job(make_job(tmp_path, schedule=BERLIN), PLACE))
    kubernetes_validate.validate(manifest, "1.30", strict=True)
    spec = manifest["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("30 4 * * *", "Europe/Berlin")
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] == 86_400


@pytest.mark.parametrize(
    ("fields", "policy", "deadline"),
    [
        ({"overlap": "allow"}, "Allow", 86_400),
        ({"catch_up": 0}, "Forbid", 120),
        (
            {
                "schedule": {"cron": "*/10 * * * *"},
                "set": {"output.path": "o/{{ run.utc }}"},
            },
            "Forbid",
            600,
        ),
    ],
)
def test_overlap_and_missed_ticks_are_passed_on(
    fields: dict[str, Any], policy: str, deadline: int, tmp_path: Path
) -> None:
    spec = document(cron_job(make_job(tmp_path, **fields), PLACE))["spec"]
    assert (spec["concurrencyPolicy"], spec["startingDeadlineSeconds"]) == (policy, deadline)


def test_what_kubernetes_cannot_do_is_said(tmp_path: Path) -> None:
    job = make_job(tmp_path, catch_up=7, schedule=BERLIN | {"cron": "30 2 * * *"})
    (text,) = cron_job(job, PLACE).values()
    assert "# catch_up is 7, and Kubernetes makes up the last missed tick only\n" in text
    assert "# schedule.cron: '30 2 * * *' is due between 01:00 and 03:59" in text


def test_a_pod_that_only_submits_asks_for_little(tmp_path: Path) -> None:
    job = make_job(tmp_path, cluster={"address": "http://head:8265"})
    spec = document(cron_job(job, PLACE))["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize("writer", [cron_job, ray_cron_job])
def test_an_output_on_a_pod_s_own_disk_is_warned_of(writer: Any, tmp_path: Path) -> None:
    change = {"output.path": "runs/{{ run.date }}", "workers.count": 1, "workers.gpus": 1}
    (local,) = writer(make_job(tmp_path, set=change), PLACE).values()
    (bucket,) = writer(gpus(tmp_path), PLACE).values()
    assert "# set.output.path names a folder, runs: mount a volume" in local
    assert "mount a volume" not in bucket


@pytest.fixture(scope="module")
def ray_cron_job_schema() -> dict[str, Any]:
    path = KUBERAY / "ray.io_raycronjobs.yaml"
    if not path.is_file():
        pytest.skip(f"no KubeRay definitions in {KUBERAY}; {KUBERAY_VARIABLE} names their folder")
    definition = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    assert isinstance(schema, dict)
    return schema


def gpus(tmp_path: Path, **fields: Any) -> Any:
    change = {"output.path": "s3://bucket/{{ run.date }}", "workers.count": 4, "workers.gpus": 1}
    return make_job(tmp_path, set=change, **fields)


def test_kuberay_accepts_the_ray_cron_job(
    tmp_path: Path, ray_cron_job_schema: dict[str, Any]
) -> None:
    manifest = document(ray_cron_job(gpus(tmp_path, schedule=BERLIN), PLACE))
    jsonschema.validate(manifest, ray_cron_job_schema)
    (group,) = manifest["spec"]["jobTemplate"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["maxReplicas"] == 4
    manifest["spec"]["concurrencyPolicy"] = "Forbid"
    with pytest.raises(jsonschema.ValidationError, match="concurrencyPolicy"):
        jsonschema.validate(manifest, ray_cron_job_schema)


def test_what_a_ray_cron_job_lacks_is_said(tmp_path: Path) -> None:
    (text,) = ray_cron_job(gpus(tmp_path), PLACE).values()
    for lack in ("feature-gates=RayCronJob", "no concurrencyPolicy", "no start deadline"):
        assert lack in text


def test_a_cluster_of_its_own_needs_numbers(tmp_path: Path) -> None:
    job = make_job(tmp_path, set={"output.path": "o/{{ run.date }}", "workers.gpus": "auto"})
    with pytest.raises(ConfigError, match=r"set.workers.count and set.workers.gpus: found 'auto'"):
        ray_cron_job(job, PLACE)


def shell_lines(tmp_path: Path) -> list[list[str]]:
    """The command of each manifest, as what runs it would call it."""
    spec = document(cron_job(gpus(tmp_path), PLACE))["spec"]["jobTemplate"]["spec"]["template"]
    (container,) = spec["spec"]["containers"]
    here = Place(job_file="nightly.yaml", folder=str(tmp_path))
    entrypoint = document(ray_cron_job(gpus(tmp_path), here))["spec"]["jobTemplate"]["entrypoint"]
    dag = ast.parse(airflow_dag(make_job(tmp_path), PLACE)["nightly_dag.py"])
    (bash,) = [
        keyword.value.value
        for keyword in ast.walk(dag)
        if isinstance(keyword, ast.keyword)
        and keyword.arg == "bash_command"
        and isinstance(keyword.value, ast.Constant)
    ]
    rendered = str(bash).replace(DATE, "2027-03-01T04:30:00+00:00")
    return [
        [*container["command"], *container["args"]],
        shlex.split(entrypoint),
        ["bash", "-c", rendered],
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(ExitCode.COMPLETE, 0), (ExitCode.QUARANTINED, 0), (ExitCode.STOPPED, 4)],
)
@pytest.mark.parametrize("number", range(3))
def test_commands_pass_exit_codes_on_and_accept_quarantined_rows(
    number: int, code: ExitCode, expected: int, tmp_path: Path
) -> None:
    fake = tmp_path / "eagle-batch"
    fake.write_text(f'#!/bin/sh\necho "$@"\nexit {int(code)}\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": "nightly-30099150"}
    command = shell_lines(tmp_path)[number]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stderr
    assert re.match(r"jobs run \S*nightly.yaml --at \S+\n$", done.stdout)


@pytest.mark.parametrize(
    ("run", "at"),
    [
        ("nightly-30029550", f"@{30029550 * 60}"),
        ("nightly-manual-7", "now"),
        ("nightly-manual", "now"),
        ("nightly-3002955x", "now"),
    ],
)
def test_every_attempt_of_a_pod_means_the_tick_in_its_job_s_name(
    run: str, at: str, tmp_path: Path
) -> None:
    fake = tmp_path / "eagle-batch"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": run}
    done = subprocess.run(
        shell_lines(tmp_path)[0], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == at


@pytest.mark.parametrize("place", [PLACE, ODD])
def test_the_dag_is_python_and_names_the_schedule(place: Place, tmp_path: Path) -> None:
    files = airflow_dag(make_job(tmp_path, schedule=BERLIN), place)
    tree = ast.parse(files["nightly_dag.py"])
    compile(tree, "nightly_dag.py", "exec")
    keywords = {
        node.arg: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
    }
    assert keywords["schedule"] == "CronTriggerTimetable('30 4 * * *', timezone='Europe/Berlin')"
    assert keywords["max_active_runs"] == "1"
    assert keywords["catchup"] == "False"


def test_a_crontab_line_survives_spaces_quotes_and_percent_signs(tmp_path: Path) -> None:
    text = crontab(make_job(tmp_path, schedule=BERLIN), ODD)["nightly.crontab"]
    zone, line = [line for line in text.splitlines() if not line.startswith("#")]
    assert zone == "CRON_TZ=Europe/Berlin"
    assert line.startswith("30 4 * * * cd ")
    assert "%" not in line.replace("\\%", "")
    command = line.split(maxsplit=5)[5].replace("\\%", "%")
    assert shlex.split(command)[1] == "/a b/100%"
    assert shlex.split(command)[-1] == "/a b/it's 5%.yaml"


@pytest.mark.parametrize(
    ("cron", "portable"),
    [
        ("*/15 * * * *", "*/15 * * * *"),
        ("0 4 * * 7", "0 4 * * 0"),
        ("0 4 * * MON-FRI", "0 4 * * 1,2,3,4,5"),
        ("5,35 9-11 1 jan,JUL *", "5,35 9,10,11 1 1,7 *"),
        ("0 0 13 * 5", "0 0 13 * 5"),
        ("0 */6 * * *", "0 0,6,12,18 * * *"),
    ],
)
def test_expressions_are_written_so_that_all_cron_parsers_agree(
    cron: str, portable: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path, schedule={"cron": cron}, set={"output.path": "o/{{ run.utc }}"})
    assert portable_cron(job, "Kubernetes") == portable


@pytest.mark.parametrize("cron", ["0 0 L * *", "0 0 * * 5#2", "0 0 LW * *", "0 0 1-7 * */7"])
def test_what_a_scheduler_does_not_know_is_refused(cron: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, schedule={"cron": cron})
    with pytest.raises(ConfigError, match=r"schedule.cron: .*Kubernetes .*jobs daemon"):
        cron_job(job, PLACE)


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@needs_systemd
@pytest.mark.parametrize("place", [Place("/bin/true", "/x.yaml", "/tmp"), ODD])
def test_systemd_accepts_service_and_timer(place: Place, tmp_path: Path) -> None:
    program = tmp_path / "my env" / "eagle batch"
    program.parent.mkdir()
    program.symlink_to("/bin/true")
    called = Place(shlex.quote(str(program)), place.job_file, place.folder)
    files = systemd(make_job(tmp_path, schedule=BERLIN), called)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in files]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    about_us = [line for line in (done.stdout + done.stderr).splitlines() if "nightly" in line]
    assert (done.returncode, about_us) == (0, [])


@needs_systemd
@pytest.mark.parametrize(
    "cron",
    [
        "30 4 * * *",
        "0 9-17/4 * * 1-5",
        "0 0 13 * 5",
        "0 0 1-7 * */7",
        "*/20 3 1 1,7 *",
        "0 0 31 * *",
    ],
)
def test_systemd_means_the_same_times(cron: str, tmp_path: Path) -> None:
    """In the months without a change of clocks, where all schedulers agree."""
    job = make_job(
        tmp_path,
        schedule={"cron": cron, "timezone": "Europe/Berlin"},
        set={"output.path": "o/{{ run.utc }}"},
    )
    start, count = utc("2027-04-01T00:00"), 6
    lines = systemd(job, PLACE)["eagle-batch-nightly.timer"].splitlines()
    found: set[datetime] = set()
    for line in lines:
        if line.startswith("OnCalendar="):
            found |= elapses(line.partition("=")[2], count)
    expected = list(ticks(job.schedule, start, utc("2029-01-01T00:00")))[:count]
    assert sorted(found)[:count] == expected


def elapses(calendar: str, count: int) -> set[datetime]:
    done = subprocess.run(
        [
            *("systemd-analyze", "calendar", "--base-time=2027-04-01 00:00:00 UTC"),
            *(f"--iterations={count}", calendar),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TZ": "UTC"},
    )
    shown = re.findall(r"(?:Next elapse|Iter\S*\s#\d+): \w{3} (\S+ \S+) UTC", done.stdout)
    return {datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for text in shown}
