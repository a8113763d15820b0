"""The hidden states that a head learns from are those that the engine will hand it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from eagle_batch.data.schema import TOKEN_IDS
from eagle_batch.errors import ConfigError, DataError
from eagle_batch.training.features import Chunk, collect_features, groups_of_similar_length
from eagle_batch.training.samples import (
    Sample,
    check_stages,
    find_files,
    is_held_out,
    read_samples,
)
from eagle_batch.training.vocabulary import choose_draft_vocabulary, coverage
from tests.training.conftest import AUX, store
from tests.training.tiny_target import write_texts


def layer_inputs(target: Any, tokens: Tensor) -> list[Tensor]:
    """Catch what goes into each decoder layer, and what lm_head reads."""
    caught: list[Tensor] = []
    modules = [*target.model.layers, target.lm_head]
    handles = [
        m.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach().clone()))
        for m in modules
    ]
    target(tokens)
    for handle in handles:
        handle.remove()
    return caught


def test_features_are_the_inputs_of_the_named_layers(target: Any) -> None:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs = layer_inputs(target, tokens)
    found = collect_features(target, tokens, [9, 9], AUX)
    expected = torch.cat([inputs[k] for k in AUX], dim=-1)
    torch.testing.assert_close(found.aux_BNF, expected.bfloat16())
    torch.testing.assert_close(found.last_BNH, inputs[-1].bfloat16())
    assert found.top_BN.tolist() == target.lm_head(inputs[-1]).argmax(-1).tolist()


def test_without_aux_layers_the_feature_is_the_last_hidden_state(target: Any) -> None:
    tokens = torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(2))
    found = collect_features(target, tokens, [5], ())
    assert torch.equal(found.aux_BNF, found.last_BNH)


def test_a_boundary_that_the_model_lacks_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"0\.\.7"):
        collect_features(target, torch.zeros(1, 2, dtype=torch.long), [2], (2, 4, 8))


def test_chunks_hold_every_row_as_if_it_were_alone(
    target: Any, texts: list[tuple[list[int], list[int]]], chunk: Chunk
) -> None:
    for row in (0, 7, 59):
        tokens = torch.tensor([texts[row][0] + texts[row][1]])
        span = slice(int(chunk.starts[row]), int(chunk.starts[row + 1]))
        alone = collect_features(target, tokens, [tokens.shape[1]], AUX)
        assert chunk.tokens_T[span].tolist() == tokens[0].tolist()
        torch.testing.assert_close(chunk.aux_TF[span], alone.aux_BNF[0], rtol=2e-2, atol=2e-2)
        assert int(chunk.prompt_lengths[row]) == len(texts[row][0])


def test_features_are_computed_once(target: Any, data_file: Path, tmp_path: Path) -> None:
    first = store(target, tmp_path).chunk(data_file, batch_tokens=256)
    again = store(None, tmp_path).chunk(data_file, batch_tokens=256)
    assert torch.equal(first.aux_TF, again.aux_TF)
    with pytest.raises(AttributeError):  # other layers are other features: the target is needed
        store(None, tmp_path, (1, 2, 3)).chunk(data_file)


def test_groups_hold_every_row_once_and_stay_in_size() -> None:
    lengths = [5, 30, 7, 7, 100, 2, 31]
    groups = groups_of_similar_length(lengths, 64)
    assert sorted(i for group in groups for i in group) == list(range(7))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 64


def test_rows_are_cut_and_rows_without_completion_left_out(tmp_path: Path) -> None:
    rows = [([1, 2], [3, 4, 5]), ([1, 2], []), ([], [3, 4]), ([1, 2, 3, 4], [5, 6])]
    path = write_texts(tmp_path / "a.parquet", rows)
    assert read_samples(path, 4) == [Sample((1, 2, 3, 4), 2)]


def test_the_output_of_a_job_is_training_data(tmp_path: Path) -> None:
    stages = [
        {"stage": "question", "prompt": [1, 2], "ids": [3, 4]},
        {"stage": "answer", "prompt": [5], "ids": [6, 7, 8]},
    ]
    rows = [stages, None, [{"stage": "question", "prompt": [1], "ids": []}]]
    table = pa.table({"id": ["a", "b", "c"], "token_ids": pa.array(rows, pa.list_(TOKEN_IDS))})
    pq.write_table(table, tmp_path / "part.parquet")
    found = read_samples(tmp_path / "part.parquet", 9)
    assert found == [Sample((1, 2, 3, 4), 2), Sample((5, 6, 7, 8), 1)]
    assert read_samples(tmp_path / "part.parquet", 9, ["answer"]) == found[1:]
    check_stages([tmp_path / "part.parquet"], ["answer", "question"])
    with pytest.raises(DataError, match=r"stages: ansver: .* answer, question"):
        check_stages([tmp_path / "part.parquet"], ["ansver", "answer"])


def test_stages_are_asked_of_the_output_of_a_job_only(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet", [([1, 2], [3, 4, 5])])
    with pytest.raises(DataError, match="not the output of a job"):
        check_stages([path], ["answer"])
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"b\.parquet: not a readable"):
        check_stages([tmp_path / "b.parquet"], ["answer"])


def test_a_file_without_token_columns_says_so(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="completion_token_ids"):
        read_samples(tmp_path / "a.parquet", 4)
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="not a readable"):
        read_samples(tmp_path / "b.parquet", 4)


def test_paths_folders_and_globs_are_found_and_nothing_is_an_error(tmp_path: Path) -> None:
    for name in ("x/a.parquet", "x/b.parquet", "c.parquet"):
        write_texts(tmp_path / name, [([1], [2, 3])])
    found = find_files(["x", "*.parquet", "x/a.parquet"], tmp_path)
    assert [p.name for p in found] == ["c.parquet", "a.parquet", "b.parquet"]
    with pytest.raises(DataError, match="nowhere"):
        find_files(["nowhere/*.parquet"], tmp_path)


def test_a_prompt_stays_on_its_side_whatever_the_answer() -> None:
    sides = [is_held_out(Sample((n, n + 1, 7), 2), 0.2) for n in range(500)]
    others = [is_held_out(Sample((n, n + 1, 9, 9), 2), 0.2) for n in range(500)]
    assert sides == others
    assert 60 < sum(sides) < 140


def test_the_draft_vocabulary_is_the_most_frequent_tokens_by_id() -> None:
    tokens = torch.tensor([9, 9, 9, 4, 4, 7, 0])
    kept = choose_draft_vocabulary(tokens, 3, 10)
    assert kept is not None
    assert kept.tolist() == [0, 4, 9]
    assert coverage(tokens, kept) == pytest.approx(6 / 7)
    assert choose_draft_vocabulary(tokens, 10, 10) is None
