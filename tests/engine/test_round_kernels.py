"""The kernels of a round against the operators of torch that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_batch.engine.drafters.growing import advance
from eagle_batch.engine.drafters.merged import merge
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.sampling import best_logits, best_tokens
from eagle_batch.engine.tree import Candidates, plant
from eagle_batch.engine.verify import walk
from eagle_batch.models import quick

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Return what a function gives without kernels."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(quick, "has_kernels", lambda: False)
            return function()

    return run


def fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def assert_same(actual: Any, expected: Any) -> None:
    for name, value in fields(expected).items():
        torch.testing.assert_close(fields(actual)[name], value, msg=name)


def awkward_logits() -> Tensor:
    """Return rows with ties, with what is banned or not a number, and with nothing to choose."""
    logits = torch.randn(2, 6, 3000)
    logits[0, 1] = logits[0, 1].round()
    logits[0, 2, ::2] = -torch.inf
    logits[0, 3, 2000] = torch.nan
    logits[0, 4] = -torch.inf
    logits[0, 5, 700] = torch.inf
    logits[1, 0, 2999] = 9.0
    logits[1, 1, 0] = 9.0
    return logits


def test_the_best_token_is_the_first_of_the_highest_and_a_nan_is_highest(by_torch: Any) -> None:
    logits = awkward_logits()
    assert torch.equal(best_tokens(logits), by_torch(lambda: best_tokens(logits)))


@pytest.mark.parametrize("count", [1, 4, 64])
def test_the_best_logits_come_in_falling_order_with_their_total(count: int, by_torch: Any) -> None:
    logits = awkward_logits()
    values, ids, totals = best_logits(logits, count)
    expected, _, expected_totals = by_torch(lambda: best_logits(logits, count))
    broken = logits.isnan().any(-1)
    assert values[broken].isnan().all()
    assert torch.equal(values[~broken], expected[~broken])
    assert torch.equal(logits.gather(-1, ids)[~broken], expected[~broken])
    assert all(len(set(row.tolist())) == count for row in ids[~broken & values[..., -1].isfinite()])
    finite = ~broken & ~logits.isposinf().any(-1)
    torch.testing.assert_close(totals[finite], expected_totals[finite])


def random_beam(width: int, depth: int) -> Candidates:
    """Return records as a drafter makes them: no child above its parent, and some equal."""
    tokens, scores, parents = [torch.randint(0, 9, (3, width))], [-torch.rand(3, width)], []
    parents.append(torch.full((3, width), -1))
    for level in range(1, depth):
        first = 0 if level == 1 else width + (level - 2) * width * width
        records = first + torch.randperm(scores[-1].shape[1])[:width].expand(3, -1)
        losses = (3 * torch.rand(3, width, width)).round() / 3
        above = scores[-1].gather(1, records - first)
        scores.append((above[..., None] - losses).flatten(1))
        parents.append(records[..., None].expand(3, width, width).flatten(1))
        tokens.append(torch.randint(0, 9, (3, width * width)))
    everything = torch.cat(scores, 1)
    everything[1, -1], everything[2, -2] = -torch.inf, torch.nan
    return Candidates(torch.cat(tokens, 1), everything, torch.cat(parents, 1))


@pytest.mark.parametrize(
    ("width", "depth", "nodes"), [(1, 4, 4), (4, 3, 5), (4, 3, 36), (5, 2, 12)]
)
def test_a_tree_is_planted_and_walked_as_by_torch(
    width: int, depth: int, nodes: int, by_torch: Any
) -> None:
    for _ in range(20):
        candidates, root_B = random_beam(width, depth), torch.randint(0, 9, (3,))
        tree = plant(root_B, candidates, nodes, width, depth)
        assert_same(tree, by_torch(lambda c=candidates, r=root_B: plant(r, c, nodes, width, depth)))
        chosen_BN = torch.randint(0, 9, tree.tokens_BN.shape)
        # Half of the choices are tokens of children, so that walks go deep.
        likely = torch.rand(tree.tokens_BN.shape) < 0.5
        chosen_BN.scatter_(1, tree.parents_BN, torch.where(likely, tree.tokens_BN, chosen_BN))
        verdict = walk(tree, chosen_BN)
        assert_same(verdict, by_torch(lambda t=tree, c=chosen_BN: walk(t, c)))


@pytest.mark.parametrize("least", [-0.4, -1.1])
def test_nodes_that_are_not_worth_it_carry_no_token(least: float, by_torch: Any) -> None:
    for _ in range(20):
        candidates, root_B = random_beam(4, 3), torch.randint(0, 9, (3,))
        whole = plant(root_B, candidates, 12, 4, 3)
        tree = plant(root_B, candidates, 12, 4, 3, least)
        assert_same(tree, by_torch(lambda c=candidates, r=root_B: plant(r, c, 12, 4, 3, least)))
        used_BN = tree.tokens_BN >= 0
        assert torch.equal(tree.tokens_BN[used_BN], whole.tokens_BN[used_BN])
        assert used_BN.gather(1, tree.parents_BN)[used_BN].all(), "a parent is as likely"
        worth_B = (candidates.scores_BR >= least).sum(1).clamp(max=12)
        assert used_BN.sum(1).tolist() == (1 + worth_B).tolist()


@pytest.mark.parametrize("width", [1, 4])
def test_a_frontier_advances_to_the_best_children(width: int, by_torch: Any) -> None:
    gains, scores = -torch.rand(3, width, width), -torch.rand(3, width)
    gains[0, 0, 0] = -torch.inf
    visible = torch.rand(3, width, 2 * width) < 0.5
    assert_same(advance(gains, scores, visible), by_torch(lambda: advance(gains, scores, visible)))


@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 3, 3), (4, 3, 9)])
@pytest.mark.parametrize("branch", [1, 6])
def test_a_branch_hangs_where_torch_hangs_it(
    width: int, depth: int, nodes: int, branch: int, by_torch: Any
) -> None:
    for _ in range(20):
        tree = plant(torch.randint(0, 3, (3,)), random_beam(width, depth), nodes, width, depth)
        small = replace(tree, tokens_BN=tree.tokens_BN % 3)
        branch_BD = torch.randint(0, 3, (3, branch))
        merged = merge(small, branch_BD)
        assert_same(merged, by_torch(lambda t=small, b=branch_BD: merge(t, b)))


@pytest.mark.parametrize("letters", [2, 40])
def test_looking_back_finds_the_longest_match_and_the_latest_of_these(
    letters: int, by_torch: Any
) -> None:
    longest, depth, lengths = 3, 4, [30, 2, 1, 17]
    drafter = NgramDrafter(
        slots=4, capacity=40, depth=depth, device=torch.device("cpu"), longest=longest
    )
    texts = torch.randint(0, letters, (4, 41))
    drafter.tokens_SC[:, longest : longest + 41] = texts
    state: Any = SimpleNamespace(
        first_row=0, root_B=torch.zeros(4, dtype=torch.int64), length_B=torch.tensor(lengths)
    )
    found = drafter.look_back(state)
    for actual, expected in zip(found, by_torch(lambda: drafter.look_back(state)), strict=True):
        assert torch.equal(actual, expected)
    for row, last in enumerate(lengths):
        text = texts[row].tolist()

        def agree(place: int, text: list[int] = text, last: int = last) -> int:
            count = 0
            while count < min(longest, place + 1) and text[place - count] == text[last - count]:
                count += 1
            return count

        best = max(range(last), key=lambda place: (agree(place), place))
        assert int(found[1][row]) == agree(best)
        # Beyond the end it begins again.
        circle = text[best + 1 : last + 1]
        assert found[0][row].tolist() == [circle[d % len(circle)] for d in range(depth)]
