"""The sections `engine`, `workers` and `limits`: how a job runs, never what it writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle_batch.pipeline.base import Section


class EngineOptions(Section):
    """Size of one engine; it changes speed and memory, never the text."""

    slots: int = Field(
        default=16, ge=1, le=4096, description="Rows decoded together by one worker."
    )
    prefill_chunk: int = Field(
        default=512, ge=1, le=1_048_576, description="Most prompt tokens of one row in one pass."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of one worker; null leaves torch's choice.",
    )


class Workers(Section):
    """How many engines run, and what each needs."""

    count: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = Field(
        default="auto",
        description="Number of workers; auto takes one for each GPU, or one on the CPU.",
    )
    cpus: float = Field(
        default=1.0, gt=0, le=4096, description="CPU cores reserved for one worker."
    )
    gpus: Annotated[float, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default="auto", description="GPUs of one worker; auto takes one where the cluster has any."
    )


class Limits(Section):
    """When a job gives up."""

    max_error_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Stop when more than this share of the rows is quarantined.",
    )
    worker_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Times that one worker is started before it is given up.",
    )
    shard_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Times that one shard is tried before its rows are isolated.",
    )
    stall_seconds: float = Field(
        default=600.0,
        gt=0,
        le=604_800,
        description="Replace a worker without progress for this many seconds.",
    )
