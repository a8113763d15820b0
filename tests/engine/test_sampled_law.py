"""A second witness of the emitted law: counts of sampled texts of the demo target."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from eagle_batch import demo
from eagle_batch.engine.build import assemble, load_parts
from eagle_batch.engine.request import EngineSpec, Request, SamplingParams, noise_key
from eagle_batch.engine.testing import plain_distribution

DRAWS = 2_000


@pytest.mark.exhaustive
def test_pairs_of_tokens_of_the_demo_target_follow_its_law(demo_target: Path) -> None:
    """The second and third token come out of trees; the first is fixed by the prompt's prefill."""
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=1.0, top_k=12, top_p=0.9, max_tokens=3, ignore_eos=True)
    head = str(demo.head_path("smollm2-135m-instruct"))
    spec = EngineSpec(model=str(demo_target), head=head, slots=16, context=64, nodes=8)
    parts = load_parts(spec)
    prompt = parts.tokenizer.encode("Once upon a time, there was a")
    engine = assemble(parts, spec)
    for draw in range(DRAWS):
        key = noise_key(0, str(draw), 0, "law")
        engine.add(Request(str(draw), tuple(prompt), params, key))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.has_work:
        counts.update(completion.token_ids for completion in engine.step())
    assert engine.metrics().acceptance_length > 1.1, "nothing was accepted: the test is blind"

    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32)

    def law(tokens: tuple[int, ...]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
        p = plain_distribution(logits, params)
        return {int(i): float(p[i]) for i in p.nonzero().flatten()}

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        likely = {text: p for text, p in expected.items() if p * DRAWS >= 5}
        expected = {(*t, i): p * q for t, p in likely.items() for i, q in law(t).items()}
    cells = {text: p for text, p in expected.items() if p * DRAWS >= 5}
    rest = 1 - sum(cells.values())
    found = [counts[text] for text in cells] + [DRAWS - sum(counts[text] for text in cells)]
    wanted = [p * DRAWS for p in cells.values()] + [rest * DRAWS]
    chi_square = sum((f - w) ** 2 / w for f, w in zip(found, wanted, strict=True))
    degrees = len(found) - 1
    assert degrees > 20
    # Four standard deviations above the mean of a chi-square variable.
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5
