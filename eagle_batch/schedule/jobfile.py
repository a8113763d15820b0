"""The job file: which pipeline runs when and where, and the values that each tick gives it.

Strict like the pipeline file: unknown keys are errors, and all errors of a file come together.
Templates stand under `set`, in the fields of `input` and `output` only, so that the prompts of a
pipeline are never mistaken for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Pipeline, load_pipeline
from eagle_batch.pipeline.locations import is_url
from eagle_batch.pipeline.problems import explain_problems, shown
from eagle_batch.pipeline.strict_yaml import read_yaml
from eagle_batch.schedule.cron import (
    Schedule,
    clock_changes,
    make_schedule,
    next_ticks,
    tick_name,
)

KIND = "a job (name, pipeline, set, schedule)"
OUTPUT = "output.path"
#: Sections of a pipeline whose values may hold templates.
TEMPLATED = ("input", "output")
#: Ticks whose outputs are compared when a file is read; all others are when they run.
COMPARED = 48
#: What a template, which is code, may raise beside Jinja's own errors.
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined)


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class When(_Model):
    """When the job is due."""

    cron: str = Field(
        min_length=1, description="Five fields as in cron, or a name such as '@daily'."
    )
    timezone: str = Field(
        default="Etc/UTC", min_length=1, description="Name of the IANA list, such as Europe/Berlin."
    )


class Where(_Model):
    """Where the job runs."""

    address: Annotated[str, Field(pattern=r"^https?://")] | None = Field(
        default=None,
        description="Ray's Jobs API, such as http://HEAD:8265; null runs on this machine, or on "
        "the cluster that RAY_ADDRESS names.",
    )


class JobFile(_Model):
    """A whole job file."""

    name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        max_length=48,
        description="Name of the job: a-z, 0-9 and '-', as Kubernetes wants it.",
    )
    pipeline: str = Field(min_length=1, description="Pipeline file, relative to the job file.")
    set: dict[str, Any] = Field(
        description="Fields of the pipeline by dotted key; 'output.path' at least, named by "
        "the tick.",
    )
    schedule: When = Field(description="When the job is due.")
    cluster: Where = Field(default=Where(), description="Where the job runs.")
    overlap: Literal["forbid", "allow"] = Field(
        default="forbid",
        description="Whether a tick may start while an earlier one still runs.",
    )
    catch_up: int = Field(
        default=1, ge=0, le=10_000, description="Missed ticks that are made up, the last ones."
    )
    retries: int = Field(
        default=2, ge=0, le=100, description="Times that a failed tick is tried again."
    )
    retry_seconds: float = Field(
        default=60.0, ge=0, le=86_400, description="Pause before a failed tick is tried again."
    )


@dataclass(frozen=True)
class ScheduledJob:
    """A job file, checked."""

    path: Path
    file: JobFile
    schedule: Schedule
    #: Folder or URL below which all outputs of the job lie, and the records of its runs.
    root: str

    @property
    def name(self) -> str:
        """The job's name."""
        return self.file.name


def load_job(path: str | Path, now: datetime | None = None) -> ScheduledJob:
    """Read a job file; raises ConfigError with every problem, each with its dotted key."""
    source = str(path)
    data = read_yaml(Path(path), source, KIND)
    try:
        file = JobFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain_problems(error, JobFile, data, source)) from error
    problems: list[str] = []
    try:
        schedule = make_schedule(file.schedule.cron, file.schedule.timezone)
    except ConfigError as error:
        problems.extend(f"schedule.{problem}" for problem in error.problems)
    problems += _template_problems(file)
    if problems:
        raise ConfigError(f"{source}: {problem}" for problem in problems)
    job = ScheduledJob(Path(path).resolve(), file, schedule, _root(file.set[OUTPUT]))
    _refuse_shared_outputs(job, source, now or datetime.now(UTC))
    return job


def run_values(job: str, schedule: Schedule, tick: datetime) -> dict[str, str]:
    """Return what `{{ run.<name> }}` stands for; local times are those of the schedule's zone."""
    local = tick.astimezone(schedule.zone)
    day = local.date()
    return {
        "id": f"{job}-{tick_name(tick)}",
        "job": job,
        "utc": tick_name(tick),
        "date": day.isoformat(),
        "time": local.strftime("%H%M"),
        "year": local.strftime("%Y"),
        "month": local.strftime("%m"),
        "day": local.strftime("%d"),
        "hour": local.strftime("%H"),
        "week": "{}-W{:02d}".format(*day.isocalendar()[:2]),
        "yesterday": (day - timedelta(days=1)).isoformat(),
    }


def overrides_for(job: ScheduledJob, tick: datetime) -> tuple[str, ...]:
    """Return the tick's changes to the pipeline, as `--set` takes them."""
    run = run_values(job.name, job.schedule, tick)
    rendered = {key: _render(key, value, run) for key, value in job.file.set.items()}
    return tuple(f"{key}={json.dumps(value)}" for key, value in rendered.items())


def output_for(job: ScheduledJob, tick: datetime) -> str:
    """Return where the tick's rows go, as the file says it."""
    run = run_values(job.name, job.schedule, tick)
    return str(_render(OUTPUT, job.file.set[OUTPUT], run))


def pipeline_for(job: ScheduledJob, tick: datetime) -> Pipeline:
    """Return the pipeline of one tick; raises ConfigError as `load_pipeline` does."""
    return load_pipeline(pipeline_path(job), overrides_for(job, tick))


def pipeline_path(job: ScheduledJob) -> Path:
    """Return the pipeline file that a job names."""
    return job.path.parent / Path(job.file.pipeline).expanduser()


def _render(key: str, value: Any, run: Mapping[str, str]) -> Any:
    if key.partition(".")[0] not in TEMPLATED:
        return value
    if isinstance(value, str):
        return _ENVIRONMENT.from_string(value).render(run=run)
    if isinstance(value, list):
        return [_render(key, item, run) for item in value]
    if isinstance(value, dict):
        return {name: _render(key, item, run) for name, item in value.items()}
    return value


def _template_problems(file: JobFile) -> list[str]:
    values = run_values(file.name, Schedule("0 0 * * *"), datetime(2027, 1, 1, tzinfo=UTC))
    problems = []
    for key, value in file.set.items():
        try:
            _render(key, value, values)
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            problems.append(
                f"set.{key}: found {shown(value)}, not a valid template: {error}; "
                f"expected names such as {', '.join(f'run.{name}' for name in values)}"
            )
    path = file.set.get(OUTPUT)
    if not isinstance(path, str) or not path:
        problems.append(
            f"set.{OUTPUT}: found {shown(path)}; expected a folder or URL that names the tick, "
            f"such as runs/{file.name}/{{{{ run.date }}}}"
        )
    return problems


def _root(output: str) -> str:
    """Return the part of an output's path above the first folder that depends on the tick."""
    fixed, brace, _ = output.partition("{")
    if not brace:
        return str(Path(output).parent) if not is_url(output) else output.rpartition("/")[0]
    folder = fixed.rpartition("/")[0]
    if is_url(output) or folder:
        return folder
    return "/" if fixed.startswith("/") else "."


def _refuse_shared_outputs(job: ScheduledJob, source: str, now: datetime) -> None:
    """Two ticks in one output would be one run: the second finds the work done."""
    starts = [now]
    for day in clock_changes(job.schedule, now):
        noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
        starts.append(noon - timedelta(days=2))
    owners: dict[str, datetime] = {}
    for tick in (tick for start in starts for tick in next_ticks(job.schedule, start, COMPARED)):
        output = output_for(job, tick)
        other = owners.setdefault(output, tick)
        if other != tick:
            raise ConfigError(
                f"{source}: set.{OUTPUT}: found {output!r} for the ticks {tick_name(other)} and "
                f"{tick_name(tick)}; expected one output a tick: {_finer(job, other, tick)}"
            )


def _finer(job: ScheduledJob, first: datetime, second: datetime) -> str:
    same_day = first.astimezone(job.schedule.zone).date() == (
        second.astimezone(job.schedule.zone).date()
    )
    name = "run.utc" if same_day else "run.date"
    return f"add {{{{ {name} }}}} to it"
