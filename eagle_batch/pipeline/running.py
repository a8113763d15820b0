"""The sections `engine`, `workers` and `limits`: how a job runs, never what it writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule


class EngineOptions(Section):
    """Which engine runs, and its size, which changes speed and memory, never the text."""

    kind: Literal["own", "vllm"] = Field(
        default="own",
        description="own, or vllm (extra [vllm]), which has tensor parallelism: it drafts chains, "
        "and sampled text then depends on the draft.",
    )
    slots: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        default=16,
        description="Rows decoded together by one worker; auto takes as many as fit into its "
        "device's memory and make it faster.",
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
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs that compute each layer together, as many as workers.gpus; vllm only.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                self.kind == "own" and self.tensor_parallel > 1,
                (
                    ("tensor_parallel", "kind"),
                    f"found {self.tensor_parallel} and 'own', which never splits a layer; use vllm",
                ),
            )
        ]


class Workers(Section):
    """How many engines run, and what each needs of the cluster."""

    count: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = Field(
        default="auto",
        description="Workers at first; auto takes one for each GPU, as nodes join and leave, or "
        "one on the CPU.",
    )
    min: int = Field(
        default=1,
        ge=1,
        le=100_000,
        description="Fewest workers; a cluster without room for them in wait_seconds ends the job.",
    )
    max: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Most workers: more are asked for while shards wait, which makes a cluster "
        "that can grow do so; null asks for no more than count.",
    )
    cpus: float = Field(
        default=1.0, gt=0, le=4096, description="CPU cores reserved for one worker."
    )
    gpus: Annotated[float, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs of one worker; a fraction shares one, several share out the target's "
        "layers; auto takes one where the cluster has any.",
    )
    memory_gib: float | None = Field(
        default=None, gt=0, le=1_048_576, description="Main memory reserved for one worker, in GiB."
    )
    accelerator: str | None = Field(
        default=None,
        min_length=1,
        description="Type of the GPUs by Ray's name, such as L4 or H100; null takes any.",
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1_000_000)]] = Field(
        default_factory=dict,
        description="Resources that nodes declare themselves (ray start --resources), for one "
        "worker.",
    )
    placement: Literal["default", "spread", "pack"] = Field(
        default="default",
        description="Which node takes the next worker: the one with fewest of them (spread), the "
        "fullest that has room (pack), or Ray's choice.",
    )
    wait_seconds: float = Field(
        default=1800.0,
        gt=0,
        le=604_800,
        description="How long min workers are waited for, be it that nodes must start first.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        most = self.max
        fixed = None if self.count == "auto" else self.count
        return [
            (
                most is not None and most < self.min,
                (("max", "min"), f"found {most} and {self.min}; expected max not below min"),
            ),
            (
                most is not None and fixed is not None and most < fixed,
                (("max", "count"), f"found {most} and {fixed}; expected max not below count"),
            ),
            (
                fixed is not None and self.min > fixed,
                (("min", "count"), f"found {self.min} and {fixed}; expected min not above count"),
            ),
            (
                isinstance(self.gpus, float) and self.gpus > 1 and not self.gpus.is_integer(),
                (("gpus",), f"found {self.gpus}; expected a fraction of one GPU or whole GPUs"),
            ),
            (
                bool({"CPU", "GPU", "memory"} & self.resources.keys()),
                (("resources",), "found CPU, GPU or memory; use cpus, gpus and memory_gib"),
            ),
        ]


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
        description="Starts of workers that may fail in a row before the job stops.",
    )
    shard_attempts: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Workers that a shard may lose before its rows are isolated, and failures "
        "before it is given up.",
    )
    stall_seconds: float = Field(
        default=600.0,
        gt=0,
        le=604_800,
        description="Replace a worker without progress for this many seconds.",
    )
