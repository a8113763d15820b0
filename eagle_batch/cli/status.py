"""The `status` command: how far a job is, from its store alone, once or again and again."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from eagle_batch.job.status import JobStatus


@click.command(short_help="Show how far a job is.")
@click.argument("output")
@click.option("--watch", is_flag=True, help="Look again and again, until the job is at its end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a look.")
def status(*, output: str, watch: bool, interval: float, as_json: bool) -> None:
    """Show how far the job of an OUTPUT is, from its store alone.

    It takes no lock and may run on any machine that can read the output.
    """
    from eagle_batch.job.status import read_status

    found = read_status(output)
    _print(found, as_json=as_json)
    while watch and found.state == "running":
        time.sleep(interval)
        found = read_status(output)
        if not as_json:
            click.echo()
        _print(found, as_json=as_json)


def _print(found: JobStatus, *, as_json: bool) -> None:
    if as_json:
        values = {name: value for name, value in asdict(found).items() if name != "metrics"}
        values |= {"percent": percent(found), "eta_s": seconds_left(found)} | _numbers(found)
        click.echo(json.dumps(values))
        return
    for name, value in status_lines(found):
        click.echo(f"{name:<14}{value}")


def _numbers(found: JobStatus) -> dict[str, Any]:
    """Return the numbers of the last run under the names of `submit --json`."""
    if found.metrics is None:
        return {}
    engine = found.metrics["engine"]
    return {
        "tokens": engine["completion_tokens"],
        "tokens_per_s": found.metrics.get("tokens_per_s_now"),
        "average_tokens_per_s": found.metrics["tokens_per_s"],
        "acceptance_length": engine["acceptance_length"],
        "occupancy": engine["occupancy"],
        "workers": found.metrics.get("workers_ready"),
    }


def status_lines(found: JobStatus) -> list[tuple[str, str]]:
    """Return what is shown of a status, as name and value."""
    from eagle_batch.report.progress import duration

    finished = found.rows + found.quarantined + found.dropped
    made = found.metrics.get("completed", 0) if found.metrics else 0
    more = f", {made:,} made" if found.state == "running" and made > finished else ""
    lines = [
        ("job", f"{found.name}, {found.state}"),
        ("rows", f"{finished:,} of {found.units:,} committed ({percent(found)} %){more}"),
        ("quarantined", f"{found.quarantined:,}"),
        *([("dropped", f"{found.dropped:,}")] if found.dropped else []),
        ("shards", f"{found.tasks_done:,} of {found.tasks:,}"),
    ]
    if found.host is not None:
        lines.append(("run by", f"process {found.pid} on {found.host}"))
    if found.silent_s is not None:
        lines.append(("last sign", f"{found.silent_s:.0f} s ago"))
    if found.metrics is not None:
        lines += _run_lines(found.metrics, running=found.state == "running")
    left = seconds_left(found)
    if left is not None:
        lines.append(("left", f"about {duration(left)}"))
    return lines


def _run_lines(metrics: dict[str, Any], *, running: bool) -> list[tuple[str, str]]:
    """Return the numbers of the last run, those that the view of the run itself shows."""
    engine, now = metrics["engine"], metrics.get("tokens_per_s_now", 0.0)
    average = f"{metrics['tokens_per_s']:,.1f}"
    speed = f"{now:,.1f} tokens/s now, {average} on average" if running else f"{average} tokens/s"
    slots, length = f"{engine['occupancy']:.0%}", f"{engine['acceptance_length']:.2f}"
    lines = [
        ("speed", speed),
        ("batch", f"{slots} of the slots in use, {length} tokens a target pass"),
    ]
    if running:
        lines.append(("workers", f"{metrics['workers_ready']:,} ready"))
    return lines


def percent(found: JobStatus) -> int:
    """Return the share of the rows that is committed; 100 only when nothing is left."""
    finished = found.rows + found.quarantined + found.dropped
    most = 100 if found.tasks_done == found.tasks else 99
    return min(most, 100 * finished // max(1, found.units))


def seconds_left(found: JobStatus) -> float | None:
    """Return what the run itself expected, less the time since; None while unknown."""
    if found.state != "running" or found.metrics is None or found.metrics.get("eta_s") is None:
        return None
    left: float = found.metrics["eta_s"] - (found.looked - found.metrics["updated"])
    return max(0.0, left)
