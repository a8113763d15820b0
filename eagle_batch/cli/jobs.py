"""`eagle-batch jobs`: pipelines that run by a schedule."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eagle_batch.cli.cluster import jobs_api, submit_to
from eagle_batch.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from eagle_batch.pipeline import Pipeline
    from eagle_batch.schedule.emit.command import Place
    from eagle_batch.schedule.jobfile import ScheduledJob
    from eagle_batch.schedule.records import TickStatus
    from eagle_batch.schedule.run import Made, Outcome

#: Where job files lie unless a file is named.
FOLDER = "jobs"
#: Manifest -> where its job file lies: in an image, or on this machine.
TARGETS = {"cronjob": True, "kuberay": True, "cron": False, "systemd": False, "airflow": False}

folder_option = click.option(
    "--folder",
    default=FOLDER,
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where job files lie.",
)


@click.group(short_help="Run pipelines by a schedule, each tick once.")
def jobs() -> None:
    """Pipelines that run by a schedule, each tick once, into an output of its own.

    JOB is a job file, or the name of one in the folder `jobs`.
    """


def _load(job: str, folder: Path) -> ScheduledJob:
    from eagle_batch.schedule.jobfile import load_job

    by_name = folder / f"{job}.yaml"
    return load_job(by_name if not Path(job).exists() and by_name.is_file() else job)


def _load_all(names: tuple[str, ...], folder: Path) -> list[ScheduledJob]:
    found = names or tuple(str(path) for path in sorted(folder.glob("*.yaml")))
    if not found:
        raise ConfigError(f"{folder}: no job files; expected at least one NAME.yaml")
    loaded: list[ScheduledJob] = []
    problems: list[str] = []
    for name in found:
        try:
            loaded.append(_load(name, folder))
        except ConfigError as error:
            problems.extend(error.problems)
    problems += _repeated(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded


def _repeated(loaded: list[ScheduledJob]) -> list[str]:
    owners: dict[str, ScheduledJob] = {}
    return [
        f"{job.path}: name: found {job.name!r}, which {owner.path} has; expected another name"
        for job in loaded
        if (owner := owners.setdefault(job.name, job)) is not job
    ]


@jobs.command("list", short_help="Show the jobs of the folder.")
@folder_option
def list_jobs(*, folder: Path) -> None:
    """Show the jobs of the folder: schedule, next tick, and how the last one went."""
    from eagle_batch.schedule.cron import next_ticks, warnings
    from eagle_batch.schedule.run import latest_tick, records_of

    now = datetime.now(UTC)
    for job in _load_all((), folder):
        last = latest_tick(job, now)
        following = next_ticks(job.schedule, now, 1)
        click.echo(f"{job.name:<24}{job.schedule.cron}  {job.schedule.timezone}")
        if following:
            click.echo(f"    next  {_shown(job, following[0])}")
        click.echo(f"    last  {_shown(job, last)}: {_told(records_of(job).status(last))}")
        for warning in warnings(job.schedule, now):
            click.echo(f"    note  {warning}")


def _shown(job: ScheduledJob, tick: datetime) -> str:
    from eagle_batch.schedule.cron import tick_name

    return f"{tick_name(tick)}  {tick.astimezone(job.schedule.zone):%a %Y-%m-%d %H:%M %Z}"


def _told(status: TickStatus) -> str:
    if status.finished is not None:
        done = status.finished
        return f"complete, {done.rows} rows, {done.quarantined} quarantined, {done.output}"
    if status.holder is not None:
        return f"running, process {status.holder.pid} on {status.holder.host}"
    text = {"waiting": "not run", "started": "begun, nobody is at work"}.get(status.state)
    said = status.error.partition("\n")[0]
    return (text or str(status.state)) + (f": {said}" if said else "")


@jobs.command("next")
@folder_option
@click.option(
    "--count", default=5, show_default=True, type=click.IntRange(1, 10_000), help="Ticks to show."
)
@click.argument("job")
def show_next(*, job: str, folder: Path, count: int) -> None:
    """Show when a job is due next, and where its rows will go."""
    from eagle_batch.schedule.cron import next_ticks, warnings
    from eagle_batch.schedule.jobfile import output_for

    loaded = _load(job, folder)
    now = datetime.now(UTC)
    for tick in next_ticks(loaded.schedule, now, count):
        click.echo(f"{_shown(loaded, tick)}  {output_for(loaded, tick)}")
    for warning in warnings(loaded.schedule, now):
        click.echo(warning, err=True)


@jobs.command(short_help="Run one tick of a job, once, or resume it.")
@folder_option
@click.option("--tick", metavar="TIME", help="The tick of exactly this time, with its offset.")
@click.option("--at", metavar="TIME", help="The last tick up to this time; 'now' by default.")
@click.option("--plain", is_flag=True, help="Print plain lines even on a terminal.")
@click.argument("job")
@click.pass_context
def run(
    ctx: click.Context, *, job: str, folder: Path, tick: str | None, at: str | None, plain: bool
) -> None:
    """Run one tick of a job, once: a finished one says so, an interrupted one is resumed.

    A TIME is ISO 8601 with an offset, a tick's name, or @ and Unix seconds.
    """
    from eagle_batch.schedule.run import Surroundings, run_tick

    loaded = _load(job, folder)
    chosen = _chosen(loaded, tick, at)
    world = Surroundings(
        _executor(jobs_api(loaded.file.cluster.address), plain=plain),
        lambda text: click.echo(text, err=True),
    )
    with _sigterm_as_interrupt():
        outcome = run_tick(loaded, chosen, world)
    click.echo(_ended(loaded, outcome))
    ctx.exit(int(outcome.exit_code))


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C where nobody else does, so that a tick is not noted as killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _chosen(job: ScheduledJob, tick: str | None, at: str | None) -> datetime:
    from eagle_batch.schedule.cron import parse_instant
    from eagle_batch.schedule.run import exact_tick, latest_tick

    if tick is not None and at is not None:
        raise ConfigError("--tick and --at: found both; expected at most one of them")
    if tick is not None:
        return exact_tick(job, parse_instant(tick, "--tick"))
    now = at is None or at == "now"
    return latest_tick(job, datetime.now(UTC) if now else parse_instant(str(at), "--at"))


def _ended(job: ScheduledJob, outcome: Outcome) -> str:
    done = outcome.finished
    how = "is complete already; nothing was started" if outcome.already else "is complete"
    rows = f"{done.rows} rows, {done.quarantined} quarantined"
    return f"{job.name}: tick {done.tick} {how}: {rows}, {done.output}"


def _executor(address: str | None, *, plain: bool) -> Callable[[Pipeline], Made]:
    from eagle_batch.schedule.run import Made

    def execute(pipeline: Pipeline) -> Made:
        if address is not None:
            ended = submit_to(address, pipeline)
            return Made(0, 0) if ended is None else Made(ended.rows, ended.quarantined)
        from rich.console import Console

        from eagle_batch.job import submit
        from eagle_batch.job.store import open_store
        from eagle_batch.report.progress import make_view
        from eagle_batch.report.write import recorded

        view = recorded(make_view(Console(), plain=plain), open_store(pipeline.output.path))
        try:
            result = submit.run_on_ray(pipeline, view, sys.argv)
        finally:
            view.close()
        return Made(result.rows, result.quarantined)

    return execute


@jobs.command()
@folder_option
@click.option(
    "--to", "target", required=True, type=click.Choice(list(TARGETS)), help="For which scheduler."
)
@click.option("--image", help="Image of the pods, for Kubernetes.")
@click.option("--service-account", help="Service account of the pods.")
@click.option("--command", help="How eagle-batch is called where the job runs.")
@click.option("--job-file", help="Where the job file lies there.")
@click.option("--workdir", help="Working directory there.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the files into this folder instead of printing them.",
)
@click.argument("job")
def emit(*, job: str, folder: Path, target: str, write: Path | None, **places: str | None) -> None:
    """Write the manifest for the scheduler that you already have."""
    loaded = _load(job, folder)
    files = _manifests(loaded, target, _place(loaded, places, in_image=TARGETS[target]))
    for name, text in files.items():
        if write is None:
            click.echo((f"# {name}\n" if len(files) > 1 else "") + text, nl=len(files) > 1)
        else:
            write.mkdir(parents=True, exist_ok=True)
            (write / name).write_text(text, encoding="utf-8")
            click.echo(f"{write / name}")


def _place(job: ScheduledJob, given: dict[str, str | None], *, in_image: bool) -> Place:
    from eagle_batch.schedule.emit.command import HOME_IN_IMAGE, Place

    here = f"{sys.executable} -m eagle_batch"
    defaults = {
        "command": "eagle-batch" if in_image else here,
        "job_file": f"{HOME_IN_IMAGE}/jobs/{job.path.name}" if in_image else str(job.path),
        "workdir": HOME_IN_IMAGE if in_image else str(Path.cwd()),
    }
    chosen = defaults | {name: value for name, value in given.items() if value is not None}
    chosen["folder"] = chosen.pop("workdir")
    return Place(**chosen)


def _manifests(job: ScheduledJob, target: str, place: Place) -> dict[str, str]:
    from eagle_batch.schedule.emit import airflow, kubernetes, local

    writers = {
        "cronjob": kubernetes.cron_job,
        "kuberay": kubernetes.ray_cron_job,
        "cron": local.crontab,
        "systemd": local.systemd,
        "airflow": airflow.airflow_dag,
    }
    return writers[target](job, place)


@jobs.command(short_help="Run jobs when they are due, until told to end.")
@folder_option
@click.option("--once", is_flag=True, help="Run what is due now, then end.")
@click.argument("names", nargs=-1, metavar="[JOB]...")
@click.pass_context
def daemon(ctx: click.Context, *, names: tuple[str, ...], folder: Path, once: bool) -> None:
    """Run the jobs of the folder when they are due, until it is told to end.

    It keeps no state of its own: killed and started again, it goes on from the records beside the
    outputs. Job files are read once, at its start.
    """
    from eagle_batch.schedule.daemon import Daemon, serve, start_process

    loaded = _load_all(names, folder)
    serve(Daemon(loaded, start_process, click.echo, time.time), once=once)
    ctx.exit(int(ExitCode.COMPLETE))
