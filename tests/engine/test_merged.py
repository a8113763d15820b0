"""A tree with an n-gram branch: merged by definition, and without a trace in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.engine.controller import PLAIN, Shape, grid
from eagle_batch.engine.drafters.base import CommittedChain, DraftState
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.growing import GrowingDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter, merge
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Request, SamplingParams
from eagle_batch.engine.sampling import pack_params
from eagle_batch.engine.testing import tiny_head, tiny_target
from eagle_batch.engine.tree import DraftTree, build_tree, in_given_order
from eagle_batch.engine.verify import walk
from eagle_batch.models.target import Pass, Target, TargetOutput
from tests.engine.test_parity import (
    CONTEXT,
    decode_ids,
    expected_tokens,
    mixed_requests,
    prompts,
    run,
)
from tests.engine.test_tree_and_verify import parent_lists


@settings(max_examples=80, deadline=None)
@given(parents=parent_lists(), data=st.data())
def test_a_walk_goes_as_deep_as_the_better_of_tree_and_branch(
    parents: list[int], data: st.DataObject
) -> None:
    nodes, letters = len(parents) + 1, 4
    tokens = [data.draw(st.integers(0, letters - 1)) for _ in range(nodes)]
    branch = data.draw(st.lists(st.integers(0, letters - 1), min_size=1, max_size=4))
    drawn = in_given_order(torch.tensor([tokens[1:]]), torch.tensor([parents]))
    tree = build_tree(torch.tensor([0]), drawn, nodes)
    line = torch.arange(len(branch))[None]
    chain = build_tree(torch.tensor([0]), in_given_order(torch.tensor([branch]), line), len(branch))
    merged = merge(tree, torch.tensor([branch]))
    assert merged.tokens_BN.shape[1] == nodes + len(branch)
    # The target's choice depends on the path alone, as a model's does.
    law: dict[tuple[int, ...], int] = {(): data.draw(st.integers(0, letters - 1))}

    def chosen(trial: torch.Tensor, parents_of: torch.Tensor) -> torch.Tensor:
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(trial[0, 1:].tolist(), parents_of[0, 1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        for path in paths:
            law.setdefault(path, data.draw(st.integers(0, letters - 1)))
        return torch.tensor([[law[path] for path in paths]])

    whole = walk(merged, chosen(merged.tokens_BN, merged.parents_BN))
    # With one child a token no walk can miss a path, in the merged tree as in a set of all paths.
    known: set[tuple[int, ...]] = set()
    for trial in (tree, chain):
        paths: list[tuple[int, ...]] = [()]
        rows = zip(trial.tokens_BN[0, 1:].tolist(), trial.parents_BN[0, 1:].tolist(), strict=True)
        for token, parent in rows:
            paths.append((*paths[parent], token))
        known |= set(paths)
    siblings = [(p, t) for p, t in zip(parents, tokens[1:], strict=True)]
    if len(set(siblings)) == len(siblings):
        path: tuple[int, ...] = ()
        while (*path, law[path]) in known:
            path = (*path, law[path])
        assert whole.tokens_BA[0, : int(whole.accepted_B[0]) + 1].tolist() == [*path, law[path]]


def drafter(target: Target, kind: str, slots: int, branch: int) -> MergedDrafter:
    sizes: dict[str, Any] = {
        "slots": slots,
        "capacity": CONTEXT + 6,
        "depth": 4,
        "width": 3,
        "nodes": 8,
    }
    model: GrowingDrafter
    if kind == "head":
        model = EagleDrafter(tiny_head(target, draft_vocab=19), **sizes)
    else:
        small = tiny_target(layers=2, seed=3)
        model = DraftModelDrafter(small, target_vocab=target.shape.vocab, **sizes)
    ngram = NgramDrafter(slots=slots, capacity=CONTEXT, depth=branch, device=target.device)
    return MergedDrafter(model, ngram)


@pytest.mark.parametrize("kind", ["head", "model"])
@pytest.mark.parametrize("auto", [False, True])
def test_a_branch_leaves_no_trace_in_the_text(kind: str, auto: bool) -> None:
    target = tiny_target()
    requests = mixed_requests(target.shape.vocab, count=20)
    merged = drafter(target, kind, 4, branch=7)
    engine = Engine(
        target, merged, None, decode_ids, slots=4, context=CONTEXT, auto=auto, prefill_chunk=9
    )
    done = run(engine, requests)
    assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
    if auto:
        assert any("+" in name for name, _ in engine.metrics().passes_by_shape)


def test_a_branch_adds_what_repeats_to_what_the_head_drafts() -> None:
    target = tiny_target()
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    requests = [Request(str(i), p, params) for i, p in enumerate(prompts(5, target.shape.vocab))]
    gains = []
    for branch in (0, 4):
        merged = drafter(target, "head", 3, branch=4)
        merged.use(Shape(4, 3, 8, branch))
        done = run(Engine(target, merged, None, decode_ids, slots=3, context=CONTEXT), requests)
        assert expected_tokens(requests) == {k: list(c.token_ids) for k, c in done.items()}
        gains.append(sum(c.target_passes for c in done.values()))
    assert gains[1] < gains[0]


def test_the_grid_offers_the_branch_alone_and_beside_trees() -> None:
    shapes = grid(4, 4, 12, 3)
    assert shapes[0] == PLAIN
    assert Shape(0, 0, 0, 3) in shapes
    assert Shape(4, 4, 12, 3) in shapes
    assert set(grid(4, 4, 12)) < set(shapes)
    assert Shape(4, 4, 12, 3).name == "4,4,12,+3"


def state_after(merged: MergedDrafter, target: Target, texts: list[list[int]]) -> DraftState:
    """Let a drafter take in two greedy rows of one length; return where they stand."""
    tokens_BA = torch.tensor(texts)
    zero_B, length = torch.zeros(2, dtype=torch.int64), tokens_BA.shape[1]
    features = torch.randn(2, length, 3 * target.shape.hidden)
    merged.extend(CommittedChain(0, zero_B, zero_B + length - 1, 0), features, tokens_BA)
    return DraftState(
        first_row=0,
        root_B=tokens_BA[:, -1],
        length_B=zero_B + length,
        index_B=zero_B,
        params=pack_params([SamplingParams()] * 2, [1, 2], target.device),
        longest=length,
    )


def test_a_branch_is_as_long_as_what_repeats_is_worth() -> None:
    """Other nodes would be verified for nothing."""
    target = tiny_target()
    merged = drafter(target, "head", 2, branch=9)
    merged.use(Shape(4, 3, 8, 9))
    sizes = []
    alone = [7, 8, 9, 10, 11, 12]
    for again in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 1, 2], [9] * 6):
        texts = [alone, again]
        state = state_after(merged, target, texts)
        tree = merged.draft(state)
        sizes.append(tree.tokens_BN.shape[1])
        if tree.used_BN is not None:
            assert tree.used_BN.sum(1).tolist() == [9, sizes[-1]]
            assert (tree.tokens_BN[0, 9:] == -1).all()
            assert (tree.tokens_BN[1] >= 0).all()
    # Nothing, and one token alone, are no match; then two, and five.
    assert sizes == [9, 9, 9 + 4, 9 + 9]
    merged.use(Shape(0, 0, 0, 3))
    for price, length in ((0.0, 3), (0.5, 3), (0.8, 1), (1.5, 0)):
        tree = merged.draft(replace(state, price=price))
        assert tree.tokens_BN.shape[1] == 1 + length


def test_the_model_is_not_asked_where_every_row_goes_round_in_a_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    merged = drafter(target, "head", 2, branch=9)
    merged.use(Shape(4, 3, 8, 9))
    circle = [5, 7, 9] * 6
    for second, asked in (([*range(3, 21)], 1), (circle, 0)):
        state = state_after(merged, target, [circle, second])
        calls: list[DraftState] = []
        model_draft = merged._model.draft

        def counted(state: DraftState, draft: Any = model_draft, calls: Any = calls) -> DraftTree:
            calls.append(state)
            return draft(state)

        monkeypatch.setattr(merged._model, "draft", counted)
        tree = merged.draft(state)
        monkeypatch.undo()
        assert len(calls) == asked
        # The branch comes behind the eight nodes of the tree, be they there or not.
        assert tree.order_BN[0, -9:].tolist() == list(range(10, 19))
        assert tree.tokens_BN[0, -9:].tolist() == [5, 7, 9] * 3


def plain_requests(vocab: int, count: int) -> list[Request]:
    """Greedy and sampled rows that ask for no adjustment, half of them over repeated prompts."""
    choices = [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40),
        SamplingParams(max_tokens=50),
        SamplingParams(temperature=0.4, top_k=5, max_tokens=50, ignore_eos=True),
    ]
    texts = [p * (4 if i % 2 else 1) for i, p in enumerate(prompts(count, vocab))]
    return [
        Request(str(i), text[:90], choices[i % len(choices)], noise_key=31 * i + 5)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(("family", "trims"), [("llama", True), ("gemma2", False)])
@pytest.mark.parametrize("kind", ["head", "n-gram", "auto"])
@pytest.mark.parametrize("greedy", [True, False])
def test_rows_with_branches_of_their_own_lengths_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, family: str, trims: bool, kind: str, greedy: bool
) -> None:
    """Kernels verify what each row drafts and no more; others verify padding that none chooses."""
    target = tiny_target(family)
    passes: list[tuple[int, ...]] = []
    forward_together = target.forward_together

    def noted(together: Sequence[Pass], layers: Sequence[int] = ()) -> list[TargetOutput]:
        passes.extend(getattr(each.step, "counts", None) or () for each in together)
        return forward_together(together, layers)

    monkeypatch.setattr(target, "forward_together", noted)
    requests = plain_requests(target.shape.vocab, 12)
    if greedy:
        requests = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests]
    drafts: Any = NgramDrafter(slots=4, capacity=CONTEXT, depth=9, device=target.device)
    if kind != "n-gram":
        drafts = drafter(target, "head", 4, branch=9)
    engine = Engine(target, drafts, None, decode_ids, slots=4, context=CONTEXT, auto=kind == "auto")
    done = run(engine, requests)
    assert expected_tokens(requests, family) == {k: list(c.token_ids) for k, c in done.items()}
    ragged = [counts for counts in passes if len(set(counts)) > 1]
    assert bool(ragged) == trims
    assert all(len(counts) <= 4 and max(counts) <= 9 + 9 for counts in ragged)
