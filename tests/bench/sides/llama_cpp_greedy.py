"""llama.cpp through its C interface, which decodes several sequences in one batch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp as cpp
import numpy as np

from tests.bench.sides.work import Run, Work, main

_TYPES = {"float32": cpp.LLAMA_FTYPE_ALL_F32, "bfloat16": cpp.LLAMA_FTYPE_MOSTLY_BF16}


class Side:
    """One model; a context for each batch size."""

    def __init__(self, work: Work) -> None:
        cpp.llama_backend_init()
        self._work = work
        params = cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = cpp.llama_model_load_from_file(str(_converted(work)).encode(), params)
        self._words = cpp.llama_model_get_vocab(self._model)
        self._vocab = cpp.llama_vocab_n_tokens(self._words)

    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode all prompts, `batch` at a time, rows following one another."""
        params = cpp.llama_context_default_params()
        params.n_ctx = batch * (self._work.context + 1)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._work.threads
        context = cpp.llama_init_from_model(self._model, params)
        try:
            return Run(_Decoding(self, context, prompts, batch, tokens).finish())
        finally:
            cpp.llama_free(context)

    def best(self, context: object, place: int) -> int:
        """Return the most probable token after the place of the newest batch."""
        logits = cpp.llama_get_logits_ith(context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def ends(self, token: int) -> bool:
        """Tell whether a token ends a text."""
        return bool(cpp.llama_vocab_is_eog(self._words, token))


class _Decoding:
    """Rows in sequences 0..batch-1; a sequence that is free takes the next prompt."""

    def __init__(
        self, side: Side, context: object, prompts: list[list[int]], batch: int, tokens: int
    ) -> None:
        self._side, self._context, self._tokens = side, context, tokens
        self._prompts = prompts
        self._waiting = list(range(len(prompts)))[::-1]
        self._free = list(range(batch))[::-1]
        self._rows: dict[int, int] = {}
        self._texts: list[list[int]] = [[] for _ in prompts]
        self._batch = cpp.llama_batch_init(512, 0, 1)

    def finish(self) -> list[list[int]]:
        """Decode until no row is left."""
        while self._waiting or self._rows:
            while self._waiting and self._free:
                self._admit(self._waiting.pop(), self._free.pop())
            self._step()
        cpp.llama_batch_free(self._batch)
        return self._texts

    def _admit(self, row: int, sequence: int) -> None:
        prompt = self._prompts[row]
        for start in range(0, len(prompt), 512):
            part = prompt[start : start + 512]
            self._fill([(token, start + i, sequence) for i, token in enumerate(part)])
        self._rows[sequence] = row
        self._keep(sequence, self._side.best(self._context, self._batch.n_tokens - 1))

    def _step(self) -> None:
        sequences = sorted(self._rows)
        entries = []
        for sequence in sequences:
            row = self._rows[sequence]
            text = self._texts[row]
            entries.append((text[-1], len(self._prompts[row]) + len(text) - 1, sequence))
        if not entries:
            return
        self._fill(entries)
        for place, sequence in enumerate(sequences):
            self._keep(sequence, self._side.best(self._context, place))

    def _fill(self, entries: list[tuple[int, int, int]]) -> None:
        """Run (token, position, sequence) entries; prompts want their last logits alone."""
        prefill = len(entries) > 1 and entries[0][2] == entries[-1][2]
        for i, (token, position, sequence) in enumerate(entries):
            self._batch.token[i], self._batch.pos[i] = token, position
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, sequence
            self._batch.logits[i] = not prefill or i == len(entries) - 1
        self._batch.n_tokens = len(entries)
        if cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")

    def _keep(self, sequence: int, token: int) -> None:
        row = self._rows[sequence]
        self._texts[row].append(token)
        if len(self._texts[row]) >= self._tokens or self._side.ends(token):
            cpp.llama_memory_seq_rm(cpp.llama_get_memory(self._context), sequence, -1, -1)
            del self._rows[sequence]
            self._free.append(sequence)


def _converted(work: Work) -> Path:
    """Return the model in the wanted number format, converted once from the quantised file."""
    path = Path(work.scratch) / f"llama-{work.dtype}.gguf"
    if not path.exists():
        params = cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = _TYPES[work.dtype], True
        if cpp.llama_model_quantize(work.gguf.encode(), str(path).encode(), ctypes.byref(params)):
            raise RuntimeError(f"{work.gguf}: cannot be converted")
    return path


if __name__ == "__main__":
    main(Side)
