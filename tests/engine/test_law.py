"""The law of what is emitted is the target's processed law, by exact enumeration.

The target is a table of logits by context over four tokens. The engine's own penalties, filters and
walk run over a tree; every outcome of the target's choices at its nodes is enumerated with its
probability under the engine's filtered logits. What comes out is compared with plain decoding.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_batch.engine.bad_words import BadWords
from eagle_batch.engine.history import TokenHistory
from eagle_batch.engine.request import Request, SamplingParams
from eagle_batch.engine.sampling import filtered_logits, pack_params
from eagle_batch.engine.testing import plain_distribution, plain_penalties
from eagle_batch.engine.tree import DraftTree, build_tree, in_given_order
from eagle_batch.engine.verify import walk

VOCAB, CPU = 4, torch.device("cpu")
PROMPT, ROOT = (1, 3), 2
#: Parents and tokens of the drafted nodes.
TREES = {
    "chain": ([0, 1, 2], [3, 3, 0]),
    "tree": ([0, 0, 1, 1, 3], [2, 0, 2, 1, 3]),
}
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "all": SamplingParams(
        temperature=0.9, top_k=3, top_p=0.9, repetition_penalty=1.3, logit_bias=((1, 0.8),)
    ),
}


def logits_after(context: tuple[int, ...]) -> Tensor:
    seed = sum((token + 1) * 7**place for place, token in enumerate(context))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def node_laws(tree: DraftTree, paths: list[tuple[int, ...]], params: SamplingParams) -> Tensor:
    """Return the probabilities `[N, V]` from which the engine chooses at every node."""
    history, words = TokenHistory(1, VOCAB, CPU), BadWords(1, CPU)
    history.set_row(0, Request("a", PROMPT, params))
    words.set_row(0, ((0, 1),))
    for owner in (history, words):
        owner.add(0, torch.tensor([[ROOT]]), torch.tensor([1]))
    logits_BNV = torch.stack([logits_after((*PROMPT, ROOT, *path)) for path in paths])[None]
    packed = pack_params([params], [0], CPU)
    adjusted = words.mask(history.adjust(logits_BNV, 0, tree, packed), 0, tree)
    return filtered_logits(adjusted, packed).softmax(-1)[0].double()


def plain_law(emitted: tuple[int, ...], params: SamplingParams) -> float:
    """Return the probability that plain decoding writes these tokens after the root."""
    probability, said = 1.0, [ROOT]
    for token in emitted:
        logits = plain_penalties(logits_after((*PROMPT, *said)).double(), PROMPT, said, params)
        if said[-1] == 0:
            logits[1] = -math.inf  # The bad word (0, 1).
        probability *= float(plain_distribution(logits, params)[token])
        said.append(token)
    return probability


@pytest.mark.parametrize("shape", list(TREES))
@pytest.mark.parametrize("name", list(PARAMS))
def test_the_sampled_law_is_the_targets_processed_law(shape: str, name: str) -> None:
    parents, tokens = TREES[shape]
    tree = build_tree(
        torch.tensor([ROOT]), in_given_order(torch.tensor([tokens]), torch.tensor([parents])), 3
    )
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], token))
    laws = node_laws(tree, paths, PARAMS[name])
    outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=len(paths))))
    chances = laws.expand(len(outcomes), -1, -1).gather(2, outcomes[..., None])[..., 0].prod(1)
    fields: dict[str, Any] = {
        field: value.expand(len(outcomes), *value.shape[1:])
        if isinstance(value := getattr(tree, field), Tensor)
        else value
        for field in DraftTree.__dataclass_fields__
    }
    whole = DraftTree(**fields)
    verdict = walk(whole, outcomes)
    emitted: dict[tuple[int, ...], float] = {}
    rows = zip(
        verdict.tokens_BA.tolist(), verdict.accepted_B.tolist(), chances.tolist(), strict=True
    )
    for text, count, chance in rows:
        key = tuple(text[: count + 1])
        emitted[key] = emitted.get(key, 0.0) + chance
    assert sum(emitted.values()) == pytest.approx(1.0)
    assert max(map(len, emitted)) >= 3
    for key, chance in emitted.items():
        assert chance == pytest.approx(plain_law(key, PARAMS[name]), rel=1e-4, abs=1e-7)
