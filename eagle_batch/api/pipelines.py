"""Pipelines from Python: made of the same fields as a file, and submitted as the command does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eagle_batch.api.output import Output, read
from eagle_batch.api.ray_data import refuse_running_ray
from eagle_batch.pipeline import Pipeline as CheckedPipeline
from eagle_batch.pipeline import load_pipeline, parse_pipeline
from eagle_batch.pipeline.whole import settle_paths


def Pipeline(**fields: Any) -> CheckedPipeline:
    """Return a checked pipeline; fields are those of a pipeline file.

    Values are plain data, as YAML has them, or sections of `eagle_batch.pipeline`. Relative paths
    are relative to the working directory. Raises ConfigError with every problem, each naming its
    dotted key.
    """
    data = {name: _plain(value) for name, value in fields.items()}
    return settle_paths(parse_pipeline(data, "Pipeline(...)"), Path.cwd())


def load(path: str | Path, overrides: Sequence[str] = ()) -> CheckedPipeline:
    """Read a pipeline file; `overrides` are `key=value`, as `--set` takes them.

    Raises ConfigError with every problem of the file.
    """
    return load_pipeline(path, overrides)


def submit(pipeline: CheckedPipeline | str | Path, *, progress: bool = True) -> Output:
    """Run a pipeline, or what is left of it, and return its output.

    Uses the Ray cluster that RAY_ADDRESS names, else a Ray of its own. `progress` prints lines to
    stderr. Raises what the command turns into exit codes: ConfigError before anything was started,
    StoppedError, OutputBusyError, LedgerError and InterruptedRunError.
    """
    from rich.console import Console

    from eagle_batch.job.store import open_store
    from eagle_batch.job.submit import run_on_ray
    from eagle_batch.report.progress import PlainView
    from eagle_batch.report.write import recorded

    settled = load(pipeline) if isinstance(pipeline, str | Path) else pipeline
    refuse_running_ray()
    view = recorded(
        PlainView(Console(stderr=True, quiet=not progress)), open_store(settled.output.path)
    )
    try:
        run_on_ray(settled, view, sys.argv)
    finally:
        view.close()
    return read(settled.output.path)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
