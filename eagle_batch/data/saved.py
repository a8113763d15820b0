"""Folders that `datasets.save_to_disk` wrote: Arrow files, and a state that names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_batch.errors import DataError
from eagle_batch.pipeline.problems import suggestion

STATE, DICT = "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class Part:
    """The files of a saved data set, or of one of its splits."""

    files: list[dict[str, Any]]
    #: Whether there were several splits to choose from, or one whose name was given.
    chosen: bool


def part_of(fs: Any, folder: str, split: str | None) -> Part | None:
    """Return the data files of a saved data set in their order; None where a folder is none.

    Raises DataError for a split that is missing or must be named, and for a data set that holds
    its rows through a list of indices.
    """
    folder = folder.rstrip("/")
    if fs.exists(f"{folder}/{DICT}"):
        names = list(_json(fs, f"{folder}/{DICT}").get("splits", []))
        return Part(_files(fs, f"{folder}/{choose_split(folder, names, split)}"), chosen=True)
    if not fs.exists(f"{folder}/{STATE}"):
        return None
    own = _json(fs, f"{folder}/{STATE}").get("_split")
    if split is not None and split != own:
        raise DataError(f"{folder}: input.split: found {split!r}; expected {own or 'no split'}")
    return Part(_files(fs, folder), chosen=split is not None)


def choose_split(name: str, names: Sequence[str], split: str | None) -> str:
    """Return the split that is meant; raises DataError with those that there are."""
    if split is None and len(names) == 1:
        return names[0]
    if split in names:
        return str(split)
    found = "no split" if split is None else repr(split)
    hint = suggestion(split, names) if split else ""
    raise DataError(
        f"{name}: input.split: found {found}; {hint}expected one of {', '.join(names) or 'none'}"
    )


def _files(fs: Any, folder: str) -> list[dict[str, Any]]:
    state = _json(fs, f"{folder}/{STATE}")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: holds its rows through a file of indices, as old versions of datasets "
            "saved a selection; its rows lie scattered among others; load it with datasets and "
            "save it again with `flatten_indices().save_to_disk(...)`"
        )
    names = [item["filename"] for item in state.get("_data_files", [])]
    if not names:
        raise DataError(f"{folder}/{STATE}: names no data files")
    return [fs.info(f"{folder}/{name}") for name in names]


def _json(fs: Any, path: str) -> dict[str, Any]:
    try:
        data = json.loads(fs.cat_file(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: found {type(data).__name__}; expected a JSON object")
    return data
