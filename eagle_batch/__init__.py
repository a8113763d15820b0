"""Offline generation with EAGLE speculative decoding; `docs/python.md` is the way in from Python.

Nothing is imported before it is used, so that `import eagle_batch` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_batch.api.output import Output, read
    from eagle_batch.api.pipelines import Pipeline, load, submit
    from eagle_batch.api.ray_data import Generate

__all__ = ["Generate", "Output", "Pipeline", "load", "read", "submit"]

_PLACES = {
    "Generate": "ray_data",
    "Output": "output",
    "Pipeline": "pipelines",
    "load": "pipelines",
    "read": "output",
    "submit": "pipelines",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"eagle_batch.api.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
