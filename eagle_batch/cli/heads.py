"""The `heads` commands: train an EAGLE head for a target, check one against its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from eagle_batch.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from eagle_batch.training.check import Decoded, HeadReport
    from eagle_batch.training.config import TrainingConfig
    from eagle_batch.training.trainer import Progress, TrainingResult

#: Steps between lines where there is no terminal for a progress bar.
_LINE_EVERY = 20


@click.group()
def heads() -> None:
    """Train and check EAGLE heads."""


@heads.command(short_help="Train a head, or resume its training.")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plain", is_flag=True, help="Print plain lines even on a terminal.")
def train(*, config: Path, plain: bool) -> None:
    """Train a head as CONFIG, a YAML file, says; the same command resumes an interrupted run.

    Writes `head/` (official EAGLE layout), `head-speculators/`, `curve.jsonl`, `curve.svg` and
    `state/` below the file's `out`.
    """
    settings = load_training_config(config)
    target = _model_folder(settings.target, config.parent)
    result = _train(settings, config.parent, target, plain=plain)
    click.echo(f"head: {result.head}")
    click.echo(f"{result.steps} steps in {result.seconds / 60:.1f} minutes of training")
    click.echo(f"accepted by position, held out: {_shares(result.best.by_position)}")
    _say_chain_length(result.best.chain_length)


@heads.command(short_help="Load a head strictly and measure its acceptance.")
@click.argument("head")
@click.argument("target")
@click.option(
    "--texts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Parquet file with prompt_token_ids and completion_token_ids of the target's own texts.",
)
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON lines with `prompt` or `turns`, which the target answers with this head.",
)
@click.option("--rows", default=64, show_default=True, help="Most texts or prompts that are read.")
def check(
    *, head: str, target: str, texts: Path | None, prompts: tuple[Path, ...], rows: int
) -> None:
    """Load HEAD strictly, compare it with TARGET, and measure its acceptance.

    A head that an engine reads wrongly still loads and runs; only poor acceptance shows it. With
    --texts or --prompts the neighbouring choices of aux layers are tried too.
    """
    from eagle_batch.bench.prompts import questions
    from eagle_batch.training.check import check_head

    asked = [text for path in prompts for text in questions(path, rows)]
    folder = _model_folder(target, Path())
    report = check_head(head, folder, texts=texts, prompts=asked, rows=rows)
    config = report.config
    layers = ", ".join(map(str, config.aux_layers)) or "the last hidden state"
    click.echo(f"{config.kind}: {report.parameters / 1e6:.1f} M parameters, fits {target}")
    click.echo(f"features: {layers}; drafts {config.draft_vocab} of {config.vocab} tokens")
    if report.acceptance is not None:
        click.echo(f"accepted by position: {_shares(report.acceptance.by_position)}")
        _say_chain_length(report.acceptance.chain_length)
    if report.decoded is not None:
        _say_decoded(report.decoded)
    _warn(report)


def _say_decoded(decoded: Decoded) -> None:
    click.echo(
        f"{decoded.prompts} prompts answered greedily, {decoded.tokens} tokens: "
        f"{decoded.acceptance_length:.2f} tokens a pass with chains of {len(decoded.by_position)}"
    )
    click.echo(f"accepted by position: {_shares(decoded.by_position)}")


def _warn(report: HeadReport) -> None:
    if report.better is not None:
        layers, theirs, ours = report.better
        click.echo(
            f"warning: with aux layers {', '.join(map(str, layers))} the first draft is accepted "
            f"{theirs:.0%} of the time, with the head's own {ours:.0%}: its config counts layers "
            "otherwise; set eagle_aux_hidden_state_layer_ids in its config.json to the better ones"
        )
    if report.suspicious:
        click.echo(
            "warning: the first draft is accepted less than 30% of the time: the head was trained "
            "with other aux layers, another chat template or another target, or hardly trained"
        )


@heads.command(short_help="Explain a measured speed-up by acceptance and costs.")
@click.argument("bench", type=click.Path(dir_okay=False, path_type=Path))
def explain(*, bench: Path) -> None:
    """Explain the speed-ups in BENCH, a file of `bench --json`, by acceptance and costs.

    A draft makes L / (d + v) times the tokens of plain decoding, L being the tokens of a round,
    d + v what it costs in plain passes. Beside it stands what was measured.
    """
    import json

    from eagle_batch.bench.explain import accounts
    from eagle_batch.bench.explain import explain as lines

    try:
        found = accounts(json.loads(bench.read_text("utf-8"))["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{bench}: expected what `eagle-batch bench PIPELINE --json FILE` writes ({error})"
        ) from error
    if not found:
        raise ConfigError(f"{bench}: plain decoding alone was measured; bench with a head")
    for account in found:
        for line in lines(account):
            click.echo(line)


def load_training_config(path: Path) -> TrainingConfig:
    """Read a training file; raises ConfigError that lists every problem with its key."""
    from eagle_batch.pipeline.problems import explain_problems
    from eagle_batch.pipeline.strict_yaml import read_yaml
    from eagle_batch.training.config import TrainingConfig

    raw = read_yaml(path, str(path), "a training file")
    try:
        return TrainingConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain_problems(error, TrainingConfig, raw, str(path))) from None


def _model_folder(name: str, base: Path) -> str:
    from eagle_batch import demo
    from eagle_batch.pipeline.locations import is_demo, locate_model

    if is_demo(name):
        return str(demo.resolve(name.removeprefix(demo.PREFIX)))
    return locate_model(name, base)


def _train(settings: TrainingConfig, base: Path, target: str, *, plain: bool) -> TrainingResult:
    from rich import progress as rich_progress
    from rich.console import Console

    train_head = _on_ray if settings.workers > 1 else _in_this_process
    console = Console()
    if plain or not console.is_terminal:
        return train_head(settings, base=base, target=target, on_file=_say_file, on_step=_say_step)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[detail]}"),
    )
    with rich_progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("reading", total=None, detail="hidden states of the target")

        def show_file(path: Path, tokens: int) -> None:
            bar.update(task, detail=f"{path.name}: {tokens} tokens")

        def show_step(progress: Progress) -> None:
            _show(bar, task, progress)

        return train_head(settings, base=base, target=target, on_file=show_file, on_step=show_step)


def _in_this_process(settings: TrainingConfig, **where: Any) -> TrainingResult:
    from eagle_batch.training.run import train_head

    return train_head(settings, **where)


def _on_ray(settings: TrainingConfig, **where: Any) -> TrainingResult:
    from eagle_batch.job.training import train_on_ray

    return train_on_ray(settings, **where, say=click.echo)


def _show(bar: Bar, task: TaskID, progress: Progress) -> None:
    bar.update(
        task,
        description="training",
        completed=progress.step,
        total=progress.steps,
        detail=_describe(progress),
    )


def _say_file(path: Path, tokens: int) -> None:
    click.echo(f"{path.name}: hidden states of {tokens} tokens")


def _say_step(progress: Progress) -> None:
    if progress.step % _LINE_EVERY == 0 or progress.step == progress.steps:
        click.echo(f"step {progress.step}/{progress.steps}: {_describe(progress)}")


def _describe(progress: Progress) -> str:
    text = f"loss {progress.loss:.3f}"
    if progress.acceptance is None:
        return text
    length = progress.acceptance.chain_length
    chain = "" if length is None else f", {length:.2f} tokens a pass"
    return f"{text}, accepted {_shares(progress.acceptance.by_position)}{chain}"


def _say_chain_length(length: float | None) -> None:
    if length is not None:
        click.echo(f"greedy texts: {length:.2f} tokens a target pass")


def _shares(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
