"""vLLM in the place of our engine: for targets that one GPU cannot hold.

The same requests go in, the same completions and counters come out, so that pipeline, ledger,
metrics and exit codes are those of our own engine. What differs: vLLM drafts a chain and not a
tree, its draws belong to a seed of each row and not to a position, so that sampled text depends on
the draft, and its floating point depends on the batch.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from eagle_batch.engine.build import DEFAULT_CONTEXT, DTYPES
from eagle_batch.engine.request import (
    Completion,
    EngineMetrics,
    EngineSpec,
    FinishReason,
    Request,
    SamplingParams,
    check_room,
)
from eagle_batch.errors import ConfigError, HeadError, ModelError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.export import export_head

#: What vLLM reads from its environment, unless the user told it something else.
ENVIRONMENT = {
    # The engine is to die with its worker, and to be pumped by it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Else scores that are not finite would become text.
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
}
#: Rows that vLLM decodes together unless told otherwise; it makes rows wait for memory itself.
_SLOTS = 256
#: Tokens that an n-gram may have which is looked up.
_LONGEST_NGRAM = 4


class VllmEngine:
    """See `eagle_batch.job.spec.EngineLike`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load target and head; see `build_vllm_engine`."""
        self.tokenizer = AutoTokenizer.from_pretrained(spec.model, revision=spec.revision)
        self.slots = _SLOTS if spec.fit_slots else spec.slots
        #: Why there are so many slots, for people.
        self.sizing = "vLLM's own number" if spec.fit_slots else "as asked"
        self._context = _context(spec)
        self._depth = spec.depth if spec.head is not None or spec.ngram else 0
        self._engine = _load(spec, self._context)
        self._requests: dict[str, Request] = {}
        self._rows = 0
        self._seconds = 0.0
        # The counters are those of the process, which may have had another engine before.
        self._before = self._counters()

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return max(0, len(self._requests) - self.slots)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError when the row can never run."""
        check_room(request, self._context)
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        self._engine.add_request(request.id, prompt, _params(request))
        self._requests[request.id] = request

    def step(self) -> list[Completion]:
        """Let vLLM schedule one pass; return what finished."""
        begun = time.perf_counter()
        outputs = self._engine.step()
        self._seconds += time.perf_counter() - begun
        done = [self._completion(output) for output in outputs if output.finished]
        self._rows += len(done)
        return done

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was built."""
        return self._counters() - self._before

    def use_head(self, name: str) -> None:
        """Refuse: no pipeline that adapts has this engine."""
        raise NotImplementedError(f"vllm cannot go on with the head {name}")

    def _counters(self) -> EngineMetrics:
        """Return vLLM's own counters as ours."""
        found = {metric.name.removeprefix("vllm:"): metric for metric in self._engine.get_metrics()}
        drafts = _value(found, "spec_decode_num_drafts")
        accepted = getattr(found.get("spec_decode_num_accepted_tokens_per_pos"), "values", [])
        tokens = _value(found, "generation_tokens")
        # Each prompt's first token comes from prefill; the others from passes, of which each gave a
        # row one token more than it accepted.
        rounds = max(0, tokens - self._begun(found))
        row_passes = max(0, rounds - sum(accepted))
        passes = getattr(found.get("iteration_tokens_total"), "count", 0)
        return EngineMetrics(
            rows=self._rows,
            prompt_tokens=_value(found, "prompt_tokens"),
            cached_prompt_tokens=_value(found, "prompt_tokens_cached"),
            completion_tokens=tokens,
            target_passes=passes,
            row_passes=row_passes,
            round_tokens=rounds,
            drafted_at=(drafts,) * self._depth,
            accepted_at=tuple(accepted[: self._depth]) or (0,) * self._depth,
            slot_passes=passes * self.slots,
            passes_by_shape=((self._shape, passes),) if passes else (),
            verify_s=self._seconds,
        )

    @property
    def _shape(self) -> str:
        return f"{self._depth},1,{self._depth}" if self._depth else "plain"

    def _begun(self, found: Mapping[str, Any]) -> int:
        return int(getattr(found.get("time_to_first_token_seconds"), "count", 0))

    def _completion(self, output: Any) -> Completion:
        request = self._requests.pop(output.request_id)
        (made,) = output.outputs
        tokens = tuple(made.token_ids)
        reason = _finish_reason(request, made, len(tokens))
        if output.metrics is not None and output.metrics.is_corrupted:
            reason = "overflow"
        drafted, by_pass = _passes(made.spec_decode_metrics, len(tokens))
        return Completion(
            request_id=request.id,
            token_ids=tokens,
            text="" if reason == "overflow" else made.text,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_ids),
            target_passes=len(by_pass),
            drafted=drafted,
            accepted=sum(by_pass),
            accepted_by_pass=by_pass,
            complete=request.params.structured is None or reason in {"eos", "stop"},
            prompt_ids=request.prompt_ids,
            **_logprobs(request, made),
        )


def build_vllm_engine(spec: EngineSpec) -> VllmEngine:
    """Load what a spec names into vLLM.

    Raises ConfigError where vLLM is not installed or is built for another device, HeadError for a
    head that it cannot draft with, ModelError for a target that it cannot load.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            f"engine.kind: vllm cannot be imported here ({error}); install "
            "'eagle-batch[vllm]' on every node, or a build of vLLM for its device"
        ) from error
    if current_platform.device_type != spec.device:
        raise ConfigError(
            f"engine.kind: the vllm here is built for {current_platform.device_type}, and the "
            f"workers run on {spec.device}; install a build for {spec.device} or set workers.gpus"
        )
    return VllmEngine(spec)


def _load(spec: EngineSpec, context: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory(prefix="eagle-batch-head-") as folder:
        options: dict[str, Any] = {
            "model": spec.model,
            "revision": spec.revision,
            "dtype": spec.dtype,
            "max_model_len": context,
            "max_num_seqs": _SLOTS if spec.fit_slots else spec.slots,
            "tensor_parallel_size": spec.tensor_parallel,
            "distributed_executor_backend": "mp" if spec.tensor_parallel > 1 else "uni",
            "speculative_config": _speculation(spec, Path(folder)),
            # What is compiled on a CPU takes minutes and gains little.
            "enforce_eager": spec.device == "cpu",
            "disable_log_stats": False,
            "per_request_spec_decode_metrics": "detailed",
        }
        try:
            return LLMEngine.from_engine_args(EngineArgs(**options))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"target.model: vllm cannot load {spec.model!r}: {error}") from error


def _speculation(spec: EngineSpec, folder: Path) -> dict[str, Any] | None:
    if spec.head is None:
        longest = {"prompt_lookup_max": _LONGEST_NGRAM, "num_speculative_tokens": spec.depth}
        return {"method": "ngram", **longest} if spec.ngram else None
    layers = AutoConfig.from_pretrained(spec.model, revision=spec.revision).get_text_config()
    dtype = DTYPES[spec.dtype]
    # Read by us, whatever its layout, and strictly; written in the one that vLLM knows.
    head = load_head(
        spec.head, dtype=dtype, device="cpu", target_layers=int(layers.num_hidden_layers)
    )
    if head.config.kind != "eagle3":
        raise HeadError(
            f"speculation.head: {spec.head} is of the kind {head.config.kind}; vllm drafts with "
            "EAGLE-3 heads here; name one, or use our own engine"
        )
    export_head(head, folder / "head", dtype=dtype)
    return {
        "method": "eagle3",
        "model": str(folder / "head"),
        "num_speculative_tokens": spec.depth,
    }


def _context(spec: EngineSpec) -> int:
    config = AutoConfig.from_pretrained(spec.model, revision=spec.revision).get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if spec.context is not None and spec.context > limit:
        raise ConfigError(
            f"target.context: {spec.context} tokens, but the target was made for {limit}; "
            f"lower it to {limit} or less"
        )
    return spec.context or min(limit, DEFAULT_CONTEXT)


def _params(request: Request) -> Any:
    from vllm import SamplingParams as VllmParams

    params = request.params
    return VllmParams(
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        bad_words=list(params.bad_words),
        logprobs=params.logprobs,
        # Of the row, its sample and its stage: a resume draws the same.
        seed=request.noise_key & 0x7FFF_FFFF_FFFF_FFFF if params.temperature > 0 else None,
        structured_outputs=_structured(params),
        spaces_between_special_tokens=False,
    )


def _structured(params: SamplingParams) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if params.structured is None:
        return None
    kind, text = params.structured.kind, params.structured.text
    if kind == "choice":
        return StructuredOutputsParams(choice=json.loads(text))
    if kind == "regex":
        return StructuredOutputsParams(regex=text)
    return StructuredOutputsParams(json=text)


def _finish_reason(request: Request, made: Any, count: int) -> FinishReason:
    if made.finish_reason == "length":
        return "length" if count >= request.params.max_tokens else "context"
    if isinstance(made.stop_reason, str) or made.stop_reason in request.params.stop_token_ids:
        return "stop"
    return "eos"


def _passes(metrics: Any, count: int) -> tuple[int, tuple[int, ...]]:
    """Return the tokens that were drafted, and how many each pass put into the text.

    The first pass is prefill. A pass that drafted nothing is in no list of vLLM's: those come last.
    """
    accepted = [0, *(metrics.per_step_accepted if metrics is not None else ())]
    by_pass: list[int] = []
    left = count
    for each in accepted:
        if left:
            by_pass.append(min(each, left))
            left -= min(each + 1, left)
    return (metrics.num_draft_tokens if metrics is not None else 0), (*by_pass, *[0] * left)


def _logprobs(request: Request, made: Any) -> dict[str, Any]:
    if request.params.logprobs is None or made.logprobs is None:
        return {}
    chosen = zip(made.token_ids, made.logprobs, strict=True)
    best = (sorted(place.items(), key=lambda item: item[1].rank) for place in made.logprobs)
    count = request.params.logprobs
    return {
        "logprobs": tuple(place[token].logprob for token, place in chosen),
        "top_logprobs": tuple(
            tuple((token, each.logprob) for token, each in place[:count]) for place in best
        ),
    }


def _value(found: Mapping[str, Any], name: str) -> int:
    return int(getattr(found.get(name), "value", 0))
