"""Every public layout loads and computes what a plain reference computes; wrong readings do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import Head
from tests.models import reference_heads as reference
from tests.models import tiny_heads as tiny
from tests.models.reference_heads import Sizes
from tests.models.tiny_heads import Tiny

TOKENS = 7
TOLERANCE = 1e-5

LAYOUTS: dict[str, Callable[[], Tiny]] = {
    "eagle1": tiny.eagle1,
    "eagle1 without fc bias": lambda: tiny.eagle1(bias=False),
    "eagle1 with qkv bias": lambda: tiny.eagle1(qkv_bias=True),
    "eagle1 without embedding": lambda: tiny.eagle1(embed=False),
    "eagle1 repacked": lambda: tiny.prefixed(tiny.eagle1()),
    "eagle3": tiny.eagle3,
    "eagle3 full vocabulary": lambda: tiny.eagle3(full=True),
    "eagle3 repacked": lambda: tiny.prefixed(tiny.eagle3()),
    "eagle3 own rope base": lambda: with_theta(tiny.eagle3(), 100000.0),
    "modelopt": tiny.modelopt,
    "modelopt norm before fc": tiny.norm_before_fc,
    "speculators": tiny.speculators,
    "speculators qwen3": lambda: tiny.speculators(qk_norm=True),
    "eagle3.1": tiny.eagle31,
    "eagle3.1 legacy names": lambda: tiny.eagle31(legacy=True),
    "eagle3 on the last hidden state": tiny.last_hidden,
}


def with_theta(made: Tiny, theta: float) -> Tiny:
    sizes = replace(made.sizes, theta=theta)
    return replace(made.changed({"rope_theta": theta}), sizes=sizes)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Case:
    """A loaded head beside its tensors, and one text with the features of a target."""

    def __init__(self, made: Tiny, folder: Path) -> None:
        self.made, self.sizes = made, made.sizes
        g = torch.Generator().manual_seed(99)
        s = made.sizes
        self.head = load_head(
            made.write(folder), dtype=torch.float32, device="cpu", target_layers=s.target_layers
        )
        self.embed = tiny.rand(g, s.vocab, s.hidden)
        self.lm_head = tiny.rand(g, s.vocab, s.hidden)
        self.head.bind(self.embed, self.lm_head)
        self.tokens = torch.randint(s.vocab, (TOKENS + 1,), generator=g)
        self.features = tiny.rand(g, TOKENS, self.head.config.feature_width)
        self.tensors = {n.removeprefix("model."): t for n, t in made.tensors.items()}

    @property
    def own_embed(self) -> Tensor:
        """What an EAGLE-3 head looks tokens up in: its own embedding, where it differs."""
        return self.tensors.get("embed_tokens.weight", self.embed)

    def ours(self, head: Head | None = None) -> list[Tensor]:
        """State and logits of the text, then of one more step that feeds the state back."""
        head = head or self.head
        g, found = head.fuse(self.features[None]), []
        for step in range(2):
            positions = torch.arange(TOKENS - step)[None] + step
            tokens = self.tokens[None, 1 + step :]
            g = head(tokens, g[:, : TOKENS - step], positions, causal)
            found += [g[0], head.logits(g)[0]]
        return found

    def expected(
        self, sizes: Sizes | None = None, tensors: dict[str, Tensor] | None = None
    ) -> list[Tensor]:
        s, t = sizes or self.sizes, tensors or self.tensors
        eagle3 = "norm.weight" in t
        g = reference.eagle3_fuse(t, self.features, s) if eagle3 else self.features
        found = []
        for step in range(2):
            tokens, g = self.tokens[1 + step :], g[: TOKENS - step]
            positions = torch.arange(TOKENS - step) + step
            if eagle3:
                g, logits = self._eagle3(t, tokens, g, positions, s)
            else:
                g = reference.eagle1(t, self.embed, tokens, g, positions, s)
                logits = g @ self.lm_head.T
            found += [g, logits]
        return found

    def _eagle3(
        self, t: dict[str, Tensor], tokens: Tensor, g: Tensor, positions: Tensor, s: Sizes
    ) -> tuple[Tensor, Tensor]:
        normed_residual = bool(self.made.config.get("norm_before_residual"))
        out = reference.eagle3(
            t,
            self.made.layer,
            self.own_embed,
            tokens,
            g,
            positions,
            s,
            residual_is_normed=normed_residual,
        )
        normed = reference.norm(out, t["norm.weight"], s.eps)
        return (normed if self.made.config.get("norm_output") else out), normed @ t[
            "lm_head.weight"
        ].T


def largest_gap(found: list[Tensor], expected: list[Tensor]) -> float:
    scale = max(float(e.abs().max()) for e in expected)
    return max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)) / scale


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_the_reference_computes(name: str, tmp_path: Path) -> None:
    case = Case(LAYOUTS[name](), tmp_path)
    assert largest_gap(case.ours(), case.expected()) < TOLERANCE


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_archives_load_like_safetensors(name: str, tmp_path: Path) -> None:
    made = LAYOUTS[name]()
    made.write(tmp_path, archive=True)
    head = load_head(str(tmp_path), dtype=torch.float32, device="cpu", target_layers=12)
    again = Case(made, tmp_path / "safetensors").head
    assert all(
        torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True)
    )


def swapped_halves(t: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    first, second = t[name].chunk(2, dim=1)
    return t | {name: torch.cat([second, first], dim=1)}


def test_a_swapped_concatenation_is_told_apart(tmp_path: Path) -> None:
    for number, (made, names) in enumerate(
        (
            (tiny.eagle1(), ["fc.weight"]),
            (tiny.eagle3(), [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"]),
        )
    ):
        case = Case(made, tmp_path / str(number))
        wrong = case.tensors
        for name in names:
            wrong = swapped_halves(wrong, name)
        assert largest_gap(case.ours(), case.expected(tensors=wrong)) > 100 * TOLERANCE


def test_a_rope_base_inherited_from_the_target_is_told_apart(tmp_path: Path) -> None:
    case = Case(tiny.eagle3(), tmp_path)
    inherited = replace(case.sizes, theta=500000.0)
    assert largest_gap(case.ours(), case.expected(sizes=inherited)) > 100 * TOLERANCE


def test_a_normed_residual_is_told_apart(tmp_path: Path) -> None:
    plain = Case(tiny.eagle3(), tmp_path / "plain")
    flagged = Case(tiny.eagle3().changed({"norm_before_residual": True}), tmp_path / "flagged")
    assert largest_gap(flagged.ours(), flagged.expected()) < TOLERANCE
    assert largest_gap(flagged.ours(), plain.expected()) > 100 * TOLERANCE


def test_features_one_layer_off_are_told_apart(tmp_path: Path) -> None:
    """The head reads the boundaries that it names; the neighbours give something else."""
    g = torch.Generator().manual_seed(5)
    case = Case(tiny.modelopt(), tmp_path)
    boundaries = tiny.rand(g, case.sizes.target_layers + 1, TOKENS, case.sizes.hidden).cumsum(0)

    def pick(ids: tuple[int, ...]) -> Tensor:
        return torch.cat([boundaries[k] for k in ids], dim=-1)

    case.features = pick((2, 6, 9))
    expected = case.expected()
    case.features = pick(case.head.config.aux_layers)
    assert largest_gap(case.ours(), expected) < TOLERANCE
    case.features = pick((1, 5, 8))
    assert largest_gap(case.ours(), expected) > 100 * TOLERANCE


def test_rotary_angles_stay_exact_in_a_half_precision_head(tmp_path: Path) -> None:
    """Regression: a head cast to bfloat16 rounded its frequencies and was wrong past 256 tokens."""
    head = load_head(
        tiny.eagle3().write(tmp_path), dtype=torch.float32, device="cpu", target_layers=12
    )
    before = head.layer.rotary.frequencies.clone()
    head.to(torch.bfloat16)
    assert torch.equal(before, head.layer.rotary.frequencies)
    assert head.layer.o_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("linear", {"factor": 4.0}),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_scaled_rotary_frequencies_are_those_of_transformers(
    kind: str, extra: dict[str, float], tmp_path: Path
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = tiny.eagle3().changed({"rope_scaling": {"rope_type": kind, **extra}})
    head = load_head(made.write(tmp_path), dtype=torch.float32, device="cpu", target_layers=12)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **extra},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    torch.testing.assert_close(head.layer.rotary.frequencies, expected)


def test_draft_ids_map_through_offsets(tmp_path: Path) -> None:
    made = tiny.eagle3()
    head = load_head(made.write(tmp_path), dtype=torch.float32, device="cpu", target_layers=12)
    assert head.draft_to_target is not None
    kept = made.tensors["t2d"].nonzero().flatten()
    assert head.draft_to_target.tolist() == kept.tolist()
    full = Case(tiny.eagle3(full=True), tmp_path / "full").head
    assert full.draft_to_target is None


def test_an_own_embedding_is_kept_only_where_it_differs(tmp_path: Path) -> None:
    made = tiny.speculators()
    own = made.tensors["embed_tokens.weight"]
    lm_head = torch.zeros_like(own)
    path = made.write(tmp_path)
    head = load_head(path, dtype=torch.float32, device="cpu")
    head.bind(own.clone(), lm_head)
    assert head.embed_VH is not None
    shared = head.embed_VH.data_ptr()
    head.bind(own + 1, lm_head)
    assert head.embed_VH.data_ptr() == shared
    assert torch.equal(head.embed_VH, own)


def test_a_bound_embedding_shares_the_targets_storage(tmp_path: Path) -> None:
    case = Case(tiny.eagle1(), tmp_path)
    assert case.head.embed_VH is not None
    assert case.head.lm_head_VH is not None
    assert case.head.embed_VH.data_ptr() == case.embed.data_ptr()
    assert case.head.lm_head_VH.data_ptr() == case.lm_head.data_ptr()
