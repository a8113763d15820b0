"""What the sections of a pipeline file have in common: strict, frozen, rules between fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eagle_batch.pipeline.problems import Rule, broken_rules

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]


def as_list(value: object) -> object:
    """Take one string as a list of one."""
    return (value,) if isinstance(value, str) else value


class Section(BaseModel):
    """A part of the file: no unknown keys, no conversions, checked rules between its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )
    #: Fields that hold a model and may be left out.
    _sections: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, data: Any) -> Any:
        """Take a section that is left out, or left empty, as one of defaults only."""
        if not isinstance(data, dict):
            return data
        empty: dict[str, Any] = {key: {} for key in cls._sections if data.get(key) is None}
        return {**data, **empty} if empty else data

    def _rules(self) -> list[tuple[bool, Rule]]:
        """Return each rule between fields as (is it broken, (keys, sentence))."""
        return []

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for is_broken, rule in self._rules() if is_broken]
        if broken:
            raise broken_rules(broken)
        return self
