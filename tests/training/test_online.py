"""Rounds of training beside a job: what is learnt, what is undone, what never takes too long."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_batch.errors import DataError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.heads import Head
from eagle_batch.training import online
from eagle_batch.training.features import compute_chunk
from eagle_batch.training.learnt import Learnt
from eagle_batch.training.online import (
    OnlineTrainer,
    is_gain,
    next_vocabulary,
    vocabulary_size,
)
from eagle_batch.training.samples import Sample
from tests.training.test_trainer import settings, train


@pytest.fixture(scope="module")
def samples(texts: list[tuple[list[int], list[int]]]) -> list[Sample]:
    return [Sample((*prompt, *completion), len(prompt)) for prompt, completion in texts]


@pytest.mark.parametrize(
    ("before", "after", "gain"),
    [
        (None, 1.19, False),
        (None, 1.2, True),
        (2.0, 2.03, False),
        (2.0, 2.05, True),
        (1.1, 1.15, True),
    ],
)
def test_a_gain_must_be_more_than_chance(before: float | None, after: float, gain: bool) -> None:
    assert is_gain(before, after) == gain


def test_the_vocabulary_holds_what_occurs_then_what_was_known() -> None:
    tokens = torch.tensor([9, 9, 9, 4, 7, 7])
    assert next_vocabulary(tokens, torch.tensor([0, 1, 2, 3, 5]), 12).tolist() == [0, 1, 4, 7, 9]
    assert next_vocabulary(tokens, torch.tensor([4, 9]), 12).tolist() == [7, 9]
    assert [vocabulary_size(seen) for seen in (3, 600, 1024, 1025)] == [1024, 2048, 2048, 4096]


def test_rounds_learn_from_nothing_and_each_gain_can_be_exported(
    target: Any, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "PASSES", 16)
    trainer = OnlineTrainer(target)
    first = trainer.round(samples[:30], 60.0)
    second = trainer.round(samples[30:], 60.0)
    assert first.before is None
    assert first.used
    assert second.tokens > first.tokens
    # The held-out texts are others by now; the head in use is measured on them too.
    assert second.before is not None
    trainer.export(tmp_path / "head")
    head = load_head(str(tmp_path / "head"), dtype=torch.float32, device="cpu", target_layers=8)
    head.bind(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    # Written in bfloat16 and read back, it drafts the same held-out texts as well as it did.
    monkeypatch.setattr(online, "PASSES", 1)
    here, there = trainer.round([], 60.0), OnlineTrainer(target, head).round(samples, 60.0)
    assert there.before == pytest.approx(here.before, rel=0.1)


def test_a_round_without_a_gain_is_undone_and_the_next_is_more_careful(
    target: Any, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "PASSES", 12)
    trainer = OnlineTrainer(target)
    assert trainer.round(samples[:40], 60.0).used
    used = {n: t.clone() for n, t in trainer._head.state_dict().items()}  # type: ignore[union-attr]
    rate = trainer._rate

    def wreck(head: Head, *_: object) -> None:
        with torch.no_grad():
            head.get_parameter("norm").zero_()

    monkeypatch.setattr(trainer, "_step", wreck)
    assert not trainer.round(samples[40:], 60.0).used
    assert all(torch.equal(t, used[n]) for n, t in trainer._head.state_dict().items())  # type: ignore[union-attr]
    assert trainer._rate == rate / 2


def test_a_round_keeps_to_its_time(target: Any, samples: list[Sample]) -> None:
    """Each look at the clock is a second: a step more or less, never a pass."""
    ticks = count()
    trainer = OnlineTrainer(target, clock=lambda: float(next(ticks)))
    found = trainer.round(samples, 12.0)
    assert 1 <= found.steps <= 8
    assert found.seconds <= 14
    assert found.tokens < sum(len(s.tokens) - s.prompt_length for s in samples), "newest first"


def test_too_few_texts_are_said_to_be_too_few(target: Any, samples: list[Sample]) -> None:
    with pytest.raises(DataError, match="1 texts are too few"):
        OnlineTrainer(target).round(samples[:1], 5.0)


def test_a_head_that_comes_with_the_job_is_improved(
    target: Any, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration and its aux layers stay, or no engine could take it in place."""
    chunk = compute_chunk(target, samples[:40], (2, 4, 5))
    train(target, chunk, settings(tmp_path, epochs=1))
    weak = load_head(str(tmp_path / "head"), dtype=torch.float32, device="cpu", target_layers=8)
    weak.bind(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    config = weak.config
    monkeypatch.setattr(online, "PASSES", 16)
    found: Learnt = OnlineTrainer(target, weak).round(samples, 60.0)
    assert found.before is not None
    assert found.used
    assert weak.config == config


def test_old_texts_make_room(
    target: Any, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "KEPT_BYTES", 200_000)
    monkeypatch.setattr(online, "HELD_OUT_TEXTS", 2)
    trainer = OnlineTrainer(target)
    for start in range(0, 60, 20):
        trainer.round(samples[start : start + 20], 0.5)
    assert sum(map(online._size, trainer._chunks)) <= 200_000
    assert sum(len(chunk.prompt_lengths) for chunk in trainer._held) <= 3
