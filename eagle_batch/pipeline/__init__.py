"""The pipeline file: its sections, their defaults, overrides, and what makes two jobs the same."""

from eagle_batch.pipeline.fingerprint import (
    InputIdentity,
    explain_difference,
    fingerprint,
    resolved,
)
from eagle_batch.pipeline.model import Adapt, Speculation, Target
from eagle_batch.pipeline.prompt import Message
from eagle_batch.pipeline.quality import Judge, Length, Validator, Vote
from eagle_batch.pipeline.result import Output
from eagle_batch.pipeline.running import EngineOptions, Limits, Workers
from eagle_batch.pipeline.sampling import Sampling
from eagle_batch.pipeline.source import Input
from eagle_batch.pipeline.stage import Repeat, Stage
from eagle_batch.pipeline.whole import (
    OUTPUT_COLUMNS,
    ROW_VARIABLE,
    TURN_VARIABLE,
    Pipeline,
    load_pipeline,
    parse_pipeline,
)
from eagle_batch.pipeline.whole_set import Decontaminate, Deduplicate

__all__ = [
    "OUTPUT_COLUMNS",
    "ROW_VARIABLE",
    "TURN_VARIABLE",
    "Adapt",
    "Decontaminate",
    "Deduplicate",
    "EngineOptions",
    "Input",
    "InputIdentity",
    "Judge",
    "Length",
    "Limits",
    "Message",
    "Output",
    "Pipeline",
    "Repeat",
    "Sampling",
    "Speculation",
    "Stage",
    "Target",
    "Validator",
    "Vote",
    "Workers",
    "explain_difference",
    "fingerprint",
    "load_pipeline",
    "parse_pipeline",
    "resolved",
]
