"""Where this machine keeps what can be fetched or made again."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "EAGLE_BATCH_CACHE"


def cache_folder() -> Path:
    """Return the folder that EAGLE_BATCH_CACHE names, else eagle-batch in the XDG cache."""
    own = os.environ.get(CACHE_VARIABLE)
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(shared) / "eagle-batch").expanduser()
