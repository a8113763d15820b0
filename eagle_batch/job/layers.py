# ruff: noqa: SLF001 - a view is a store itself, one layer above another
"""Where a job's objects lie: at their places, or below `raw/` until duplicates are taken out.

A job that looks for duplicates has two layers, each with objects and records of its own, each made
and checked by the same code:

    raw/data, raw/errors, _job/commits    what the workers made, as in any other job
    data, errors, _job/finished           the same shards without duplicates, made by the driver

The second begins when the first is complete. What lies in it follows from the first alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_batch.data.forms import STAMPS
from eagle_batch.job.ledger import COMMITS
from eagle_batch.job.objects import DATA, ERRORS
from eagle_batch.job.store import Store

RAW = "raw"
#: Records of the objects without duplicates.
FINISHED = "_job/finished"


def has_layers(pipeline: Mapping[str, Any]) -> bool:
    """Tell whether a job, by its resolved pipeline, looks for duplicates."""
    return pipeline.get("deduplicate") is not None


def made_layer(store: Store, *, layers: bool) -> Store:
    """Return the store as the workers see it."""
    places = {DATA: f"{RAW}/{DATA}", ERRORS: f"{RAW}/{ERRORS}", STAMPS: f"{RAW}/stamps"}
    return View(store, places) if layers else store


def finished_layer(store: Store) -> Store:
    """Return the store with the records of the objects without duplicates."""
    return View(store, {COMMITS: FINISHED})


class View(Store):
    """A store in which some folders lie elsewhere."""

    def __init__(self, store: Store, folders: Mapping[str, str]) -> None:
        """Show each folder of `folders` at its name, from its place."""
        super().__init__(store.root, store.retry, store._sleep)
        self._store = store
        self._folders = dict(folders)

    def _there(self, key: str) -> str:
        for name, place in self._folders.items():
            if key == name or key.startswith(f"{name}/"):
                return place + key.removeprefix(name)
        return key

    def is_exclusive(self) -> bool:
        """What the store is."""
        return self._store.is_exclusive()

    def sweep(self) -> None:
        """Remove what the store left behind."""
        self._store.sweep()

    def _create(self, key: str, data: bytes) -> None:
        self._store._create(self._there(key), data)

    def _replace(self, key: str, data: bytes) -> None:
        self._store._replace(self._there(key), data)

    def _read(self, key: str) -> bytes:
        return self._store._read(self._there(key))

    def _list(self, prefix: str) -> dict[str, int]:
        place = self._there(prefix)
        found = self._store._list(place)
        return {prefix + key.removeprefix(place): size for key, size in found.items()}

    def _delete(self, key: str) -> None:
        self._store._delete(self._there(key))
