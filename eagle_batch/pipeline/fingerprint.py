"""What makes two jobs the same job: the part of a pipeline that can change results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel

#: Keys whose change leaves every row as it was: a resume may change them.
_FREE_KEYS = frozenset(
    {
        ("name",),
        ("input", "path"),
        ("speculation",),
        ("engine", "slots"),
        ("engine", "prefill_chunk"),
        ("engine", "threads"),
        ("engine", "tensor_parallel"),
        ("workers",),
        ("output", "path"),
        ("output", "compression"),
        ("output", "row_group_rows"),
        ("output", "partition_by"),
        ("limits",),
        # The files' identities stand for them.
        ("decontaminate", "against"),
    }
)
#: How the identity of a target begins: a folder's content, in which its place has no part; the
#: commit of a hub id; what a store tells of the files below a URL.
CONTENT, COMMIT, STORED = "content ", "commit ", "stored "


@dataclass(frozen=True, slots=True)
class InputIdentity:
    """What tells whether an input file is still the same, wherever it lies."""

    name: str
    size: int
    rows: int
    #: The store's checksum, our own, or the time of change, in that order of preference.
    tag: str


def resolved(pipeline: BaseModel) -> dict[str, Any]:
    """Return the pipeline as plain data, every default written out; `parse_pipeline` reads it."""
    return pipeline.model_dump(mode="json")


def fingerprint(pipeline: BaseModel, inputs: Sequence[InputIdentity], target: str = "") -> str:
    """Return the SHA-256 of all that can change results: settings, identity of inputs and target.

    Speculation, the engine's size, workers, limits, compression, partitions and where things lie
    are left out. So are values that equal their default: a release may add a field without
    orphaning running jobs. Speculation counts where the engine is not ours.
    """
    settings = pipeline.model_dump(mode="json", exclude_defaults=True)
    kept = _without_free_keys(settings, _free_keys(settings))
    if not kept.get("engine"):
        kept.pop("engine", None)
    material: dict[str, Any] = {"inputs": [asdict(item) for item in inputs], "pipeline": kept}
    if target:
        material["target"] = target
    if target.startswith(CONTENT):
        kept["target"].pop("model")
    text = json.dumps(material, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def explain_difference(
    old_resolved: dict[str, Any],
    new_resolved: dict[str, Any],
    old_inputs: Sequence[InputIdentity] = (),
    new_inputs: Sequence[InputIdentity] = (),
    targets: tuple[str, str] = ("", ""),
) -> list[str]:
    """Return one line for each key, input file and target whose change can change results.

    `targets` are the identities of the target before and now.
    """
    free = _free_keys(old_resolved) & _free_keys(new_resolved)
    old = dict(_leaves(_without_free_keys(old_resolved, free)))
    new = dict(_leaves(_without_free_keys(new_resolved, free)))
    if all(target.startswith(CONTENT) for target in targets):
        old.pop("target.model", None), new.pop("target.model", None)
    lines = [
        f"{key}: was {_text(old, key)}, is now {_text(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]
    if targets[0] != targets[1] and not any(line.startswith("target.model:") for line in lines):
        was, now = (target[:20] or "unknown" for target in targets)
        lines.append(f"target.model: another model has this name (was {was}, is now {now})")
    return lines + _changed_inputs(old_inputs, new_inputs)


def _free_keys(settings: dict[str, Any]) -> frozenset[tuple[str, ...]]:
    """Return the free keys of a pipeline.

    The text of other engines than ours knows the draft; names of JSON lines end by the compression.
    """
    own = (settings.get("engine") or {}).get("kind", "own") == "own"
    lines = (settings.get("output") or {}).get("format") == "jsonl"
    bound = set() if own else {("speculation",)}
    return _FREE_KEYS - bound - ({("output", "compression")} if lines else set())


def _without_free_keys(
    data: dict[str, Any], free: frozenset[tuple[str, ...]], prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        path = (*prefix, key)
        if path not in free:
            kept[key] = _without_free_keys(value, free, path) if isinstance(value, dict) else value
    return kept


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    children: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, dict) and value:
        children = iter(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        children = iter(enumerate(value))
    if children is None:
        yield prefix, value
        return
    for key, child in children:
        yield from _leaves(child, f"{prefix}.{key}" if prefix else str(key))


def _text(leaves: dict[str, Any], key: str, limit: int = 100) -> str:
    if key not in leaves:
        return "absent"
    text = json.dumps(leaves[key], ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _changed_inputs(old: Sequence[InputIdentity], new: Sequence[InputIdentity]) -> list[str]:
    before = {item.name: item for item in old}
    after = {item.name: item for item in new}
    lines = [
        f"input.path: file {name} {_change(before.get(name), after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    if not lines and [item.name for item in old] != [item.name for item in new]:
        lines.append("input.path: the same files come in another order")
    return lines


def _change(old: InputIdentity | None, new: InputIdentity | None) -> str:
    if old is None:
        return "is new"
    if new is None:
        return "is gone"
    parts = [
        f"{what}: was {was}, is now {now}"
        for what, was, now in (
            ("size", old.size, new.size),
            ("rows", old.rows, new.rows),
            ("content tag", old.tag, new.tag),
        )
        if was != now
    ]
    return "changed (" + "; ".join(parts) + ")"
