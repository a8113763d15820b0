"""What is not an EAGLE head that we reproduce is refused, and the message says which and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_batch.errors import HeadError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import Head
from tests.models import tiny_heads as tiny
from tests.models.reference_heads import Sizes
from tests.models.tiny_heads import NESTED, Tiny

KINDS: dict[str, tuple[Callable[[], Tiny], str]] = {
    "mla": (
        lambda: tiny.modelopt().changed({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}),
        "MLA",
    ),
    "mla tensors": (
        lambda: tiny.modelopt().changed(
            tensors={"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4, 4)}
        ),
        "MLA",
    ),
    "p-eagle": (
        lambda: tiny.speculators().changed(tensors={"mask_hidden": torch.ones(1, 96)}),
        "P-EAGLE",
    ),
    "p-eagle config": (
        lambda: tiny.speculators().changed({"speculators_model_type": "peagle"}),
        "P-EAGLE",
    ),
    "dflash": (
        lambda: tiny.eagle3().changed({"dflash_config": {"target_layer_ids": [1]}}),
        "DFlash",
    ),
    "medusa": (
        lambda: Tiny({"medusa_num_heads": 4}, {"0.0.linear.weight": torch.ones(2, 2)}, Sizes(), ""),
        "Medusa",
    ),
    "mixture of experts": (
        lambda: tiny.eagle3().changed(tensors={"midlayer.mlp.experts.0.w1": torch.ones(2)}),
        "mixture of experts",
    ),
    "quantised config": (
        lambda: tiny.eagle3().changed({"quantization_config": {"bits": 4}}),
        "quantised",
    ),
    "quantised tensor": (
        lambda: tiny.eagle3().changed(tensors={"fc.weight": torch.ones(32, 96, dtype=torch.int8)}),
        "quantised",
    ),
    "whole model": (
        lambda: tiny.eagle3().changed(tensors={"layers.1.mlp.up_proj.weight": torch.ones(2)}),
        "one",
    ),
    "nothing known": (
        lambda: Tiny(tiny.eagle3().config, {"weight": torch.ones(2)}, Sizes(), ""),
        "neither an EAGLE-3 head",
    ),
}


def with_bad(value: float) -> Tiny:
    made = tiny.eagle3()
    broken = made.tensors["midlayer.mlp.up_proj.weight"].clone()
    broken[1, 2] = value
    return made.changed(tensors={"midlayer.mlp.up_proj.weight": broken})


FITS: dict[str, tuple[Callable[[], Tiny], tuple[str, ...]]] = {
    "nan": (lambda: with_bad(float("nan")), ("midlayer.mlp.up_proj.weight", "NaN")),
    "infinity": (lambda: with_bad(float("inf")), ("midlayer.mlp.up_proj.weight", "infinite")),
    "missing tensor": (
        lambda: tiny.eagle3().changed(tensors={"midlayer.self_attn.o_proj.weight": None}),
        ("missing layers.0.self_attn.o_proj.weight",),
    ),
    "surplus tensor": (
        lambda: tiny.eagle3().changed(tensors={"surprise": torch.ones(2)}),
        ("unexpected surprise",),
    ),
    "eagle1 with an input norm": (
        lambda: tiny.eagle1().changed(tensors={"layers.0.input_layernorm.weight": torch.ones(32)}),
        ("unexpected layers.0.input_layernorm.weight",),
    ),
    "wrong hidden size": (
        lambda: tiny.eagle3().changed({"hidden_size": 64}),
        ("expected", "64"),
    ),
    "wrong shape": (
        lambda: tiny.eagle3().changed(tensors={"norm.weight": torch.ones(31)}),
        ("tensor norm.weight is [31]", "expected [32]"),
    ),
    "missing d2t": (
        lambda: tiny.eagle3().changed(tensors={"d2t": None, "t2d": None}),
        ("d2t is missing", "20", "50"),
    ),
    "d2t of ids, not offsets": (
        lambda: tiny.eagle3().changed(tensors={"d2t": torch.arange(30, 50), "t2d": None}),
        ("offsets",),
    ),
    "d2t against t2d": (
        lambda: tiny.eagle3().changed(tensors={"t2d": torch.zeros(50, dtype=torch.bool)}),
        ("d2t and t2d",),
    ),
    "d2t length": (
        lambda: tiny.eagle3().changed(
            tensors={"d2t": torch.zeros(19, dtype=torch.int64), "t2d": None}
        ),
        ("tensor d2t is [19]", "[20]"),
    ),
    "contradicting ids": (
        lambda: tiny.modelopt().changed({NESTED: [1, 5, 8]}),
        ("[1, 5, 8]", "differ by one"),
    ),
    "too few ids": (lambda: tiny.eagle3().changed({NESTED: [2, 9]}), ("fuses 3",)),
    "ids past the target": (lambda: tiny.eagle3().changed({NESTED: [2, 6, 40]}), ("12 layers",)),
    "flag without tensors": (
        lambda: tiny.eagle3().changed({"fc_norm": True}),
        ("fc_norm", "missing"),
    ),
    "tensors without flag": (
        lambda: tiny.eagle31().changed({"fc_norm": False}),
        ("fc_norm", "are there"),
    ),
    "speculators without its residual flag": (
        lambda: tiny.speculators().changed({"norm_before_residual": None}),
        ("norm_before_residual",),
    ),
    "unknown rope scaling": (
        lambda: tiny.eagle3().changed({"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("yarn",),
    ),
    "two rope bases": (
        lambda: tiny.eagle3().changed({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
        ("rope_theta", "500000"),
    ),
    "another activation": (
        lambda: tiny.eagle3().changed({"hidden_act": "gelu"}),
        ("hidden_act", "gelu"),
    ),
    "no size": (lambda: tiny.eagle3().changed({"hidden_size": None}), ("hidden_size is None",)),
}


def load(path: str) -> Head:
    return load_head(path, dtype=torch.float32, device="cpu", target_layers=12)


@pytest.mark.parametrize("name", KINDS)
def test_an_unsupported_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, word = KINDS[name]
    with pytest.raises(HeadError, match=word) as caught:
        load(make().write(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", FITS)
def test_a_checkpoint_that_does_not_fit_names_what_is_wrong(name: str, tmp_path: Path) -> None:
    make, words = FITS[name]
    with pytest.raises(HeadError) as caught:
        load(make().write(tmp_path))
    assert all(word in str(caught.value) for word in (str(tmp_path), *words)), str(caught.value)


@pytest.mark.parametrize("archive", [False, True])
def test_a_truncated_file_is_refused(archive: bool, tmp_path: Path) -> None:
    tiny.eagle3().write(tmp_path, archive=archive)
    path = tmp_path / ("pytorch_model.bin" if archive else "model.safetensors")
    for size in (0, 5, path.stat().st_size // 2, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(HeadError, match=path.name):
            load(str(tmp_path))
        tiny.eagle3().write(tmp_path, archive=archive)


def test_an_archive_with_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return eval, ("1",)

    made = tiny.eagle3()
    made.write(tmp_path, archive=True)
    torch.save(made.tensors | {"evil": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="refused"):
        load(str(tmp_path))


def test_a_folder_without_files_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="not a folder"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(HeadError, match=r"needs its config\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadError, match=r"model\.safetensors"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(HeadError, match="JSON"):
        load(str(tmp_path))


def test_layers_are_asked_for_where_the_default_depends_on_them(tmp_path: Path) -> None:
    path = tiny.eagle3().write(tmp_path)
    with pytest.raises(HeadError, match="target_layers"):
        load_head(path, dtype=torch.float32, device="cpu")
    assert load(path).config.aux_layers == (2, 6, 9)


def test_a_target_so_small_that_layers_collapse_is_refused(tmp_path: Path) -> None:
    """With 6 layers the default ids are 2, 3 and 3."""
    with pytest.raises(HeadError, match="different"):
        load_head(tiny.eagle3().write(tmp_path), dtype=torch.float32, device="cpu", target_layers=6)


@pytest.mark.parametrize("shape", [(50, 64), (51, 32)])
def test_a_target_of_other_sizes_is_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    head = load(tiny.eagle3().write(tmp_path))
    right, wrong = torch.zeros(50, 32), torch.zeros(shape)
    with pytest.raises(HeadError, match=rf"\[{shape[0]}, {shape[1]}\].*\[50, 32\]"):
        head.bind(wrong, right)
    with pytest.raises(HeadError, match="lm_head"):
        head.bind(right, wrong)


def test_sharded_checkpoints_load_and_a_missing_part_is_named(tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    made = tiny.eagle3()
    whole = load(made.write(tmp_path / "whole"))
    folder = tmp_path / "parts"
    made.write(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(made.tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({n: made.tensors[n] for n in held}, folder / file)
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    again = load(str(folder))
    pairs = zip(whole.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    (folder / "b.safetensors").unlink()
    with pytest.raises(HeadError, match=r"b\.safetensors"):
        load(str(folder))
