"""The section `input`: where the rows come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Section, Strings, as_list


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
    format: Literal["auto", "parquet", "arrow", "jsonl", "csv"] = Field(
        default="auto", description="Format of the files; auto goes by their names."
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

    @property
    def selects(self) -> bool:
        """Whether which rows are taken depends on more than their number."""
        return self.where is not None or self.sample is not None or self.shuffle
