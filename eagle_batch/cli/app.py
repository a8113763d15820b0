"""The commands. The only place where errors become exit codes.

Everything heavy is imported inside the command that needs it: `--help` is instant, and `plan`,
`validate` and `status` load neither torch nor ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle_batch.cli.cluster import address_option, check_options, exit_code, jobs_api, submit_to
from eagle_batch.errors import EagleBatchError, ExitCode

if TYPE_CHECKING:
    from eagle_batch.data.describe import PlanSummary
    from eagle_batch.job.job import JobResult
    from eagle_batch.job.verify import VerifyReport
    from eagle_batch.pipeline import Pipeline
    from eagle_batch.report.recorder import Recorder

#: Command groups that have a module of their own; registered where that module exists.
LAZY = {
    "heads": ("eagle_batch.cli.heads", "heads"),
    "bench": ("eagle_batch.cli.bench", "bench"),
    "preview": ("eagle_batch.cli.preview", "preview"),
    "estimate": ("eagle_batch.cli.preview", "estimate"),
    "push": ("eagle_batch.cli.push", "push"),
    "openai-files": ("eagle_batch.cli.openai", "openai_files"),
    "reference": ("eagle_batch.cli.show", "reference"),
    "report": ("eagle_batch.cli.show", "report"),
    "show": ("eagle_batch.cli.show", "show"),
    "status": ("eagle_batch.cli.status", "status"),
    "jobs": ("eagle_batch.cli.jobs", "jobs"),
    "logs": ("eagle_batch.cli.cluster", "logs"),
    "stop": ("eagle_batch.cli.cluster", "stop"),
}


class LazyGroup(click.Group):
    """A group that imports some of its commands only when they are called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        lazy = [name for name, (module, _) in LAZY.items() if importlib.util.find_spec(module)]
        return sorted([*super().list_commands(ctx), *lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if need be."""
        module, attribute = LAZY.get(cmd_name, ("", ""))
        if not module or importlib.util.find_spec(module) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error that is meant for people becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except EagleBatchError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(int(error.exit_code))
        except KeyboardInterrupt:
            click.echo("Error: interrupted", err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="eagle-batch", prog_name="eagle-batch")
def main() -> None:
    """Generate text over a data set with speculative decoding, on one machine or a Ray cluster.

    Exit codes: 0 complete, 2 bad input, 3 complete with quarantined rows, 4 stopped by errors,
    5 another run holds the output, 130 interrupted.
    """


def pipeline_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Add what `submit`, `plan` and `validate` have in common: the file and its overrides."""
    decorators = (
        click.option(
            "--output",
            metavar="PATH",
            help="Where the results go; short for --set output.path=PATH.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one field of the pipeline, e.g. --set samples=4. Can be repeated.",
        ),
        click.argument("pipeline", type=click.Path(dir_okay=False)),
    )
    for decorator in decorators:
        command = decorator(command)
    return command


def load(path: str, overrides: tuple[str, ...], output: str | None) -> Pipeline:
    """Read a pipeline file with its overrides; raises ConfigError."""
    from eagle_batch.pipeline import load_pipeline

    extra = () if output is None else (f"output.path={output}",)
    return load_pipeline(path, (*overrides, *extra))


@main.command()
@pipeline_arguments
@click.option("--dashboard", is_flag=True, help="Start Ray's dashboard too and print its address.")
@click.option("--plain", "form", flag_value="plain", help="Print plain lines on a terminal too.")
@click.option("--json", "form", flag_value="json", help="Print JSON lines, for programs.")
@click.option(
    "--only-errors",
    is_flag=True,
    help="Replay the quarantined rows of a complete output into OUTPUT-replay.",
)
@address_option
@click.option("--detach", is_flag=True, help="Return at once where a cluster runs the job.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append what happens to this file, as JSON lines with job, worker and shard ids.",
)
@click.pass_context
def submit(  # noqa: PLR0913 - one parameter an option
    ctx: click.Context,
    *,
    pipeline: str,
    overrides: tuple[str, ...],
    output: str | None,
    dashboard: bool,
    form: str | None,
    only_errors: bool,
    address: str | None,
    detach: bool,
    log: Path | None,
) -> None:
    """Run PIPELINE, a YAML file, or what is left of it.

    The same command again resumes a run that was interrupted, and does nothing for a complete one.
    """
    from rich.console import Console

    from eagle_batch.job.submit import run_on_ray

    cluster = jobs_api(address)
    local = {"--json": form == "json", "--log": log, "--dashboard": dashboard}
    check_options(cluster, local, detach=detach)
    loaded = load(pipeline, overrides, output)
    if only_errors:
        from eagle_batch.job.replay import replay

        quarantined = replay(loaded)
        if quarantined is None:
            click.echo(f"nothing to replay: {loaded.output.path} has no quarantined rows")
            return
        loaded = quarantined
    if cluster is not None:
        ctx.exit(int(exit_code(submit_to(cluster, loaded, detach=detach))))
    console = Console()
    view = _make_view(loaded, console, form)
    try:
        result = run_on_ray(loaded, view, sys.argv, dashboard=dashboard, log=log)
    finally:
        view.close()
    if form == "json":
        click.echo(json.dumps({"event": "result", **_result_numbers(result)}))
    else:
        _show_result(console, result, loaded)
    ctx.exit(int(ExitCode.QUARANTINED if result.quarantined else ExitCode.COMPLETE))


def _make_view(pipeline: Pipeline, console: Any, form: str | None) -> Recorder:
    """Return the view that was asked for, recorded for the report that is made at the end."""
    from eagle_batch.job.store import open_store
    from eagle_batch.report.progress import JsonView, make_view
    from eagle_batch.report.write import recorded

    plain = form == "plain"
    view = JsonView(console) if form == "json" else make_view(console, plain=plain)
    return recorded(view, open_store(pipeline.output.path))


def _result_numbers(result: JobResult) -> dict[str, Any]:
    names = ("output", "units", "rows", "quarantined", "dropped", "already_complete")
    return {name: getattr(result, name) for name in names}


def _show_result(console: Any, result: JobResult, pipeline: Pipeline) -> None:
    from eagle_batch.data.forms import make_form
    from eagle_batch.report.metrics import JobMetrics, metrics_table

    if result.metrics is not None:
        console.print(metrics_table(JobMetrics.from_document(result.metrics)))
    what = "was complete already; nothing was started" if result.already_complete else "complete"
    dropped = f", {result.dropped} dropped" if result.dropped else ""
    counts = f"{result.rows} of {result.units} rows, {result.quarantined} quarantined{dropped}"
    click.echo(f"{what}: {counts}")
    ending = make_form(pipeline.output).ending
    click.echo(f"rows:        {result.output}/data/*{ending}")
    if result.quarantined or result.dropped:
        what = "quarantined:" if result.quarantined else "dropped:    "
        click.echo(f"{what} {result.output}/errors/*{ending}")
    if result.metrics is not None:
        click.echo(f"report:      {result.output}/report.html")
        if result.metrics.get("adaptation", {}).get("head"):
            click.echo(f"head:        {result.output}/head (speculation.head of other pipelines)")


@main.command(short_help="Check a pipeline and its input; nothing is started.")
@pipeline_arguments
def validate(*, pipeline: str, overrides: tuple[str, ...], output: str | None) -> None:
    """Check PIPELINE, a YAML file, and its input; every problem at once, nothing is started."""
    from eagle_batch.data.describe import check

    for note in check(load(pipeline, overrides, output)):
        click.echo(f"{pipeline}: note: {note}", err=True)
    click.echo(f"{pipeline}: valid")


@main.command(short_help="Show what would run; nothing is started.")
@pipeline_arguments
def plan(*, pipeline: str, overrides: tuple[str, ...], output: str | None) -> None:
    """Show what PIPELINE would run: shards, rows, models, output; nothing is started."""
    from eagle_batch.data.describe import describe

    loaded = load(pipeline, overrides, output)
    for name, value in _plan_lines(loaded, describe(loaded)):
        click.echo(f"{name:<14}{value}")


def _plan_lines(pipeline: Pipeline, summary: PlanSummary) -> list[tuple[str, str]]:
    tree = pipeline.speculation
    shape = f"{tree.tree} tree, depth {tree.depth}, width {tree.width}, {tree.nodes} nodes"
    drafts = tree.head or tree.draft
    head = "none" if drafts is None else f"{drafts} ({shape})"
    if tree.adapt is not None:
        begin = "n-grams" if drafts is None else head
        head = f"{begin} at first, then one trained beside the job ({shape})"
    files = ", ".join(file.path for file in summary.files[:5])
    more = f" and {len(summary.files) - 5} more" if len(summary.files) > 5 else ""
    return [
        ("pipeline", f"{summary.name}, fingerprint {summary.fingerprint[:16]}"),
        ("input", f"{summary.rows:,} rows in {len(summary.files)} files: {files}{more}"),
        *([("", summary.account)] if summary.account else []),
        ("output rows", f"{summary.output_rows:,} ({summary.samples} for each input row)"),
        ("shards", f"{summary.shards:,} of at most {summary.rows_per_shard:,} rows"),
        ("target", f"{pipeline.target.model}, {pipeline.target.dtype}"),
        ("head", head),
        ("workers", summary.workers),
        ("stages", " -> ".join(summary.stages)),
        ("output", f"{summary.output_path}/{summary.first_key} ... {summary.last_key}"),
        ("columns", ", ".join(f"{name} {kind}" for name, kind in summary.output_columns)),
        *(("note", note) for note in summary.notes),
        ("first prompt", "\n" + summary.first_prompt),
        *((f"then {name}", "\n" + prompt) for name, prompt in summary.later_prompts),
    ]


@main.command(short_help="Prove that no row is lost, twice or hidden.")
@click.argument("output")
@click.pass_context
def verify(ctx: click.Context, *, output: str) -> None:
    """Prove that no row of an OUTPUT is lost, twice or hidden; exit code 4 where that fails."""
    from eagle_batch.job.verify import verify as verify_output

    report = verify_output(output)
    for finding in report.findings:
        click.echo(str(finding))
    click.echo(_verdict(report))
    for line in filter(None, (report.partitions, report.account)):
        click.echo(line)
    if report.not_compared:
        click.echo(f"ids were not compared with the input: {report.not_compared}")
    ctx.exit(int(ExitCode.COMPLETE if report.ok else ExitCode.STOPPED))


def _verdict(report: VerifyReport) -> str:
    sign = "=" if report.balanced else "!="
    dropped = f" + {report.dropped} dropped" if report.dropped else ""
    balance = (
        f"{report.rows_in} in {sign} {report.rows_out} out + {report.quarantined} quarantined"
        f"{dropped}"
    )
    what = "whole" if report.ok else f"NOT whole, {len(report.findings)} findings"
    return f"{report.output}: {what}: {balance}; {report.objects} objects, {report.tokens} tokens"


@main.group()
def demo() -> None:
    """The demo target, a small model for trying things out."""


@demo.command(short_help="Download and convert the demo target, once.")
@click.argument("name", required=False)
def fetch(*, name: str | None) -> None:
    """Download and convert the demo target NAME, unless this machine has it already."""
    from eagle_batch import demo as demo_targets

    name = name or demo_targets.DEFAULT
    click.echo(f"{demo_targets.PREFIX}{name} is in {demo_targets.fetch(name)}")
