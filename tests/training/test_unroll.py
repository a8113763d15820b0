"""The training-time test is real drafting, for every row at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.models.checkpoints import assemble
from eagle_batch.models.heads import Head, HeadConfig
from eagle_batch.models.layouts import HeadParts
from eagle_batch.training.initial import random_tensors
from eagle_batch.training.objectives import first_row, soft_cross_entropy
from eagle_batch.training.unroll import unroll

STEPS, TOKENS = 4, 9


def make_head(kind: str = "eagle3", seed: int = 0) -> Head:
    config = HeadConfig(
        kind="eagle3" if kind == "eagle3" else "eagle1",
        hidden=32,
        target_hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        rope_theta=10000.0,
        rms_eps=1e-5,
        vocab=50,
        draft_vocab=20 if kind == "eagle3" else 50,
        aux_layers=(1, 2, 3) if kind == "eagle3" else (),
        own_lm_head=kind == "eagle3",
    )
    tensors = {n: t * 10 if t.dim() > 1 else t for n, t in random_tensors(config, seed).items()}
    kept = torch.arange(20) * 2 if kind == "eagle3" else None
    head = assemble(HeadParts(config, tensors, kept), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(50, 32, generator=generator)
    head.bind(weight, weight)
    return head


class GrowingCache:
    """Attention of one drafting chain: everything seen so far, the newest rows causal."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=2)
        new, total = q.shape[2], self.k.shape[2]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        return F.scaled_dot_product_attention(q, self.k, self.v, mask, enable_gqa=True)


def draft_chain(head: Head, tokens: Tensor, features: Tensor, row: int, steps: int) -> list[Tensor]:
    """Draft as an engine does: extend over the prefix, then one token at a time."""
    cache, states = GrowingCache(), []
    g = head.fuse(features[None, : row + 1])
    out = head(tokens[None, 1 : row + 2], g, torch.arange(row + 1)[None], cache)
    states.append(out[0, -1])
    for step in range(1, steps):
        token = tokens[None, row + 1 + step, None]
        out = head(token, out[:, -1:], torch.tensor([[row + step]]), cache)
        states.append(out[0, -1])
    return states


def test_every_row_of_every_step_is_a_drafted_chain() -> None:
    generator = torch.Generator().manual_seed(3)
    for kind in ("eagle3", "eagle1"):
        head = make_head(kind)
        tokens = torch.randint(50, (TOKENS,), generator=generator)
        features = torch.randn(TOKENS, head.config.feature_width, generator=generator)
        outs = list(unroll(head, tokens[None], features[None], STEPS))
        for row in range(TOKENS - STEPS):
            for step, state in enumerate(draft_chain(head, tokens, features, row, STEPS)):
                torch.testing.assert_close(outs[step][0, row], state, rtol=1e-4, atol=1e-4)


def test_rows_before_the_first_one_are_left_out_and_change_nothing() -> None:
    generator = torch.Generator().manual_seed(7)
    for kind in ("eagle3", "eagle1"):
        head = make_head(kind)
        tokens = torch.randint(50, (2, TOKENS), generator=generator)
        features = torch.randn(2, TOKENS, head.config.feature_width, generator=generator)
        whole = list(unroll(head, tokens, features, STEPS))
        for first in (1, 3):
            part = list(unroll(head, tokens, features, STEPS, first))
            assert len(part) == STEPS
            for step, out in enumerate(part):
                torch.testing.assert_close(out, whole[step][:, first:], rtol=5e-5, atol=5e-5)


def test_no_position_that_counts_is_before_the_first_row() -> None:
    """Row r of step s is about position first + r + 1 + s."""
    counted = torch.zeros(2, TOKENS, dtype=torch.bool)
    assert first_row(counted, STEPS) == 0
    counted[1, 6:] = True
    assert first_row(counted, 4) == 2
    counted[0, 2] = True
    assert first_row(counted, 4) == 0


def test_steps_are_told_apart_from_plain_causal_attention() -> None:
    """Row 0 of step 1 reads token 2, which row 0 of step 0 does not see yet."""
    head = make_head()
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(50, (1, TOKENS), generator=generator)
    features = torch.randn(1, TOKENS, head.config.feature_width, generator=generator)
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 50  # read by row 0 of step 1 and row 1 of step 0
    first, second = (
        list(unroll(head, tokens, features, 2)),
        list(unroll(head, changed, features, 2)),
    )
    assert torch.equal(first[0][0, 0], second[0][0, 0])
    assert not torch.allclose(first[1][0, 0], second[1][0, 0])


def test_texts_of_a_batch_do_not_see_each_other() -> None:
    head = make_head()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(50, (2, TOKENS), generator=generator)
    features = torch.randn(2, TOKENS, head.config.feature_width, generator=generator)
    together = list(unroll(head, tokens, features, STEPS))
    short = TOKENS - 3
    alone = list(unroll(head, tokens[1:, :short], features[1:, :short], STEPS))
    for step in range(STEPS):
        rows = alone[step].shape[1]
        torch.testing.assert_close(together[step][1:, :rows], alone[step], rtol=1e-5, atol=1e-5)


def test_a_text_too_short_for_all_steps_ends_early() -> None:
    head = make_head()
    outs = list(unroll(head, torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, 96), 5))
    assert [out.shape[1] for out in outs] == [2, 1]


def test_the_gradient_made_in_the_forward_pass_is_autograds() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).softmax(-1)
    weight = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    plain = -(p * logits.log_softmax(-1)).sum(-1).mul(weight).sum() * 3
    (expected,) = torch.autograd.grad(plain, logits)
    ours = soft_cross_entropy(logits, p, weight) * 3
    (found,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected)
