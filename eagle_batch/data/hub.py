"""Data sets of the Hugging Face hub: which files make a configuration and a split.

The card's `configs` decide where there are any. Else the names of files and folders do, by the
conventions of `datasets`: `data/train-00000-of-00002.parquet`, `test.jsonl`, `validation/a.csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from pathlib import PurePosixPath
from typing import Any

import yaml

from eagle_batch.data.files import FoundFile, describe_file, format_of
from eagle_batch.data.saved import choose_split
from eagle_batch.errors import DataError
from eagle_batch.pipeline.problems import suggestion

PREFIX = "hf://datasets/"
_CARD = "README.md"
_DEFAULT = "default"
#: Words that name a split, alone or between other characters that are no letters.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NUMBERED = re.compile(r"(?:^|/)([\w.]+)-\d{5}-of-\d{5,}")

#: split -> paths in the repository.
Splits = dict[str, list[str]]


def is_data_set(pattern: str) -> bool:
    """Tell whether a path is a whole data set, `hf://datasets/owner/name`, and no file of one."""
    inner = pattern.rstrip("/").removeprefix(PREFIX)
    return pattern.startswith(PREFIX) and 1 <= len(inner.split("/")) <= 2


def find(
    pattern: str, wanted: str, config: str | None, split: str | None, revision: str | None
) -> list[FoundFile]:
    """Return the files of one split, pinned to the commit that the revision now names.

    Raises DataError where the data set has no such configuration or split, or several and none is
    named.
    """
    import fsspec

    name, _, inline = pattern.rstrip("/").removeprefix(PREFIX).partition("@")
    if inline and revision:
        raise DataError(
            f"{pattern}: input.revision: found {revision!r} beside {inline!r} in the path; "
            "expected one of them"
        )
    fs = fsspec.filesystem("hf")
    commit = _commit(name, inline or revision)
    root = f"datasets/{name}@{commit}"
    entries = fs.find(root, detail=True)
    infos = {path.removeprefix(f"{root}/"): info for path, info in entries.items()}
    card = fs.cat_file(f"{root}/{_CARD}").decode("utf-8", "replace") if _CARD in infos else ""
    splits = _splits(name, card, sorted(infos), config)
    chosen = splits[choose_split(pattern, list(splits), split)]
    return [describe_file(fs, infos[path], pattern, wanted) for path in sorted(chosen)]


def _commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(name, revision=revision).sha)


def _splits(name: str, card: str, paths: Sequence[str], config: str | None) -> Splits:
    configs = card_configs(card)
    if not configs:
        if config not in {None, _DEFAULT}:
            raise DataError(f"{name}: input.config: found {config!r}; its card names none")
        splits = splits_by_name(paths)
    else:
        splits = splits_of_config(_choose_config(name, configs, config), paths)
    if not splits:
        raise DataError(f"{name}: holds no .parquet, .arrow, .jsonl or .csv file of a split")
    return splits


def card_configs(card: str) -> list[dict[str, Any]]:
    """Return the `configs` of a data set card that name data files or a folder."""
    parts = card.split("---")
    if not card.lstrip().startswith("---") or len(parts) < 3:
        return []
    try:
        values = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise DataError(f"{_CARD}: its front matter is not YAML: {error}") from error
    found = values.get("configs", []) if isinstance(values, dict) else []
    return [
        item for item in found if isinstance(item, dict) and {"data_files", "data_dir"} & {*item}
    ]


def _choose_config(
    name: str, configs: Sequence[dict[str, Any]], config: str | None
) -> dict[str, Any]:
    names = [str(item.get("config_name", _DEFAULT)) for item in configs]
    by_default = [n for n, item in zip(names, configs, strict=True) if item.get("default")]
    if config is None:
        config = next((n for n in (*by_default, _DEFAULT) if n in names), None)
        config = names[0] if config is None and len(names) == 1 else config
    if config not in names:
        found = "none" if config is None else repr(config)
        hint = suggestion(config, names) if config else ""
        raise DataError(
            f"{name}: input.config: found {found}; {hint}expected one of {', '.join(names)}"
        )
    return configs[names.index(config)]


def splits_of_config(config: dict[str, Any], paths: Sequence[str]) -> Splits:
    """Return the files that a configuration of the card names, by split."""
    folder = str(config.get("data_dir", "")).strip("/")
    inside = [path for path in paths if path.startswith(folder + "/")] if folder else list(paths)
    given = config.get("data_files")
    if given is None:
        return splits_by_name(inside)
    items = given if isinstance(given, list) else [given]
    splits: Splits = {}
    for item in items:
        entry = item if isinstance(item, dict) else {"path": item}
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        found = splits.setdefault(str(entry.get("split", "train")), [])
        for pattern in patterns:
            found += _matching(f"{folder}/{pattern}" if folder else str(pattern), paths)
    return {split: found for split, found in splits.items() if found}


def _matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that a glob names; `*` stays inside a folder, `**` does not."""
    inner = re.sub(r"\*\*/?", "\0", pattern.removeprefix("./"))
    parts = (translate(part)[4:-3].replace(".*", "[^/]*") for part in inner.split("\0"))
    wanted = re.compile("(?:.*/)?".join(parts) if "\0" in inner else next(parts))
    return [path for path in paths if wanted.fullmatch(path) or path.startswith(pattern + "/")]


def splits_by_name(paths: Sequence[str]) -> Splits:
    """Return the data files by the split that their names tell; all are `train` where none does."""
    data = [path for path in paths if _is_data(path)]
    numbered = [(path, _NUMBERED.search(path)) for path in data]
    if data and all(match for _, match in numbered):
        return _grouped((path, match[1]) for path, match in numbered if match)
    told = [(path, _told_split(path)) for path in data]
    if not any(split for _, split in told):
        return _grouped((path, "train") for path in data)
    return _grouped((path, split) for path, split in told if split)


def _is_data(path: str) -> bool:
    hidden = any(part.startswith(("_", ".")) for part in PurePosixPath(path).parts)
    return format_of(path) is not None and not path.lower().endswith(".json") and not hidden


def _told_split(path: str) -> str | None:
    words = re.split(r"[^a-z]+", path.lower())
    found = (split for split, names in _WORDS.items() if any(word in names for word in words))
    return next(found, None)


def _grouped(pairs: Iterable[tuple[str, str]]) -> Splits:
    splits: Splits = {}
    for path, split in pairs:
        splits.setdefault(split, []).append(path)
    return splits
