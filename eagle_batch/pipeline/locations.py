"""Where a name in a pipeline file points: a local path, a URL, a demo asset or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEMO_PREFIX = "demo:"
#: What stands before the number of rows in the path of an input that is made of nothing.
ROWS_PREFIX = "rows://"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_url(name: str) -> bool:
    """Tell whether the name has a scheme (`s3://...`), which makes it independent of any folder."""
    return "://" in name


def is_demo(name: str) -> bool:
    """Tell whether the name is one of the assets that `eagle-batch demo fetch` provides."""
    return name.startswith(DEMO_PREFIX)


def is_hub_id(name: str) -> bool:
    """Tell whether a model name that is no local folder can be a hub id (`owner/name`)."""
    return bool(_HUB_ID.fullmatch(name))


def locate(name: str, folder: Path) -> str:
    """Return a local path as an absolute one, relative to `folder`; URLs and demo names stay."""
    if is_url(name) or is_demo(name):
        return name
    return os.path.abspath(folder / Path(name).expanduser())  # noqa: PTH100 - keeps globs and links


def locate_model(name: str, folder: Path) -> str:
    """Return an absolute folder where the name is a local model, else the name (a hub id).

    A name like `owner/name` is local only if that folder exists beside the pipeline file.
    """
    local = locate(name, folder)
    return name if is_hub_id(name) and not Path(local).is_dir() else local
