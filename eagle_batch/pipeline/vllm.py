"""What a pipeline may not ask of vLLM in the place of our engine."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_batch.pipeline.model import Speculation
from eagle_batch.pipeline.problems import Rule
from eagle_batch.pipeline.running import EngineOptions, Workers
from eagle_batch.pipeline.sampling import Sampling


def vllm_rules(
    engine: EngineOptions, workers: Workers, draft: Speculation, stages: Sequence[Sampling]
) -> list[tuple[bool, Rule]]:
    """Return each rule as (is it broken, (keys, sentence))."""
    together, gpus = engine.tensor_parallel, workers.gpus
    drafts = draft.head is not None or draft.method == "ngram"
    unable = [
        f"stages.{i}.sampling.{name}"
        for i, sampling in enumerate(stages)
        for name in ("min_p", "logit_bias")
        if drafts and getattr(sampling, name)
    ]
    return [
        (
            draft.tree == "static",
            (("speculation.tree",), "found 'static'; vllm drafts chains; leave it out"),
        ),
        (
            draft.adapt is not None,
            (("speculation.adapt",), "vllm takes no head while it runs; leave it out"),
        ),
        (
            draft.draft is not None,
            (("speculation.draft",), "found a draft model; vllm drafts with a head or n-grams"),
        ),
        (
            bool(draft.ngram_branch),
            (
                ("speculation.ngram_branch",),
                f"found {draft.ngram_branch}; vllm has no n-gram branch; leave it out",
            ),
        ),
        (
            gpus != together if together > 1 else gpus != "auto" and gpus > 1,
            (
                ("engine.tensor_parallel", "workers.gpus"),
                f"found {together} and {gpus}; expected the same number",
            ),
        ),
        (
            gpus != "auto" and not float(gpus).is_integer(),
            (("workers.gpus",), f"found {gpus}; vllm takes whole GPUs"),
        ),
        (
            bool(unable),
            (tuple(unable), "vllm has no such sampling while it drafts; set method: none"),
        ),
    ]
