"""The sections `deduplicate` and `decontaminate`: what a row must be like beside the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Section, as_list

Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, strict=False)
]


class Deduplicate(Section):
    """Rows that say the same as an earlier one are left out, over the whole job."""

    column: str = Field(min_length=1, description="Stage or text column that is compared.")
    method: Literal["exact", "minhash"] = Field(
        default="exact",
        description="exact compares the texts; minhash estimates how many runs of five words they "
        "share.",
    )
    threshold: float = Field(
        default=0.8,
        ge=0.3,
        le=1,
        description="Share of common runs of words from which on minhash calls two texts the same.",
    )


class Decontaminate(Section):
    """Rows that share a run of words with given texts are left out."""

    stages: Annotated[Names, BeforeValidator(as_list)] = Field(
        description="Stage whose text is looked at, or a list of stages."
    )
    against: Annotated[Names, BeforeValidator(as_list)] = Field(
        description="Files of the texts, such as a benchmark's; relative to the pipeline file."
    )
    column: str = Field(min_length=1, description="Text column of those files.")
    ngram: int = Field(default=13, ge=1, le=100, description="Words of a run.")
