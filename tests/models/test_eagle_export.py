"""What is exported reads back as it was, in both layouts, for every kind of head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_batch.errors import HeadError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.export import Layout, export_head
from eagle_batch.models.heads import Head
from tests.models import tiny_heads as tiny
from tests.models.tiny_heads import Tiny

MADE = {
    "eagle3": tiny.eagle3,
    "full vocabulary": lambda: tiny.eagle3(full=True),
    "modelopt": tiny.modelopt,
    "norm before fc": tiny.norm_before_fc,
    "speculators": tiny.speculators,
    "eagle3.1": tiny.eagle31,
    "last hidden state": tiny.last_hidden,
    "llama3 rope": lambda: tiny.eagle3().changed(
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    ),
}


def load(path: Path) -> Head:
    return load_head(str(path), dtype=torch.float32, device="cpu", target_layers=12)


def same(first: Head, second: Head) -> bool:
    names = dict(second.named_parameters())
    return first.config == second.config and all(
        torch.equal(p, names[n]) for n, p in first.named_parameters()
    )


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize("name", MADE)
def test_an_exported_head_reads_back_the_same(name: str, layout: Layout, tmp_path: Path) -> None:
    made: Tiny = MADE[name]()
    head = load(Path(made.write(tmp_path / "made")))
    export_head(head, tmp_path / "out", layout=layout, dtype=torch.float32)
    assert same(head, load(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_an_eagle1_head_is_exported_in_its_own_layout_only(qkv_bias: bool, tmp_path: Path) -> None:
    head = load(Path(tiny.eagle1(qkv_bias=qkv_bias).write(tmp_path / "made")))
    export_head(head, tmp_path / "out", dtype=torch.float32)
    assert same(head, load(tmp_path / "out"))
    with pytest.raises(HeadError, match="EAGLE-3 heads only"):
        export_head(head, tmp_path / "other", layout="speculators")


def test_the_official_layout_has_the_names_and_offsets_of_its_authors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = tiny.eagle3()
    export_head(load(Path(made.write(tmp_path / "made"))), tmp_path / "out", dtype=torch.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == made.tensors.keys()
    assert all(torch.equal(t, tensors[n]) for n, t in made.tensors.items())


def test_exporting_again_keeps_what_else_is_in_the_folder(tmp_path: Path) -> None:
    head = load(Path(tiny.eagle3().write(tmp_path / "made")))
    export_head(head, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("card")
    export_head(head, tmp_path / "out", verifier="someone/target")
    assert (tmp_path / "out" / "README.md").read_text() == "card"
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["target_model"] == "someone/target"
