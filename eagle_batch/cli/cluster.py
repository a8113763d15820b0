"""Submitting to a Ray cluster from a machine that is no part of it: `submit --address`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from eagle_batch.errors import ConfigError, ExitCode, InterruptedRunError

if TYPE_CHECKING:
    from eagle_batch.job.cluster import Cluster, Ended
    from eagle_batch.pipeline import Pipeline

#: Where the address is looked up unless it is named, in this order; only http(s) is meant here.
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")

address_option = click.option(
    "--address", help="Ray's Jobs API, http://HEAD:8265; RAY_ADDRESS by default."
)


def jobs_api(address: str | None) -> str | None:
    """Return the address of a Jobs API, if the option or the environment names one."""
    if address is not None and not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address: found {address!r}; expected a URL such as http://HEAD:8265")
    named = (os.environ.get(name, "") for name in VARIABLES)
    found = (text for text in named if text.startswith(("http://", "https://")))
    return address or next(found, None)


def check_options(cluster: str | None, local: Mapping[str, object], *, detach: bool) -> None:
    """Refuse what has no effect where a run goes; raises ConfigError naming the options.

    local: options of a run on this machine's Ray, by name, and whether each was given.
    """
    given = [name for name, value in local.items() if value]
    if cluster is not None and given:
        raise ConfigError(
            f"{', '.join(given)}: found beside the cluster {cluster}, to which the run is sent; "
            "they are for runs on this machine. `eagle-batch status OUTPUT --json` reads a run "
            "from anywhere"
        )
    if cluster is None and detach:
        raise ConfigError(
            "--detach: found without a cluster; expected --address http://HEAD:8265, where a run "
            "goes on by itself"
        )


def submit_to(address: str, pipeline: Pipeline, *, detach: bool = False) -> Ended | None:
    """Run a pipeline on a cluster, or attach to its run, and pass its lines on.

    Returns None where the run goes on by itself. Raises what `Cluster` raises.
    """
    from eagle_batch.job.cluster import Cluster
    from eagle_batch.job.parcel import pack

    if pipeline.output.path.startswith("memory://"):
        raise ConfigError("output.path: memory ends with its process; name a bucket")
    cluster = Cluster(address)
    with tempfile.TemporaryDirectory(prefix="eagle-batch-") as folder:
        parcel = pack(pipeline, Path(folder))
        for note in parcel.notes:
            click.echo(f"note: {note}", err=True)
        submission = cluster.submit(parcel)
    how = "attached to" if submission.attached else "submitted"
    click.echo(f"{how} {submission.id} on {address}", err=True)
    if detach:
        click.echo(f"lines: eagle-batch logs {parcel.output} --address {address}", err=True)
        return None
    return _follow(cluster, submission.id, parcel.output)


def _follow(cluster: Cluster, submission: str, output: str) -> Ended:
    try:
        return cluster.follow(submission, lambda text: click.echo(text, nl=False))
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"{submission} goes on by itself; `eagle-batch logs {output} --address "
            f"{cluster.address}` attaches again, `eagle-batch stop {output}` ends it"
        ) from None


def exit_code(ended: Ended | None) -> ExitCode:
    """Return what `submit` and `logs` return for a run that made all rows."""
    return ExitCode.QUARANTINED if ended and ended.quarantined else ExitCode.COMPLETE


def _found(output: str, address: str | None) -> tuple[Cluster, str, str]:
    from eagle_batch.job.cluster import Cluster
    from eagle_batch.pipeline.locations import locate

    where = jobs_api(address)
    if where is None:
        raise ConfigError("--address: is missing; expected http://HEAD:8265, or RAY_ADDRESS set")
    cluster = Cluster(where)
    place = locate(output, Path.cwd())
    return cluster, cluster.find(place), place


@click.command(short_help="Show the lines of a run on a cluster.")
@address_option
@click.argument("output")
@click.pass_context
def logs(ctx: click.Context, *, output: str, address: str | None) -> None:
    """Show the lines of the run on a cluster that makes OUTPUT, until it ends."""
    cluster, submission, place = _found(output, address)
    ctx.exit(int(exit_code(_follow(cluster, submission, place))))


@click.command(short_help="End a run on a cluster; it can be resumed.")
@address_option
@click.argument("output")
def stop(*, output: str, address: str | None) -> None:
    """End the run on a cluster that makes OUTPUT; what is committed is kept."""
    cluster, submission, _ = _found(output, address)
    was_running = cluster.stop(submission)
    click.echo(f"{submission}: {'stopped' if was_running else 'had ended already'}")
