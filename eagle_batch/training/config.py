"""The training file's fields: what a head is trained on, how, and where it goes.

Strict and frozen; light to import, so that a file is checked before torch is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(gt=0, lt=1)]


class TrainingConfig(BaseModel):
    """One training run; every field is a key of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The target: `demo:<name>`, a folder relative to this file, or a hub id.
    target: str
    #: Parquet files with prompt_token_ids and completion_token_ids: paths, folders or globs.
    data: list[str] = Field(min_length=1)
    #: Stages of the job whose texts are learnt from; null takes all.
    stages: list[str] | None = Field(None, min_length=1)
    #: Folder of the run: state, curve and the exported heads. Relative to the working directory.
    out: Path
    #: Folder of the target's hidden states, shared by runs; null puts it inside `out`.
    features: Path | None = None
    kind: Literal["eagle3", "eagle1"] = "eagle3"
    #: `target` starts from parts of the target, `random` from nothing; else a head to go on from:
    #: a folder relative to this file, or a hub id.
    start: str = "target"
    #: Tokens that the head can propose, the most frequent ones of the data. A head to go on from
    #: that can propose fewer gets more where this is given.
    draft_vocab: int = Field(8192, ge=2)
    #: Boundary ids whose states are fused; null takes 2, L // 2, L - 3.
    aux_layers: list[int] | None = None
    #: Steps of the training-time test, and the factor by which each step weighs less.
    ttt_steps: int = Field(4, ge=1, le=16)
    ttt_decay: float = Field(0.8, gt=0, le=1)
    #: Weight of prompt positions in the loss; completions weigh 1.
    prompt_weight: float = Field(0.0, ge=0, le=1)
    epochs: int = Field(4, ge=1)
    lr: float = Field(1e-3, gt=0)
    #: Share of the steps over which the learning rate rises; it then falls as a cosine.
    warmup: Share = 0.03
    weight_decay: float = Field(0.01, ge=0)
    #: Largest norm of the gradient.
    clip: float = Field(0.5, gt=0)
    #: Padded tokens of one batch.
    batch_tokens: int = Field(2048, ge=16)
    #: Longer texts are cut.
    max_length: int = Field(512, ge=8)
    #: Share of the prompts kept for validation, and most rows that one validation reads.
    held_out: Share = 0.03
    held_out_rows: int = Field(128, ge=1)
    #: Arithmetic of the training; weights and optimiser stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    #: Where to train: cpu, cuda, cuda:1 ...; auto takes a GPU where there is one.
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    #: Processes that share every batch, under Ray: on GPUs one for each.
    workers: int = Field(1, ge=1, le=1024)
    #: CPU threads of each process; null leaves torch's choice.
    threads: int | None = Field(None, ge=1)
    #: Steps between validations, and between saved states.
    evaluate_every: int = Field(100, ge=1)
    save_every: int = Field(100, ge=1)
