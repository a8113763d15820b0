"""Greedy decoding of the demo target against transformers' own `generate`, token for token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from eagle_batch import demo
from eagle_batch.engine.build import Parts, assemble, load_parts
from eagle_batch.engine.request import EngineSpec, Request, SamplingParams

NEW_TOKENS = 128
PROMPTS = 32

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def spec(demo_target: Path) -> EngineSpec:
    head = str(demo.head_path("smollm2-135m-instruct"))
    return EngineSpec(model=str(demo_target), head=head, context=512)


@pytest.fixture(scope="module")
def parts(spec: EngineSpec) -> Parts:
    return load_parts(spec)


@pytest.fixture(scope="module")
def prompts(repository: Path, parts: Parts) -> list[list[int]]:
    topics = pq.read_table(repository / "pipelines" / "data" / "topics.parquet", columns=["topic"])
    texts = [f"Explain {topic}." for topic in topics["topic"].to_pylist()[:PROMPTS]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: Any = parts.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=False
    )
    return list(ids)


@pytest.fixture(scope="module")
def generated(demo_target: Path, parts: Parts, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, sixteen rows at a time, padded on the left."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()
    rows: list[list[int]] = []
    for start in range(0, PROMPTS, 16):
        batch = prompts[start : start + 16]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        rows += [_until_end(row, parts) for row in out[:, width:].tolist()]
    return rows


def _until_end(row: list[int], parts: Parts) -> list[int]:
    ends = [place for place, token in enumerate(row) if token in parts.target.eos_token_ids]
    return row[: ends[0] + 1] if ends else row


def _decode(
    parts: Parts, spec: EngineSpec, prompts: list[list[int]], slots: int, tree: str
) -> dict[int, list[int]]:
    head = None if tree == "none" else spec.head
    small = replace(spec, slots=slots, tree=tree, head=head, depth=3, nodes=5)
    engine = assemble(parts, small)
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), tuple(prompt), SamplingParams(max_tokens=NEW_TOKENS)))
    done: dict[int, list[int]] = {}
    while engine.has_work:
        done |= {int(c.request_id): list(c.token_ids) for c in engine.step()}
    return done


@pytest.mark.parametrize(
    "tree",
    [
        "none",
        "dynamic",
        pytest.param("chain", marks=pytest.mark.exhaustive),
        pytest.param("static", marks=pytest.mark.exhaustive),
    ],
)
def test_a_batch_of_sixteen_generates_the_same_tokens(
    parts: Parts,
    spec: EngineSpec,
    prompts: list[list[int]],
    generated: list[list[int]],
    tree: str,
) -> None:
    assert _decode(parts, spec, prompts, 16, tree) == dict(enumerate(generated))


@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_one_row_at_a_time_generates_the_same_tokens(
    parts: Parts,
    spec: EngineSpec,
    prompts: list[list[int]],
    generated: list[list[int]],
    tree: str,
) -> None:
    assert _decode(parts, spec, prompts[:6], 1, tree) == dict(enumerate(generated[:6]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_all_rows_one_at_a_time_generate_the_same_tokens(
    parts: Parts,
    spec: EngineSpec,
    prompts: list[list[int]],
    generated: list[list[int]],
    tree: str,
) -> None:
    assert _decode(parts, spec, prompts, 1, tree) == dict(enumerate(generated))
