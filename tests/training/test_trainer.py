"""A run learns, resumes to the same bits, keeps its best head and exports what it trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_batch.errors import ConfigError, DataError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.training.config import TrainingConfig
from eagle_batch.training.dataset import Dataset, feature_scale
from eagle_batch.training.features import Chunk, FeatureStore
from eagle_batch.training.trainer import Progress, Trainer
from eagle_batch.training.validation import measure_acceptance
from tests.training.conftest import AUX


def settings(out: Path, **changes: Any) -> TrainingConfig:
    values = {
        "target": "tiny",
        "data": ["texts.parquet"],
        "out": out,
        "aux_layers": list(AUX),
        "draft_vocab": 48,
        "ttt_steps": 3,
        "epochs": 3,
        "lr": 3e-3,
        "batch_tokens": 256,
        "held_out": 0.2,
        "evaluate_every": 4,
        "save_every": 2,
    }
    return TrainingConfig.model_validate(values | changes)


def train(
    target: Any, chunk: Chunk, config: TrainingConfig, stop_at: int | None = None
) -> list[float]:
    losses: list[float] = []

    def on_step(progress: Progress) -> None:
        losses.append(progress.loss)
        if progress.step == stop_at:
            raise KeyboardInterrupt

    trainer = Trainer(config, target, [chunk], "tiny")
    if stop_at is None:
        trainer.run(on_step)
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(on_step)
    return losses


def curve(out: Path) -> list[dict[str, Any]]:
    """The written curve, without the clock."""
    rows = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("start", ["target", "random"])
def test_a_head_learns_the_texts_of_its_target(
    start: str, target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    losses: list[float] = []
    trainer = Trainer(settings(tmp_path, epochs=25, start=start), target, [chunk])
    before = acceptance(trainer, trainer.data.training)
    trainer.run(lambda progress: losses.append(progress.loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert acceptance(trainer, trainer.data.training) > before + 0.25


def test_an_interrupted_run_goes_on_to_the_same_bits(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    whole = train(target, chunk, settings(tmp_path / "whole"))
    for stop_at in (3, 8):
        out = tmp_path / f"stopped-{stop_at}"
        first = train(target, chunk, settings(out), stop_at)
        second = train(target, chunk, settings(out))
        saved = stop_at - stop_at % 2
        assert first[:saved] + second == whole
        assert curve(out) == curve(tmp_path / "whole")
        expected = weights(tmp_path / "whole" / "head")
        assert all(torch.equal(t, expected[n]) for n, t in weights(out / "head").items())


def test_eagle1_resumes_with_its_noise(target: Any, tmp_path: Path, data_file: Path) -> None:
    store = FeatureStore(tmp_path, target, identity="tiny", aux_layers=(), max_length=64)
    chunk = store.chunk(data_file)
    config = {"kind": "eagle1", "aux_layers": None, "epochs": 2}
    whole = train(target, chunk, settings(tmp_path / "whole", **config))
    assert whole[-1] < whole[0]
    out = tmp_path / "stopped"
    first = train(target, chunk, settings(out, **config), 4)
    assert first + train(target, chunk, settings(out, **config)) == whole
    head = load_head(str(out / "head"), dtype=torch.float32, device="cpu")
    assert head.config.kind == "eagle1"


def test_a_damaged_state_falls_back_to_the_one_before(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    whole = train(target, chunk, settings(tmp_path / "whole"))
    out = tmp_path / "stopped"
    train(target, chunk, settings(out), 6)
    older, newest = sorted((out / "state").glob("state-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    assert train(target, chunk, settings(out)) == whole[4:]
    assert older.name == "state-00000004.pt"


def test_another_configuration_does_not_continue_a_run(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    train(target, chunk, settings(tmp_path), 2)
    with pytest.raises(ConfigError, match="another `out`"):
        train(target, chunk, settings(tmp_path, lr=1e-4))


def test_a_finished_run_is_not_trained_again(target: Any, chunk: Chunk, tmp_path: Path) -> None:
    train(target, chunk, settings(tmp_path))
    assert train(target, chunk, settings(tmp_path)) == []


def test_training_can_start_from_an_exported_head(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    train(target, chunk, settings(tmp_path / "a", epochs=10))
    best = max(row["acceptance"][0] for row in curve(tmp_path / "a"))
    start = str(tmp_path / "a" / "head")
    trainer = Trainer(settings(tmp_path / "b", start=start), target, [chunk])
    found = acceptance(trainer)
    assert found == pytest.approx(best, abs=0.05)  # exported in bfloat16


def test_a_head_to_go_on_from_can_learn_more_tokens(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    """What it drafts already it drafts as before; the rest begins with the target's weights."""
    train(target, chunk, settings(tmp_path / "a", draft_vocab=20))
    start = str(tmp_path / "a" / "head")
    narrow: Any = Trainer(settings(tmp_path / "b", start=start, draft_vocab=20), target, [chunk])
    wide: Any = Trainer(settings(tmp_path / "c", start=start, draft_vocab=30), target, [chunk])
    few, many = narrow.head.draft_to_target, wide.head.draft_to_target
    assert (len(few), len(many)) == (20, 30)
    assert torch.equal(many, many.sort().values)
    known = torch.isin(many, few)
    assert int(known.sum()) == 20
    assert torch.equal(wide.head.lm_head.weight[known], narrow.head.lm_head.weight)
    rows = target.get_output_embeddings().weight[many[~known]]
    assert torch.equal(wide.head.lm_head.weight[~known], rows)
    train(target, chunk, settings(tmp_path / "c", start=start, draft_vocab=30))
    head = load_head(str(tmp_path / "c" / "head"), dtype=torch.float32, device="cpu")
    assert head.config.draft_vocab == 30


def acceptance(trainer: Trainer, rows: list[int] | None = None) -> float:
    return measure_acceptance(
        trainer.head,
        trainer.data,
        rows or trainer.held_out,
        trainer.vocabulary,
        steps=3,
        batch_tokens=256,
    ).by_position[0]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("layout", ["head", "head-speculators"])
def test_exported_heads_read_raw_features_as_the_trained_one_reads_scaled_ones(
    layout: str, target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    """The scale of the features is folded into fc, so that no engine need know of it."""
    config = settings(tmp_path, epochs=1, evaluate_every=1000)
    trainer = Trainer(config, target, [chunk], "tiny")
    trainer.run()
    head = load_head(str(tmp_path / layout), dtype=torch.float32, device="cpu")
    head.bind(target.model.embed_tokens.weight, target.lm_head.weight)
    row = trainer.data.training[0]
    scaled = trainer.data.batch([row])
    raw = Dataset([chunk], config.held_out).batch([row])
    positions = torch.arange(scaled.tokens_BN.shape[1] - 1)[None]

    def run(model: Any, aux: Tensor) -> Tensor:
        g = model.fuse(aux[:, :-1])
        return model.logits(model(scaled.tokens_BN[:, 1:], g, positions, causal))

    with torch.no_grad():
        ours, exported = run(trainer.head, scaled.aux_BNF), run(head, raw.aux_BNF)
    torch.testing.assert_close(exported, ours, rtol=0.05, atol=0.05)
    assert head.config.aux_layers == AUX
    assert head.draft_to_target is not None
    assert head.draft_to_target.tolist() == trainer.head.draft_to_target.tolist()  # type: ignore[union-attr]


def test_exported_ids_mean_the_same_to_every_reader(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    train(target, chunk, settings(tmp_path, epochs=1))
    record = json.loads((tmp_path / "head" / "config.json").read_text())
    assert record["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    nested = record["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert nested == [k - 1 for k in AUX]
    assert (tmp_path / "head" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    names = set(weights(tmp_path / "head"))
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d", "fc.weight"} <= names
    assert "layers.0.hidden_norm.weight" in weights(tmp_path / "head-speculators")


def test_the_best_head_is_kept_when_later_ones_are_worse(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    config = settings(tmp_path, epochs=6, lr=0.5, evaluate_every=1, clip=1e6, warmup=0.9)
    train(target, chunk, config)
    scores = [row["acceptance"][0] for row in curve(tmp_path)]
    assert scores[-1] < max(scores), "the run was meant to get worse"
    head = load_head(str(tmp_path / "head"), dtype=torch.float32, device="cpu")
    head.bind(target.model.embed_tokens.weight, target.lm_head.weight)
    trainer = Trainer(config.model_copy(update={"start": str(tmp_path / "head")}), target, [chunk])
    assert acceptance(trainer) == pytest.approx(max(scores), abs=0.05)


def test_an_epoch_draws_every_training_row_once_and_is_reproducible(chunk: Chunk) -> None:
    data = Dataset([chunk], 0.2)
    batches = data.epoch(7, 1, 128)
    assert sorted(i for batch in batches for i in batch) == data.training
    assert batches == Dataset([chunk], 0.2).epoch(7, 1, 128)
    assert batches != data.epoch(7, 2, 128)
    assert not set(data.training) & set(data.validation)


def test_a_run_needs_rows_to_train_on_and_rows_to_validate_on(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="0 held out"):
        Trainer(settings(tmp_path, held_out=1e-9), target, [chunk])


def test_completion_positions_are_those_whose_next_token_is_in_the_completion(
    chunk: Chunk, texts: list[tuple[list[int], list[int]]]
) -> None:
    data = Dataset([chunk], 0.2)
    rows = data.training[:5]
    batch = data.batch(rows)
    for at, row in enumerate(rows):
        prompt, completion = texts[row]
        last = len(prompt) + len(completion) - 1
        wanted = [len(prompt) - 1 <= j < last for j in range(batch.tokens_BN.shape[1])]
        assert batch.completion_BN[at].tolist() == wanted
        next_tokens = batch.tokens_BN[at, 1:][batch.completion_BN[at, :-1]]
        assert next_tokens.tolist() == completion


def test_the_feature_scale_ignores_the_first_token_of_a_text(chunk: Chunk) -> None:
    from dataclasses import replace

    spiked = chunk.aux_TF.clone()
    spiked[chunk.starts[:-1]] = 1e4
    scale = feature_scale([replace(chunk, aux_TF=spiked)])
    assert torch.equal(scale, feature_scale([chunk]))
    others = torch.ones(len(spiked), dtype=torch.bool)
    others[chunk.starts[:-1]] = False
    expected = chunk.aux_TF[others].float().square().mean(0).sqrt()
    torch.testing.assert_close(scale, expected, rtol=1e-4, atol=1e-3)


def test_the_chain_length_is_that_of_a_real_decoding(
    target: Any, chunk: Chunk, tmp_path: Path
) -> None:
    """Decode greedy texts with chains, token by token, and count the target's passes."""
    config = settings(tmp_path, epochs=4)
    trainer = Trainer(config, target, [chunk])
    trainer.run()
    found = measure_acceptance(
        trainer.head,
        trainer.data,
        trainer.held_out,
        trainer.vocabulary,
        steps=3,
        batch_tokens=256,
    )
    tokens = passes = 0
    for row in trainer.held_out:
        gained, rounds = decode_with_chains(trainer, row, 3)
        tokens, passes = tokens + gained, passes + rounds
    assert found.chain_length == pytest.approx(tokens / passes, abs=0.02)
    assert found.chain_length is not None
    assert found.chain_length > 1.0


def decode_with_chains(trainer: Trainer, row: int, steps: int) -> tuple[int, int]:
    from tests.training.test_unroll import draft_chain

    batch = trainer.data.batch([row])
    text = batch.tokens_BN[0]
    at = int(trainer.data.sample(row).prompt_length) - 1
    tokens = rounds = 0
    while at < len(text) - 2:
        known = torch.cat([text, text.new_zeros(steps)])
        states = draft_chain(trainer.head, known, batch.aux_BNF[0], at, steps)
        right = 0
        for state in states:
            draft = int(trainer.head.logits(state).argmax())
            token = int(trainer.head.draft_to_target[draft])  # type: ignore[index]
            if at + 2 + right >= len(text) or token != int(text[at + 2 + right]):
                break
            right += 1
        gained = min(right + 1, len(text) - 2 - at)
        at, tokens, rounds = at + gained, tokens + gained, rounds + 1
    return tokens, rounds
