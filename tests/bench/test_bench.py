"""The benchmark itself, on a tiny target: what it counts must be what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from eagle_batch.bench.measure import PLAIN, DraftShape, Measurement, measure
from eagle_batch.bench.summary import Summary, break_even, summarise
from eagle_batch.bench.table import costs, markdown, records
from eagle_batch.bench.use import Workload
from eagle_batch.cli import main
from eagle_batch.engine.build import Parts
from eagle_batch.engine.peaks import find_peak
from eagle_batch.engine.request import EngineMetrics, EngineSpec, SamplingParams
from eagle_batch.engine.testing import (
    byte_tokenizer,
    save_tiny_target,
    tiny_head,
    tiny_model,
    tiny_target,
)
from eagle_batch.models.export import export_head
from eagle_batch.models.size import model_size

WORKLOAD = Workload(weights=1000, weight_bytes=4000, peak_flops=1e9, peak_bytes_per_s=1e9)


def test_shapes_are_read_back_from_their_names() -> None:
    for text in (
        "plain",
        "auto",
        "static",
        "chain:3",
        "dynamic:4,3,8",
        "chain:2+8",
        "dynamic:2,3,5+1",
    ):
        assert DraftShape.parse(text).name == text
    named = ("", "chain", "tree:2", "plain:1", "auto+2")
    for wrong in (*named, "chain:0", "chain:1,2", "dynamic:1", "chain:x", "ngram:3+1", "chain:2+0"):
        with pytest.raises(ValueError, match="none of plain"):
            DraftShape.parse(wrong)


def test_every_shape_emits_the_same_tokens_and_the_ratio_is_against_plain() -> None:
    target = tiny_target(vocab=len(byte_tokenizer()))
    parts = Parts(target, byte_tokenizer(), tiny_head(target))
    spec = EngineSpec(model="tiny", head="tiny", context=64)
    shapes = [DraftShape.parse(text) for text in ("chain:2", "dynamic:2,3,5+4", "auto")]
    params = SamplingParams(temperature=0.8, max_tokens=8)
    found = measure(parts, spec, [[5, 6, 7]] * 3, params, shapes, repeat=2, batch=2)
    assert [m.shape for m in found] == [PLAIN, *shapes]
    assert all(m.identical == m.rows == 3 for m in found)
    assert all(m.tokens == found[0].tokens for m in found)
    rows = records(found, WORKLOAD)
    assert rows[0]["ratio"] == 1.0
    for row, m in zip(rows, found, strict=True):
        assert row["ratio"] == pytest.approx(
            m.tokens_per_second / found[0].tokens_per_second, abs=1e-3
        )
    assert len(markdown(found, WORKLOAD).splitlines()) == 2 + len(found)


def test_the_command_measures_a_pipeline_and_writes_its_records(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    target = tiny_target(vocab=len(byte_tokenizer()))
    export_head(tiny_head(target), tmp_path / "head", layout="official")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "topic": "tea"}\n{"id": 2, "topic": "ice"}\n')
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(
        "name: p\ninput: {path: rows.jsonl, id: id}\ntarget: {model: ./target}\n"
        "speculation: {head: ./head}\noutput: {path: out}\n"
        'stages: [{name: text, messages: [{role: user, content: "{{ topic }}"}]}]\n'
    )
    options = ["--rows", "2", "--batch", "1", "--repeat", "1", "--max-tokens", "6"]
    options += ["--threads", str(torch.get_num_threads()), "--json", str(tmp_path / "r.json")]
    options += ["--markdown", str(tmp_path / "r.md"), "--picture", str(tmp_path / "r.svg")]
    result = CliRunner().invoke(main, ["bench", str(pipeline), *options])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["results"][0]["draft"] == "plain"
    assert all(row["identical_rows"] == 2 for row in found["results"])
    best = max(found["results"], key=lambda row: row["tokens_per_second"])
    assert hourly(found["headline"]) == pytest.approx(best["tokens_per_hour"], rel=0.01)
    assert 0 < best["mfu"] < 1
    assert "measured with" in found["device"]["source"]
    page = (tmp_path / "r.md").read_text()
    assert page.strip() in result.output
    assert found["advice"] in page
    picture = (tmp_path / "r.svg").read_text()
    assert picture.count("<svg") == 1


def test_a_wrong_shape_or_batch_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"topic": "tea"}\n')
    save_tiny_target(tmp_path / "target")
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(
        "name: p\ninput: {path: rows.jsonl}\ntarget: {model: ./target}\n"
        "speculation: {method: none}\noutput: {path: out}\n"
        'stages: [{name: text, prompt: "{{ topic }}"}]\n'
    )
    result = CliRunner().invoke(main, ["bench", str(pipeline), "--batch", "1,x"])
    assert result.exit_code == 2
    assert "--batch: found '1,x', expected numbers" in result.output


def hourly(headline: str) -> int:
    return int(headline.split(" ", 1)[0].replace(",", ""))


def test_a_picture_of_no_known_kind_is_refused_before_anything_runs() -> None:
    result = CliRunner().invoke(main, ["bench", "missing.yaml", "--picture", "x.gif"])
    assert result.exit_code == 2
    assert "--picture: found x.gif; expected .svg, .png or .pdf" in result.output


def found(batch: int, draft: str, speed: float, **counts: Any) -> Measurement:
    metrics = EngineMetrics(**counts)
    return Measurement(DraftShape.parse(draft), batch, round(100 * speed), 100.0, metrics, 1, 1)


def summary(*speeds: tuple[int, float, float]) -> Summary:
    """Of (batch, plain speed, speed of a chain of two)."""
    measured = [
        item
        for batch, plain, chain in speeds
        for item in (found(batch, "plain", plain), found(batch, "chain:2", chain))
    ]
    return summarise(measured, "cuda:0")


def test_the_headline_is_the_most_tokens_a_gpu_hour() -> None:
    assert summary((1, 10, 16), (4, 40, 30)).headline == (
        "144,000 tokens a GPU-hour (batch 4, plain)"
    )


@pytest.mark.parametrize(
    ("ratios", "batch"),
    [
        ({1: 1.5, 4: 0.5}, 2.0),
        ({1: 1.5, 2: 1.2, 8: 0.8}, 4.0),
        ({1: 0.5, 4: 1.5}, 2.0),
        ({1: 1.5, 4: 1.1}, None),
        ({1: 0.9}, None),
    ],
)
def test_the_break_even_batch_lies_between_those_on_its_sides(
    ratios: dict[int, float], batch: float | None
) -> None:
    assert break_even(ratios).batch == (None if batch is None else pytest.approx(batch))


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            ((1, 10, 15), (4, 40, 20)),
            ("engine.slots: 4 without drafts", "up to about 2 rows", "batch 1 (1.50 times)"),
        ),
        (((1, 10, 15), (4, 40, 40.5)), ("with chain:2", "no more than noise", "at every batch")),
        (((1, 10, 15), (4, 30, 33)), ("engine.slots: 4 with chain:2", "at every batch")),
        (((1, 10, 8), (4, 30, 20)), ("engine.slots: 4", "at no batch", "train a better head")),
    ],
)
def test_the_advice_is_one_sentence_that_follows_from_the_numbers(
    speeds: tuple[tuple[int, float, float], ...], words: tuple[str, ...]
) -> None:
    advice = summary(*speeds).advice
    assert all(word in advice for word in words)
    assert advice.endswith(".")
    assert advice.count(". ") == 0


def test_without_a_draft_there_is_nothing_to_break_even_with() -> None:
    alone = summarise([found(1, "plain", 10)], "cpu")
    assert (alone.break_even, alone.hour) == (None, "worker-hour")
    assert "name a head" in alone.advice


def test_use_and_costs_are_those_of_a_hand_calculation() -> None:
    counts = {"prompt_tokens": 1000, "cached_prompt_tokens": 200}
    plain = found(1, "plain", 2.0, target_passes=200, verify_s=50.0, **counts)
    chain = found(1, "chain:2", 3.0, target_passes=100, verify_s=40.0, draft_s=5.0)
    # Two operations for 1,000 weights and 800 + 200 tokens, in 100 s, of 10^9 a second.
    assert WORKLOAD.flops_use(plain) == pytest.approx(2 * 1000 * 1000 / 100 / 1e9)
    # 200 passes over 4,000 bytes in 50 s, of 10^9 a second.
    assert WORKLOAD.memory_use(plain) == pytest.approx(200 * 4000 / 50 / 1e9)
    assert costs([plain, chain], WORKLOAD).splitlines()[2:] == [
        "| 1 | plain | 250.0 | 0.0 | 250.0 | 0.00 | 1.00 |",
        "| 1 | chain:2 | 450.0 | 50.0 | 400.0 | 0.20 | 1.60 |",
    ]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_size_of_a_model_is_that_of_its_weights(family: str) -> None:
    model = tiny_model(family)
    size = model_size(model.config)
    weights = {name: w.numel() for name, w in model.named_parameters()}
    table = model.get_input_embeddings().weight.numel()
    tied = model.config.tie_word_embeddings
    assert size.read == sum(weights.values()) - (0 if tied else table)
    experts = sum(count for name, count in weights.items() if ".experts." in name)
    if family == "mixtral":
        idle = 1 - model.config.num_experts_per_tok / model.config.num_local_experts
        assert size.computed == size.read - round(experts * idle) < size.read
    else:
        assert size.computed == size.read


def test_a_peak_is_measured_where_no_figures_are_known() -> None:
    peak = find_peak("cpu", "float32")
    assert 1e8 < peak.flops < 1e15
    assert 1e8 < peak.bytes_per_s < 1e13
