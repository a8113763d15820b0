"""The section `output`: where the rows go, and in which form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Count, Section, Strings, as_list
from eagle_batch.pipeline.problems import Rule

#: Form -> the compressions that it has.
COMPRESSIONS = {
    "parquet": ("zstd", "snappy", "gzip", "lz4", "none"),
    "arrow": ("zstd", "lz4", "none"),
    "jsonl": ("zstd", "gzip", "none"),
}


class Output(Section):
    """Where the rows go."""

    path: str = Field(
        min_length=1, description="Folder or URL of the output; relative to the working directory."
    )
    format: Literal["parquet", "arrow", "jsonl"] = Field(
        default="parquet", description="Parquet, Arrow IPC or JSON lines."
    )
    rows_per_shard: Count = Field(default=32, description="Most input rows of one output file.")
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        default="zstd",
        description="Compression of the files; arrow has zstd, lz4 and none, jsonl zstd, gzip and "
        "none.",
    )
    row_group_rows: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="Most rows of a row group, parquet only; null: one group a file."
    )
    partition_by: Annotated[Strings, BeforeValidator(as_list)] = Field(
        default=(),
        max_length=3,
        description="Columns by whose values a complete job lays out its rows once more, in "
        "by/COLUMN=VALUE/.",
    )
    token_ids: bool = Field(
        default=False,
        description="Also write the token ids of prompts and texts; heads are trained on them.",
    )
    logprobs: bool | Annotated[int, Field(ge=1, le=20)] = Field(
        default=False,
        description="Also write the log-probability of each generated token; a number: and of so "
        "many best ones at its place.",
    )
    spans: bool = Field(
        default=False, description="Also write which characters were drafted; `show` colours them."
    )

    @property
    def best_tokens(self) -> int | None:
        """How many best tokens are reported beside the chosen one; None where nothing is."""
        if self.logprobs is False:
            return None
        return 0 if self.logprobs is True else self.logprobs

    def _rules(self) -> list[tuple[bool, Rule]]:
        has = COMPRESSIONS[self.format]
        found = f"found {self.compression} and {self.format}; expected one of {', '.join(has)}"
        groups = f"found {self.row_group_rows} and {self.format}, which has no row groups"
        return [
            (self.compression not in has, (("compression", "format"), found)),
            (
                self.row_group_rows is not None and self.format != "parquet",
                (("row_group_rows", "format"), groups),
            ),
        ]
