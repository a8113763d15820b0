"""What a head learns from: hidden states of the target, computed once and kept on disk.

Shape legend: B rows, N tokens, K aux layers, H hidden size of the target, T tokens of a chunk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_batch.errors import ConfigError
from eagle_batch.training.samples import Sample, read_samples


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of one padded batch; positions past a row's length hold nothing of use."""

    #: Inputs of the aux layers, concatenated in the order of `aux_layers` (bfloat16).
    aux_BNF: Tensor
    #: Last hidden state after the final norm: what lm_head reads.
    last_BNH: Tensor
    #: Most probable next token of the whole vocabulary.
    top_BN: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Features of the rows of one data file, concatenated; row i is starts[i]:starts[i + 1]."""

    tokens_T: Tensor
    aux_TF: Tensor
    last_TH: Tensor
    top_T: Tensor
    starts: Tensor
    prompt_lengths: Tensor


@torch.inference_mode()
def collect_features(
    model: Any, tokens_BN: Tensor, lengths: Sequence[int], aux_layers: Sequence[int]
) -> Features:
    """Run the target over right-padded rows and keep what a head is trained on.

    `aux_layers` are boundary ids, k being the input of decoder layer k. transformers' list of
    hidden states has the same numbering except for its last entry, which is after the final norm.
    """
    layers = int(model.config.num_hidden_layers)
    if any(not 0 <= k < layers for k in aux_layers):
        raise ConfigError(f"aux_layers {list(aux_layers)}: expected ids in 0..{layers - 1}")
    assert len(lengths) == len(tokens_BN), "one length a row"
    # Right padding needs no mask: a causal model never looks at what comes later.
    states = model.base_model(tokens_BN, output_hidden_states=True, use_cache=False).hidden_states
    last_BNH = states[layers]
    top_BN = torch.stack([model.lm_head(row).argmax(dim=-1) for row in last_BNH])
    aux = [states[k] for k in aux_layers] or [last_BNH]
    return Features(
        torch.cat(aux, dim=-1).to(torch.bfloat16), last_BNH.to(torch.bfloat16), top_BN.int()
    )


def target_identity(folder: Path) -> str:
    """Return what tells a target's hidden states from another's: its files, not their place."""
    weights = sorted((p.name, p.stat().st_size) for p in folder.glob("*.safetensors"))
    config = (folder / "config.json").read_text("utf-8")
    return hashlib.sha256(json.dumps([config, weights]).encode()).hexdigest()[:16]


class FeatureStore:
    """Features on disk, one safetensors file a data file, made when first asked for."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        *,
        identity: str,
        aux_layers: tuple[int, ...],
        max_length: int,
        stages: Sequence[str] | None = None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.aux_layers = aux_layers
        self.max_length = max_length
        self.stages = stages
        self._identity = identity

    def chunk(self, source: Path, batch_tokens: int = 4096) -> Chunk:
        """Return the features of a data file, memory-mapped; compute missing ones first."""
        from safetensors.torch import load_file

        path = self._path(source)
        if not path.exists():
            samples = read_samples(source, self.max_length, self.stages)
            self._write(path, compute_chunk(self.model, samples, self.aux_layers, batch_tokens))
        return Chunk(**load_file(path))

    def _path(self, source: Path) -> Path:
        stat = source.stat()
        stages = [] if self.stages is None else [sorted(self.stages)]
        parts = [
            self._identity,
            self.aux_layers,
            self.max_length,
            source.name,
            stat.st_size,
            stat.st_mtime_ns,
            *stages,
        ]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return self.folder / f"{source.stem}-{digest}.safetensors"

    def _write(self, path: Path, chunk: Chunk) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({name: getattr(chunk, name) for name in Chunk.__slots__}, partial)
        partial.replace(path)


def compute_chunk(
    model: Any, samples: Sequence[Sample], aux_layers: Sequence[int], batch_tokens: int = 4096
) -> Chunk:
    """Run the target over rows of similar length together, and put them back in order."""
    lengths = [len(s.tokens) for s in samples]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total, width = int(starts[-1]), int(model.config.hidden_size)
    chunk = Chunk(
        tokens_T=torch.tensor([t for s in samples for t in s.tokens], dtype=torch.int32),
        aux_TF=torch.empty(total, width * max(1, len(aux_layers)), dtype=torch.bfloat16),
        last_TH=torch.empty(total, width, dtype=torch.bfloat16),
        top_T=torch.empty(total, dtype=torch.int32),
        starts=starts,
        prompt_lengths=torch.tensor([s.prompt_length for s in samples]),
    )
    for group in groups_of_similar_length(lengths, batch_tokens):
        _fill(chunk, model, group, aux_layers)
    return chunk


def _fill(chunk: Chunk, model: Any, group: Sequence[int], aux_layers: Sequence[int]) -> None:
    spans = [slice(int(chunk.starts[i]), int(chunk.starts[i + 1])) for i in group]
    rows = [chunk.tokens_T[span].long() for span in spans]
    tokens_BN = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = collect_features(model, tokens_BN.to(model.device), [len(r) for r in rows], aux_layers)
    for row, span in enumerate(spans):
        length = span.stop - span.start
        chunk.aux_TF[span] = found.aux_BNF[row, :length]
        chunk.last_TH[span] = found.last_BNH[row, :length]
        chunk.top_T[span] = found.top_BN[row, :length]


def groups_of_similar_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Split rows into groups whose padded size is at most `batch_tokens` (one row at least)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Rising order: the newest row is the longest of its group.
        if not groups or (len(groups[-1]) + 1) * lengths[index] > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups
