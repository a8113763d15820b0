"""The exception tree and the exit-code table.

EagleBatchError
├── ConfigError          the user's file, option or input is wrong; nothing was started
│   ├── DataError        an input data set cannot be read or does not hold what the pipeline names
│   └── HeadError        a head does not fit its target, or is no EAGLE head that we load
├── ModelError           the target cannot be loaded, or its forward pass cannot be reproduced
├── RequestError         one row can never run (too long, not text): the row is quarantined
├── StoreError           an output store refused, timed out or answered with something impossible
├── OutputBusyError      another run holds the output
├── LedgerError          the output holds something that this job did not write
├── StoppedError         the job stopped by itself: too many errors, no workers left
└── InterruptedRunError  the user stopped the job; what was committed stays

Every class survives pickling, carries one message for people, and maps to one exit code.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What `eagle-batch` returns to the shell; the same table for every command."""

    COMPLETE = 0
    BAD_INPUT = 2
    QUARANTINED = 3
    STOPPED = 4
    BUSY = 5
    INTERRUPTED = 130


class Reason(StrEnum):
    """Why a row was quarantined; the `reason` column of `errors/*.parquet`."""

    PROMPT_TOO_LONG = "prompt_too_long"
    EMPTY_PROMPT = "empty_prompt"
    TEMPLATE_ERROR = "template_error"
    INVALID_TEXT = "invalid_text"
    GENERATION_OVERFLOW = "generation_overflow"
    NOTHING_ALLOWED = "nothing_allowed"
    INCOMPLETE_STRUCTURE = "incomplete_structure"
    OUT_OF_RANGE = "out_of_range"
    WORKER_CRASH = "worker_crash"
    INVALID_SAMPLING = "invalid_sampling"
    VALIDATION = "validation"
    VALIDATOR_ERROR = "validator_error"
    DROPPED = "dropped"
    CONTAMINATED = "contaminated"
    DUPLICATE = "duplicate"


#: Reasons of rows that were left out on purpose; they are no errors, and are counted apart.
DROPS = frozenset({Reason.DROPPED, Reason.CONTAMINATED, Reason.DUPLICATE})


class EagleBatchError(Exception):
    """Base of every error that is meant for the user; `str(error)` is the whole message."""

    exit_code: ExitCode = ExitCode.BAD_INPUT


class ConfigError(EagleBatchError, ValueError):
    """One or more problems in a pipeline, an option or an input, all of them in one message."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class DataError(ConfigError):
    """An input data set is missing, unreadable, empty or lacks a column that is named."""


class HeadError(ConfigError):
    """A head is damaged, of an unsupported kind, or does not fit its target."""


class ModelError(EagleBatchError, ValueError):
    """The target cannot be loaded, or the engine cannot reproduce its forward pass."""


class RequestError(EagleBatchError, ValueError):
    """One request can never run; `reason` is the code that goes into the error table."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RequestError], tuple[Reason, str]]:
        return type(self), (self.reason, self.message)


class StoreError(EagleBatchError, OSError):
    """An object store or disk failed for longer than we retry."""

    exit_code = ExitCode.STOPPED


class OutputBusyError(EagleBatchError):
    """Another run holds the lock of the output."""

    exit_code = ExitCode.BUSY


class LedgerError(EagleBatchError):
    """The output belongs to another job, or holds objects that cannot be explained."""


class StoppedError(EagleBatchError):
    """The job ended itself before it was complete; the message says how to resume."""

    exit_code = ExitCode.STOPPED


class InterruptedRunError(EagleBatchError):
    """The user interrupted the job; committed shards stay and the same command resumes."""

    exit_code = ExitCode.INTERRUPTED
