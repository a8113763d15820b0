"""The benchmark itself, on a tiny target: what it counts must be what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eagle_batch.bench.measure import PLAIN, DraftShape, measure
from eagle_batch.bench.table import markdown, records
from eagle_batch.cli import main
from eagle_batch.engine.build import Parts
from eagle_batch.engine.request import EngineSpec, SamplingParams
from eagle_batch.engine.testing import byte_tokenizer, save_tiny_target, tiny_head, tiny_target
from eagle_batch.models.export import export_head


def test_shapes_are_read_back_from_their_names() -> None:
    for text in ("plain", "auto", "static", "chain:3", "dynamic:4,3,8"):
        assert DraftShape.parse(text).name == text
    for wrong in ("", "chain", "chain:0", "chain:1,2", "dynamic:1", "tree:2", "plain:1", "chain:x"):
        with pytest.raises(ValueError, match=r"none of plain|invalid literal"):
            DraftShape.parse(wrong)


def test_every_shape_emits_the_same_tokens_and_the_ratio_is_against_plain() -> None:
    target = tiny_target(vocab=len(byte_tokenizer()))
    parts = Parts(target, byte_tokenizer(), tiny_head(target))
    spec = EngineSpec(model="tiny", head="tiny", context=64)
    shapes = [DraftShape.parse(text) for text in ("chain:2", "dynamic:2,3,5", "auto")]
    params = SamplingParams(temperature=0.8, max_tokens=8)
    found = measure(parts, spec, [[5, 6, 7]] * 3, params, shapes, repeat=2, batch=2)
    assert [m.shape for m in found] == [PLAIN, *shapes]
    assert all(m.identical == m.rows == 3 for m in found)
    assert all(m.tokens == found[0].tokens for m in found)
    rows = records(found)
    assert rows[0]["ratio"] == 1.0
    for row, m in zip(rows, found, strict=True):
        assert row["ratio"] == pytest.approx(
            m.tokens_per_second / found[0].tokens_per_second, abs=1e-3
        )
    assert len(markdown(found).splitlines()) == 2 + len(found)


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
    result = CliRunner().invoke(main, ["bench", str(pipeline), *options])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["results"][0]["draft"] == "plain"
    assert all(row["identical_rows"] == 2 for row in found["results"])


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
