"""Typed reading of a head's config.json, with the nested blocks that the layouts use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_batch.errors import HeadError


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of a configuration; a null counts as absent, as it does for its writers."""

    values: dict[str, Any]
    nested: dict[str, Any]
    source: str
    is_speculators: bool

    @classmethod
    def of(cls, raw: dict[str, Any], source: str) -> Settings:
        """Hoist `transformer_layer_config` (speculators); keep `eagle_config` (ModelOpt)."""
        layer = raw.get("transformer_layer_config") or {}
        values = {k: v for k, v in (layer | raw).items() if v is not None}
        nested = {k: v for k, v in (raw.get("eagle_config") or {}).items() if v is not None}
        return cls(values, nested, source, "speculators_model_type" in raw)

    def optional(self, key: str) -> Any:
        """Return a value, from the top level or from `eagle_config`; None where it is absent."""
        return self.values.get(key, self.nested.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; HeadError where it is absent or something else."""
        value = self.optional(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HeadError(f"{self.source}: {key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self.optional(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HeadError(f"{self.source}: {key} is {value!r}, expected a number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.optional(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise HeadError(f"{self.source}: {key} is {value!r}, expected true or false")
        return value

    def agrees(self, key: str, *, present: bool) -> bool:
        """Return whether tensors are present, after checking that a flag says the same."""
        if self.flag(key, default=present) != present:
            found = "are there" if present else "are missing"
            raise HeadError(f"{self.source}: {key} is {not present}, but its tensors {found}")
        return present

    def must_be(self, key: str, wanted: Any) -> None:
        """Refuse a setting whose other values change the forward pass as we do not reproduce."""
        value = self.optional(key)
        if value is not None and value != wanted:
            raise HeadError(f"{self.source}: {key} is {value!r}, only {wanted!r} is supported")

    def ids(self, key: str) -> tuple[int, ...] | None:
        """Return a top-level list of layer ids."""
        return self._id_list(self.values.get(key), key)

    def nested_ids(self, key: str) -> tuple[int, ...] | None:
        """Return a list of layer ids from `eagle_config`."""
        return self._id_list(self.nested.get(key), f"eagle_config.{key}")

    def _id_list(self, value: Any, key: str) -> tuple[int, ...] | None:
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(k) is int for k in value):
            raise HeadError(f"{self.source}: {key} is {value!r}, expected a list of layer ids")
        return tuple(value)
