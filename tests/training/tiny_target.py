"""A small random target and texts of its own, greedy, as a training file holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

VOCAB, HIDDEN, LAYERS = 64, 32, 8
PROMPT, COMPLETION = 4, 20


def make_target(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a random model is nearly indifferent; a teacher has opinions
        model.lm_head.weight.mul_(5)
    return model


@torch.inference_mode()
def greedy_texts(model: Any, count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Random prompts, some shorter than others, and what the target makes of them."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for index in range(count):
        prompt = torch.randint(VOCAB, (1, PROMPT + index % 3), generator=generator)
        ids = prompt
        for _ in range(COMPLETION - index % 5):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        texts.append((prompt[0].tolist(), ids[0, prompt.shape[1] :].tolist()))
    return texts


def write_texts(path: Path, texts: list[tuple[list[int], list[int]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts, completions = zip(*texts, strict=True)
    table = pa.table({"prompt_token_ids": prompts, "completion_token_ids": completions})
    pq.write_table(table, path)
    return path
