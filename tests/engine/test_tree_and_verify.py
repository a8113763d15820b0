"""Trees and the walk down a tree, against plain recursive definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_batch.engine.tree import Candidates, build_tree, in_given_order, root_tree, select_nodes
from eagle_batch.engine.verify import walk, walk_stepwise


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    """Parents of drafted nodes 1..M in an order where parents come first; 0 is the root."""
    size = draw(st.integers(1, 9))
    return [draw(st.integers(0, node)) for node in range(size)]


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node - 1])


def ancestors_of(parents: list[int], node: int) -> set[int]:
    return {0} if node == 0 else {node} | ancestors_of(parents, parents[node - 1])


def plain_walk(parents: list[int], tokens: list[int], chosen: list[int]) -> list[int]:
    """Return the emitted tokens by definition: follow the child that carries the chosen token."""
    node, emitted = 0, []
    while True:
        emitted.append(chosen[node])
        children = [
            i for i, p in enumerate(parents, start=1) if p == node and tokens[i] == chosen[node]
        ]
        if not children:
            return emitted
        node = children[0]


@settings(max_examples=80, deadline=None)
@given(parents=parent_lists(), data=st.data())
def test_tree_and_walk_match_their_definitions(parents: list[int], data: st.DataObject) -> None:
    nodes = len(parents) + 1
    tokens = [0] * nodes
    for parent in range(nodes):
        children = [i for i, p in enumerate(parents, start=1) if p == parent]
        for rank, child in enumerate(data.draw(st.permutations(range(10)))[: len(children)]):
            tokens[children[rank]] = child
    chosen = data.draw(st.lists(st.integers(0, 9), min_size=nodes, max_size=nodes))
    depth = max(depth_of(parents, n) for n in range(nodes))
    tree = build_tree(
        torch.tensor([0]),
        in_given_order(torch.tensor([tokens[1:]]), torch.tensor([parents])),
        depth,
    )
    for node in range(nodes):
        seen = {i for i in range(nodes) if tree.ancestors_BNN[0, node, i]}
        assert seen == ancestors_of(parents, node)
        assert int(tree.depth_BN[0, node]) == depth_of(parents, node)
    chosen_BN = torch.tensor([chosen])
    verdict = walk(tree, chosen_BN)
    count = int(verdict.accepted_B[0])
    assert verdict.tokens_BA[0, : count + 1].tolist() == plain_walk(parents, tokens, chosen)
    stepwise = walk_stepwise(tree, lambda rows, nodes, _: chosen_BN[rows, nodes])
    for name in ("path_BA", "tokens_BA", "accepted_B"):
        assert torch.equal(getattr(verdict, name), getattr(stepwise, name))


CASES = {
    "perfect match": ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    "early mismatch": ([1, 2, 3], [7, 2, 3, 4], [7]),
    "late mismatch": ([1, 2, 3], [1, 2, 9, 4], [1, 2, 9]),
    "single token": ([5], [5, 6], [5, 6]),
    "single token refused": ([5], [4, 6], [4]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_chains(name: str) -> None:
    drafted, chosen, emitted = CASES[name]
    nodes = in_given_order(torch.tensor([drafted]), torch.arange(len(drafted))[None])
    tree = build_tree(torch.tensor([0]), nodes, len(drafted))
    verdict = walk(tree, torch.tensor([chosen]))
    assert verdict.tokens_BA[0, : int(verdict.accepted_B[0]) + 1].tolist() == emitted


def test_an_empty_draft_yields_the_targets_own_token() -> None:
    verdict = walk(root_tree(torch.tensor([3, 4])), torch.tensor([[8], [9]]))
    assert verdict.tokens_BA.tolist() == [[8], [9]]
    assert verdict.accepted_B.tolist() == [0, 0]


def test_a_root_that_carries_its_own_choice_is_not_its_own_child() -> None:
    nodes = in_given_order(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]))
    tree = build_tree(torch.tensor([5]), nodes, 2)
    verdict = walk(tree, torch.tensor([[5, 0, 0]]))
    assert verdict.accepted_B.tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(
    gains=st.lists(
        st.sampled_from([0.0, -0.5, -1.0, float("-inf"), float("nan")]), min_size=20, max_size=20
    ),
    count=st.integers(1, 20),
)
def test_a_chosen_nodes_parent_is_always_chosen_too(gains: list[float], count: int) -> None:
    """Ties at log-probability 0 and NaN scores broke this in other engines."""
    parents = [-1, -1, *[i // 2 for i in range(18)]]
    scores: list[float] = []
    for parent, gain in zip(parents, gains, strict=True):
        scores.append(gain + (0.0 if parent < 0 else scores[parent]))
    candidates = Candidates(torch.arange(20)[None], torch.tensor([scores]), torch.tensor([parents]))
    selected = select_nodes(candidates, count, 2)
    tokens, nodes = selected.tokens_BM, selected.parents_BM
    chosen = set(tokens[0].tolist())
    assert len(chosen) == count
    for position, (token, node) in enumerate(
        zip(tokens[0].tolist(), nodes[0].tolist(), strict=True)
    ):
        if parents[token] < 0:
            assert node == 0
        else:
            assert parents[token] in chosen
            assert tokens[0, node - 1] == parents[token]
            assert node - 1 < position


@given(scores=st.permutations(range(6)), count=st.integers(1, 6))
def test_a_smaller_selection_is_the_first_of_a_larger_one(scores: list[int], count: int) -> None:
    candidates = Candidates(
        torch.arange(6)[None],
        -torch.tensor([scores], dtype=torch.float32),
        torch.full((1, 6), -1),
    )
    whole, part = select_nodes(candidates, 6, 3), select_nodes(candidates, count, 3)
    inside = whole.tokens_BM[whole.order_BM <= count]
    assert inside.tolist() == part.tokens_BM[0].tolist()
    assert whole.rank_BM[0].tolist() == [0, 1, 2, 0, 1, 2]
    best = whole.order_BM[0].argsort()
    assert [scores[token] for token in whole.tokens_BM[0, best]] == sorted(scores)


def test_the_emitted_law_is_the_targets_law_by_enumeration() -> None:
    """Exact, no sampling: over all outcomes of the target's choices at the nodes of a tree, every
    emitted sequence has the probability that plain decoding gives it."""
    vocab, depth = 3, 2
    torch.manual_seed(1)
    # The target's law after each context, by the tokens since the root.
    contexts = [()] + [(a,) for a in range(vocab)] + list(itertools.product(range(vocab), repeat=2))
    law = {context: torch.rand(vocab).double().softmax(-1).tolist() for context in contexts}
    parents, drafted = [0, 0, 1, 1, 2], [2, 0, 1, 2, 2]
    paths = [(), (2,), (0,), (2, 1), (2, 2), (0, 2)]
    nodes = in_given_order(torch.tensor([drafted]), torch.tensor([parents]))
    tree = build_tree(torch.tensor([0]), nodes, depth)
    emitted: dict[tuple[int, ...], float] = {}
    for chosen in itertools.product(range(vocab), repeat=len(paths)):
        probability = 1.0
        for path, token in zip(paths, chosen, strict=True):
            probability *= law[path][token]
        verdict = walk(tree, torch.tensor([chosen]))
        tokens = tuple(verdict.tokens_BA[0, : int(verdict.accepted_B[0]) + 1].tolist())
        emitted[tokens] = emitted.get(tokens, 0.0) + probability
    assert sum(emitted.values()) == pytest.approx(1.0)
    for tokens, probability in emitted.items():
        expected = 1.0
        for place, token in enumerate(tokens):
            expected *= law[tokens[:place]][token]
        assert probability == pytest.approx(expected, rel=1e-9)
