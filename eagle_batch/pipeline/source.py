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
    format: Literal["auto", "parquet", "arrow", "jsonl"] = Field(
        default="auto", description="Format of the files; auto goes by their names."
    )
    id: str | None = Field(
        default=None,
        description="Column that names a row; null derives '<file name>:<row number>'.",
    )
    columns: Strings | None = Field(
        default=None, description="Source columns that are passed through; null passes all."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take the first N rows; null takes all."
    )
