"""vLLM on the CPU, plainly or with `eagle3:DEPTH`."""

from __future__ import annotations

import os
from typing import Any

from tests.bench.sides.work import Run, Work, main


class Side:
    """One vLLM engine."""

    def __init__(self, work: Work) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{work.threads - 1}"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        method, _, depth = work.draft.partition(":")
        extra: dict[str, Any] = {}
        if method != "plain":
            extra["speculative_config"] = {
                "method": method,
                "model": work.head,
                "num_speculative_tokens": int(depth),
            }
        self._llm = LLM(
            model=work.model,
            dtype=work.dtype,
            max_model_len=work.context,
            max_num_seqs=max(map(int, work.rows)),
            enable_prefix_caching=False,
            disable_log_stats=method == "plain",
            **extra,
        )

    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode all prompts, `batch` at a time, rows following one another."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs = batch
        _scheduler(self._llm).max_num_running_reqs = batch
        before = self._drafts()
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        rounds, accepted = (now - then for now, then in zip(self._drafts(), before, strict=True))
        return Run(texts, 1 + accepted / rounds if rounds else None)

    def _drafts(self) -> tuple[int, int]:
        """Return the number of drafts, and of drafted tokens that were accepted, so far."""
        found = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_accepted_tokens": 0}
        try:
            metrics = self._llm.get_metrics()
        except AssertionError:  # no statistics where nothing is drafted
            return 0, 0
        for metric in metrics:
            if metric.name in found:
                found[metric.name] += metric.value
        drafts, accepted = found.values()
        return drafts, accepted


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


if __name__ == "__main__":
    main(Side)
