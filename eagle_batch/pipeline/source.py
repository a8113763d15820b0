"""The section `input`: where the rows come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eagle_batch.pipeline.base import Section, Strings, as_list
from eagle_batch.pipeline.locations import ROWS_PREFIX
from eagle_batch.pipeline.problems import Rule


class Input(Section):
    """Where the rows come from."""

    path: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(
            min_length=1,
            strict=False,
            description="File, folder, glob or URL, or a list; relative to the pipeline file.",
        ),
        BeforeValidator(as_list),
    ]
    rows: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Instead of a path: so many rows made of nothing, with the column `id` alone.",
    )
    format: Literal["auto", "parquet", "arrow", "jsonl", "csv", "openai_batch"] = Field(
        default="auto",
        description="Format of the files; auto goes by their names. openai_batch are chat requests "
        "as JSON lines, whose parameters become columns.",
    )
    delimiter: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="What separates the cells of CSV; null: a comma, or a tab in .tsv.",
    )
    config: str | None = Field(
        default=None, description="Configuration of a hub data set; null: its default."
    )
    split: str | None = Field(
        default=None,
        description="Split of a hub data set or of a folder saved by datasets; null: the only one.",
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a hub data set; null: main."
    )
    id: str | None = Field(
        default=None,
        description="Column that names a row; null derives '<file name>:<row number>'.",
    )
    columns: Strings | None = Field(
        default=None, description="Source columns that are passed through; null passes all."
    )
    where: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja expression over the columns; rows for which it is false are not taken.",
    )
    sample: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Take so many rows by chance, or a share below 1; the seed decides which.",
    )
    shuffle: bool = Field(
        default=False,
        description="Take row groups, and the rows inside each, in an order by the seed.",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take the first N of these rows; null takes all."
    )

    @model_validator(mode="before")
    @classmethod
    def _invent(cls, data: Any) -> Any:
        """Give rows that are made of nothing the path and the id that stand for them."""
        if not isinstance(data, dict) or type(data.get("rows")) is not int:
            return data
        given = {"path": (f"{ROWS_PREFIX}{data['rows']}",), "id": "id"}
        return {**given, **{name: value for name, value in data.items() if value is not None}}

    def _rules(self) -> list[tuple[bool, Rule]]:
        both = self.rows is not None and list(self.path) != [f"{ROWS_PREFIX}{self.rows}"]
        wrong = self.rows is None and any(path.startswith(ROWS_PREFIX) for path in self.path)
        return [
            (both, (("path", "rows"), "found both; expected exactly one of path and rows")),
            (wrong, (("path",), f"found {ROWS_PREFIX}; expected `rows` with their number")),
        ]

    @property
    def selects(self) -> bool:
        """Whether which rows are taken depends on more than their number."""
        return self.where is not None or self.sample is not None or self.shuffle
