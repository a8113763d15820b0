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
        values |= {"percent": percent(found), "eta_s": seconds_left(found)}
        click.echo(json.dumps(values))
        return
    for name, value in status_lines(found):
        click.echo(f"{name:<14}{value}")


def status_lines(found: JobStatus) -> list[tuple[str, str]]:
    """Return what is shown of a status, as name and value."""
    from eagle_batch.report.progress import duration

    finished = found.rows + found.quarantined
    lines = [
        ("job", f"{found.name}, {found.state}"),
        ("rows", f"{finished:,} of {found.units:,} committed ({percent(found)} %)"),
        ("quarantined", f"{found.quarantined:,}"),
        ("shards", f"{found.tasks_done:,} of {found.tasks:,}"),
    ]
    if found.host is not None:
        lines.append(("run by", f"process {found.pid} on {found.host}"))
    if found.silent_s is not None:
        lines.append(("last sign", f"{found.silent_s:.0f} s ago"))
    if found.metrics is not None:
        speed, length = found.metrics["tokens_per_s"], found.metrics["engine"]["acceptance_length"]
        lines.append(("speed", f"{speed:,.1f} tokens/s, {length:.2f} tokens a target pass"))
    left = seconds_left(found)
    if left is not None:
        lines.append(("left", f"about {duration(left)}"))
    return lines


def percent(found: JobStatus) -> int:
    """Return the share of the rows that is committed; 100 only when nothing is left."""
    finished = found.rows + found.quarantined
    most = 100 if found.tasks_done == found.tasks else 99
    return min(most, 100 * finished // max(1, found.units))


def seconds_left(found: JobStatus) -> float | None:
    """Estimate the seconds left by the rows of the later half of this run; None while unknown."""
    if found.state != "running" or found.metrics is None:
        return None
    series: list[dict[str, Any]] = found.metrics["series"]
    made = found.metrics["rows_this_run"]
    if len(series) < 2 or made == 0:
        return None
    first, last = series[len(series) // 2 - 1], series[-1]
    rate: float = (last["units"] - first["units"]) / max(1e-9, last["at"] - first["at"])
    if rate <= 0:
        return None
    earlier = sum(run["rows_this_run"] for run in found.metrics.get("earlier_runs", []))
    done: int = max(found.rows + found.quarantined, min(found.units, made + earlier))
    return max(0.0, (found.units - done) / rate)
