"""Tiny models and a plain decoder, shipped so that users can test pipelines without a download.

The decoder is the oracle of the engine's tests: one row, no cache, the whole sequence again for
every token, its own code for temperature, top-k, top-p and min-p. It shares only the addressed
noise.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_batch.engine.grammars import Grammars
from eagle_batch.engine.noise import gumbel
from eagle_batch.engine.request import SamplingParams
from eagle_batch.models.eagle1 import Eagle1Head
from eagle_batch.models.eagle3 import Eagle3Head
from eagle_batch.models.heads import Head, HeadConfig
from eagle_batch.models.target import ATTENTION, Target, reference_logits

#: Families of tiny models: transformers' configuration class of each.
FAMILIES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "mixtral": "MixtralConfig",
}
BOS, EOS = 1, 2


def tiny_model(
    family: str = "llama",
    *,
    vocab: int = 24,
    layers: int = 6,
    window: int | None = None,
    seed: int = 0,
) -> Any:
    """Return a random transformers causal LM of a family, float32, small enough for milliseconds.

    window: size of the sliding attention window where the family has one.
    """
    import transformers

    options: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if window is not None:
        options |= {"sliding_window": window, "use_sliding_window": True}
    config = getattr(transformers, FAMILIES[family])(**options)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def tiny_target(family: str = "llama", **options: Any) -> Target:
    """Return a tiny random model behind the engine's own seam, its forward pass checked."""
    model = tiny_model(family, **options)
    reference_NV = reference_logits(model)
    target = Target(model)
    target.check_parity(reference_NV)
    return target


def tiny_head(
    target: Target,
    kind: str = "eagle3",
    *,
    draft_vocab: int | None = None,
    seed: int = 1,
    **changes: Any,
) -> Head:
    """Return a random head that fits a target; with a small vocabulary it is right now and then.

    changes: of its `HeadConfig`.
    """
    shape = target.shape
    draft_vocab = shape.vocab if kind == "eagle1" or draft_vocab is None else draft_vocab
    config = HeadConfig(
        kind="eagle1" if kind == "eagle1" else "eagle3",
        hidden=shape.hidden,
        target_hidden=shape.hidden,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=48,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        vocab=shape.vocab,
        draft_vocab=draft_vocab,
        aux_layers=() if kind == "eagle1" else (1, shape.layers // 2, shape.layers - 1),
        own_lm_head=kind != "eagle1",
    )
    config = replace(config, **changes)
    torch.manual_seed(seed)
    ids = torch.randperm(shape.vocab)[:draft_vocab].sort().values
    full = draft_vocab == shape.vocab
    head = Eagle1Head(config) if kind == "eagle1" else Eagle3Head(config, None if full else ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    head.bind(target.embed_weight_VH, target.lm_head_weight_VH)
    return head.eval().requires_grad_(False)


@torch.inference_mode()
def plain_decode(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    noise_key: int = 0,
    eos_ids: Sequence[int] = (EOS,),
    tokenizer: Any = None,
) -> list[int]:
    """Decode one prompt the slow, obvious way with the model's own eager attention.

    tokenizer: needed for bad words and for structured output.
    """
    model.set_attn_implementation("eager")
    try:
        tokens: list[int] = []
        while not _ended(tokens, params, eos_ids):
            ids = torch.tensor([[*prompt, *tokens]])
            logits_V = model(input_ids=ids, use_cache=False).logits[0, -1].double()
            logits_V = plain_penalties(logits_V, prompt, tokens, params)
            logits_V[plain_banned(tokens, params, tokenizer, eos_ids)] = -math.inf
            if len(tokens) < params.min_tokens:
                logits_V[list(eos_ids)] = -math.inf
            tokens.append(plain_choice(logits_V, len(tokens), params, noise_key))
        return tokens
    finally:
        model.set_attn_implementation(ATTENTION)


def plain_penalties(
    logits_V: Tensor, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> Tensor:
    """Apply penalties and biases token by token, by their definitions."""
    out = logits_V.clone()
    for token in set(prompt) | set(tokens):
        if out[token] > 0:
            out[token] /= params.repetition_penalty
        else:
            out[token] *= params.repetition_penalty
    for token in set(tokens):
        out[token] -= params.presence_penalty
        out[token] -= params.frequency_penalty * tokens.count(token)
    for token, bias in params.logit_bias:
        out[token] += bias
    return out


def plain_banned(
    tokens: list[int], params: SamplingParams, tokenizer: Any, eos_ids: Sequence[int]
) -> list[int]:
    """Return the tokens that would complete a bad word or leave the grammar, tried one by one."""
    banned = []
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):
            *before, last = tokenizer.encode(text, add_special_tokens=False)
            if before == tokens[len(tokens) - len(before) :]:
                banned.append(last)
    if params.structured is None:
        return banned
    vocab = len(tokenizer)
    guide = Grammars(tokenizer, vocab, eos_ids).guide(params.structured)
    guide.advance(tokens)
    bits = guide.allowed(())
    assert bits is not None
    return banned + [t for t in range(vocab) if not bits[t // 8] >> (t % 8) & 1]


def plain_choice(logits_V: Tensor, index: int, params: SamplingParams, noise_key: int) -> int:
    """Choose one token by the definition: argmax of processed log-probabilities plus noise."""
    if params.temperature == 0:
        return int(logits_V.argmax())
    log_p = plain_distribution(logits_V, params).log()
    noise_V = gumbel(torch.tensor(noise_key), torch.tensor(index), torch.arange(len(logits_V)))
    return int((log_p + noise_V).argmax())


def plain_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the processed probabilities `[V]`: temperature, then top-k, then top-p, then min-p."""
    p = (logits_V / params.temperature).softmax(-1)
    if params.top_k is not None:
        kth = sorted(p.tolist(), reverse=True)[: params.top_k][-1]
        p = _renormalised(p, [x >= kth for x in p.tolist()])
    if params.top_p is not None and params.top_p < 1:
        reached, least = 0.0, 0.0
        for x in sorted(p.tolist(), reverse=True):
            reached, least = reached + x, x
            if reached >= params.top_p:
                break
        p = _renormalised(p, [x >= least for x in p.tolist()])
    if params.min_p:
        floor = params.min_p * float(p.max())
        p = _renormalised(p, [x >= floor for x in p.tolist()])
    return p


def _renormalised(p: Tensor, keep: list[bool]) -> Tensor:
    kept = torch.where(torch.tensor(keep), p, 0.0)
    return kept / kept.sum()


def _ended(tokens: list[int], params: SamplingParams, eos_ids: Sequence[int]) -> bool:
    if not tokens:
        return False
    if len(tokens) >= params.max_tokens:
        return True
    if len(tokens) < params.min_tokens:
        return False
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    return tokens[-1] in ends


def save_tiny_target(folder: Path, family: str = "llama", *, seed: int = 0) -> Path:
    """Write a tiny random target, a byte tokenizer and a chat template to a folder."""
    tokenizer = byte_tokenizer()
    model = tiny_model(family, vocab=len(tokenizer), seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with three special tokens and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), specials, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
