"""transformers' own `generate`: batches padded on the left, each as long as its longest row."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from tests.bench.sides.work import Run, Work, main


class Side:
    """A model of transformers."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        dtype = getattr(torch, work.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype).eval()
        end = self._model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [end])

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode batch after batch."""
        texts = []
        for start in range(0, len(prompts), batch):
            rows = prompts[start : start + batch]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            pad = min(self._ends)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=pad,
            )
            texts += [self._cut(row) for row in out[:, longest:].tolist()]
        return Run(texts)

    def _cut(self, text: list[int]) -> list[int]:
        """Drop what follows the end of sequence, which is padding."""
        for place, token in enumerate(text):
            if token in self._ends:
                return text[: place + 1]
        return text


if __name__ == "__main__":
    main(Side)
