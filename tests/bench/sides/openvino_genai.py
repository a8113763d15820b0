"""OpenVINO GenAI with continuous batching."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from tests.bench.sides.work import OPENVINO_MODEL, Run, Work, main

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class Side:
    """A pipeline for each batch size: its scheduler is fixed when it is made."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._pipelines: dict[int, openvino_genai.ContinuousBatchingPipeline] = {}

    def run(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Decode all prompts, `batch` at a time, rows following one another."""
        pipeline = self._pipelines.setdefault(batch, self._pipeline(batch))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = tokens, False
        config.apply_chat_template = False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        # One alone is given alone: the limit of the scheduler lets more than one row run.
        groups = [[each] for each in inputs] if batch == 1 else [inputs]
        results = [r for group in groups for r in pipeline.generate(group, [config] * len(group))]
        return Run([list(result.m_generation_ids[0]) for result in results])

    def _pipeline(self, batch: int) -> openvino_genai.ContinuousBatchingPipeline:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = batch
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[self._work.dtype],
            "KV_CACHE_PRECISION": _PRECISIONS[self._work.dtype],
            "INFERENCE_NUM_THREADS": self._work.threads,
        }
        folder = Path(self._work.scratch) / OPENVINO_MODEL
        return openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)


if __name__ == "__main__":
    main(Side)
