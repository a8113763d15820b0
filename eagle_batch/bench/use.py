"""How much of a device a measurement used, in the two units that bound decoding."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_batch.bench.measure import Measurement

#: Bytes of one weight.
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Workload:
    """A target and the device that it runs on, in numbers."""

    #: Weights that a token is computed with, and bytes of those that a pass reads.
    weights: int
    weight_bytes: int
    peak_flops: float
    peak_bytes_per_s: float

    def flops_use(self, found: Measurement) -> float:
        """Return the model FLOPs utilisation.

        Two operations for each weight and each token of prompts and texts, over the whole time;
        what is drafted and refused is no use, attention itself is not counted (as PaLM's MFU
        without its attention term).
        """
        metrics = found.metrics
        tokens = metrics.prompt_tokens - metrics.cached_prompt_tokens + found.tokens
        return 2 * self.weights * tokens / found.seconds / self.peak_flops

    def memory_use(self, found: Measurement) -> float:
        """Return the share of the memory's speed that reading the weights takes in verification.

        Each pass reads every weight once; keys and values are not counted.
        """
        seconds = found.metrics.verify_s
        moved = found.metrics.target_passes * self.weight_bytes
        return moved / seconds / self.peak_bytes_per_s if seconds else 0.0
