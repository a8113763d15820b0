"""Modules of the user's own that a pipeline names, and the folders where they are found.

`python: my_checks:is_fine` is looked for where Python finds modules, then beside the pipeline file.
Workers look in the same folders as whoever read the file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_batch.pipeline.whole import Pipeline

_OURS = "eagle_batch"
#: Folder of the modules that come with Python.
_PYTHON = Path(importlib.util.__file__).parent.parent


def named_modules(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the top-level modules of all functions that a pipeline names."""
    names = [item.python for stage in pipeline.stages for item in stage.validators]
    return tuple(dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in names if name))


def look_beside(pipeline: Pipeline, folder: Path) -> None:
    """Let Python find the modules that lie in a folder, after all others."""
    if any(_lies_in(folder, name) for name in named_modules(pipeline)):
        look_in([str(folder)])


def look_in(folders: Iterable[str]) -> None:
    """Let Python find modules in these folders too."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def places(pipeline: Pipeline) -> dict[str, Path]:
    """Return where each module of the user's own lies: a file, or the folder of a package.

    One that is nowhere, or comes with Python or an installed package, is left out.
    """
    found = {name: _place(name) for name in named_modules(pipeline) if name != _OURS}
    return {name: place for name, place in found.items() if place is not None}


def _place(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin)
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    if installed or file.is_relative_to(_PYTHON):
        return None
    return file.parent if spec.submodule_search_locations else file


def folders(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the folders in which a worker has to look."""
    return tuple(dict.fromkeys(str(place.parent) for place in places(pipeline).values()))


def _lies_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
