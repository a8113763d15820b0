"""The section `output`: where the rows go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle_batch.pipeline.base import Count, Section


class Output(Section):
    """Where the rows go."""

    path: str = Field(
        min_length=1, description="Folder or URL of the output; relative to the working directory."
    )
    rows_per_shard: Count = Field(default=32, description="Most input rows of one output file.")
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        default="zstd", description="Compression of the Parquet files."
    )
    token_ids: bool = Field(default=False, description="Also write the generated token ids.")
    spans: bool = Field(
        default=False, description="Also write which characters were drafted; `show` colours them."
    )
