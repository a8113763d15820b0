"""Greedy decoding of the demo target against transformers' own `generate`, token for token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from eagle_batch import demo
from eagle_batch.engine.build import Parts, assemble, load_parts
from eagle_batch.engine.request import EngineSpec, Request, SamplingParams


@dataclass(frozen=True)
class Size:
    prompts: int
    new_tokens: int


#: Half a minute on two cores, and the whole comparison.
SMALL = pytest.param(Size(8, 48), id="small")
WHOLE = pytest.param(Size(32, 128), id="whole", marks=pytest.mark.exhaustive)
TREES = [
    "none",
    "dynamic",
    pytest.param("chain", marks=pytest.mark.exhaustive),
    pytest.param("static", marks=pytest.mark.exhaustive),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[SMALL, WHOLE])
def size(request: pytest.FixtureRequest) -> Size:
    assert isinstance(request.param, Size)
    return request.param


@pytest.fixture(scope="module")
def spec(demo_target: Path) -> EngineSpec:
    head = str(demo.head_path("smollm2-135m-instruct"))
    return EngineSpec(model=str(demo_target), head=head, context=512)


@pytest.fixture(scope="module")
def parts(spec: EngineSpec) -> Parts:
    return load_parts(spec)


@pytest.fixture(scope="module")
def prompts(repository: Path, parts: Parts, size: Size) -> list[list[int]]:
    topics = pq.read_table(repository / "pipelines" / "data" / "topics.parquet", columns=["topic"])
    texts = [f"Explain {topic}." for topic in topics["topic"].to_pylist()[: size.prompts]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: Any = parts.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=False
    )
    return list(ids)


@pytest.fixture(scope="module")
def generated(
    demo_target: Path, parts: Parts, prompts: list[list[int]], size: Size
) -> list[list[int]]:
    """What transformers generates, sixteen rows at a time, padded on the left."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()
    rows: list[list[int]] = []
    for start in range(0, len(prompts), 16):
        batch = prompts[start : start + 16]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=size.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        rows += [_until_end(row, parts) for row in out[:, width:].tolist()]
    return rows


def _until_end(row: list[int], parts: Parts) -> list[int]:
    ends = [place for place, token in enumerate(row) if token in parts.target.eos_token_ids]
    return row[: ends[0] + 1] if ends else row


def _decode(
    parts: Parts, spec: EngineSpec, prompts: list[list[int]], new_tokens: int
) -> dict[int, list[int]]:
    engine = assemble(parts, spec)
    for row, prompt in enumerate(prompts):
        engine.add(Request(str(row), tuple(prompt), SamplingParams(max_tokens=new_tokens)))
    done: dict[int, list[int]] = {}
    while engine.has_work:
        done |= {int(c.request_id): list(c.token_ids) for c in engine.step()}
    return done


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("slots", [1, 16])
def test_every_batch_size_and_tree_generates_the_same_tokens(
    parts: Parts,
    spec: EngineSpec,
    prompts: list[list[int]],
    generated: list[list[int]],
    size: Size,
    slots: int,
    tree: str,
) -> None:
    head = None if tree == "none" else spec.head
    small = replace(spec, slots=slots, tree=tree, head=head, depth=3, nodes=5)
    assert _decode(parts, small, prompts, size.new_tokens) == dict(enumerate(generated))
