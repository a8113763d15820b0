"""`--set key=value`: changes to a pipeline file from the command line."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from eagle_batch.errors import ConfigError
from eagle_batch.pipeline.strict_yaml import parse_yaml

Key = tuple[str | int, ...]


def apply_overrides(
    data: dict[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[Key, ...]]:
    """Return a changed copy of `data` and the keys that were set; later overrides win.

    A key is dotted, with list indices (`stages.0.sampling.temperature`); the value is YAML. Raises
    ConfigError with every override that is malformed or does not fit the file.
    """
    changed = copy.deepcopy(data)
    keys: list[Key] = []
    problems: list[str] = []
    for override in overrides:
        try:
            keys.append(_apply(changed, override))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return changed, tuple(keys)


def dotted(key: Sequence[str | int]) -> str:
    """Return the key as it is written in messages and in `--set`."""
    names = (str(part) for part in key)
    return ".".join(name if name.isprintable() else ascii(name)[1:-1] for name in names)


def _apply(data: dict[str, Any], override: str) -> Key:
    name, separator, text = override.partition("=")
    parts = name.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(
            f"--set {override}: expected key=value with a dotted key, "
            "for example --set stages.0.sampling.temperature=0"
        )
    key: Key = ()
    node: Any = data
    for part, last in _marked(parts):
        step = _step(node, part, f"--set {override}: {dotted(key) or 'the file'}")
        key = (*key, step)
        if last:
            node[step] = parse_yaml(text, f"--set {name.strip()}")
        else:
            node = _descend(node, step)
    return key


def _marked(parts: list[str]) -> Iterator[tuple[str, bool]]:
    for position, part in enumerate(parts, start=1):
        yield part, position == len(parts)


def _descend(node: Any, step: str | int) -> Any:
    # A section may be written as `true`, for its defaults, or `false`, as `null`, for none.
    if isinstance(node, dict) and isinstance(node.get(step), bool | None):
        node[step] = {}
    return node[step]


def _step(node: Any, part: str, where: str) -> str | int:
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise ConfigError(f"{where} is {node!r}, which has no key {part!r}; set it as a whole")
    if not part.isascii() or not part.isdigit() or int(part) >= len(node):
        expected = f"an index from 0 to {len(node) - 1}" if node else "no index, the list is empty"
        raise ConfigError(f"{where} is a list of {len(node)}; found {part!r}, expected {expected}")
    return int(part)
