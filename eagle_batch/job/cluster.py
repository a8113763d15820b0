"""Submissions to a Ray cluster through its Jobs API: start or attach, follow, stop.

An output has one chain of submissions, numbered: the newest is the one that counts, and a new one
starts only when it has ended. A name that is taken is never used again, which Ray requires.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_batch.errors import (
    ConfigError,
    EagleBatchError,
    ExitCode,
    InterruptedRunError,
    OutputBusyError,
    StoppedError,
)
from eagle_batch.job.parcel import Parcel

ENTRYPOINT = "python launch.py"
#: Seconds that a stopped job gets to commit what it can; Ray's own default is 3.
STOP_SECONDS = 60
POLL_S = 1.0
#: Seconds that a cluster may be silent before a follower gives up.
PATIENCE_S = 60.0
#: What Ray answers while no node of a cluster takes jobs yet.
_NOT_YET = "No available agent"
RUNNING = frozenset({"PENDING", "RUNNING"})
DIGEST = "eagle_batch_digest"
_RESULT = re.compile(r"complete[^\n]*: (\d+) of \d+ rows, (\d+) quarantined")
_FAILURES: dict[int, type[EagleBatchError]] = {
    ExitCode.BAD_INPUT: ConfigError,
    ExitCode.STOPPED: StoppedError,
    ExitCode.BUSY: OutputBusyError,
    ExitCode.INTERRUPTED: InterruptedRunError,
}

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Submission:
    """A job of the cluster that makes an output."""

    id: str
    #: Whether it was there already.
    attached: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A job of the cluster that made all rows."""

    rows: int
    quarantined: int


class Cluster:
    """The Jobs API of one Ray cluster."""

    def __init__(self, address: str) -> None:
        """Connect; raises StoppedError where nobody answers, ConfigError without a right token."""
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        self.address = address
        # It would tell of each upload.
        logging.getLogger("ray").setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(address, headers=_headers())
        except AuthenticationError as error:
            raise ConfigError(
                f"{address}: the cluster refuses the token: {_first_line(error)}; set "
                "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the token of the cluster"
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StoppedError(
                f"{address}: cannot talk to Ray's Jobs API: {_first_line(error)}; expected the "
                "address of the dashboard, such as http://HEAD:8265"
            ) from error

    def submit(self, parcel: Parcel) -> Submission:
        """Start a parcel's job, or attach to the one that makes the same output.

        Raises OutputBusyError where another pipeline is being run into that output.
        """
        number, last = self._newest(parcel.output)
        if last is not None and last.status in RUNNING:
            return self._attach(last, parcel)
        name = f"{_prefix(parcel.output)}{number + 1}"
        try:
            self._start(name, parcel)
        except RuntimeError as error:
            # Another submitter may have been a moment earlier; Ray answers that with a traceback.
            found = self._info(name)
            if found is None:
                raise StoppedError(f"{self.address}: {_refusal(error)}") from error
            return self._attach(found, parcel)
        return Submission(name, attached=False)

    def follow(self, submission: str, write: Write) -> Ended:
        """Pass the job's lines on until it ends.

        Raises InterruptedRunError when it was stopped, and what its exit code says when it failed.
        """
        text = asyncio.run(self._tail(submission, write))
        info = self._info(submission)
        while info is not None and info.status in RUNNING:
            time.sleep(POLL_S)
            info = self._info(submission)
        return self._judge(submission, info, text)

    def find(self, output: str) -> str:
        """Return the newest submission of an output; raises ConfigError where there is none."""
        _, last = self._newest(output)
        if last is None:
            raise ConfigError(f"{output}: nothing was submitted to {self.address} for this output")
        return str(last.submission_id)

    def is_running(self, submission: str) -> bool:
        """Tell whether a submission waits or runs."""
        info = self._info(submission)
        return info is not None and info.status in RUNNING

    def stop(self, submission: str) -> bool:
        """Let a job commit what it can and end; returns whether it was at work.

        Raises StoppedError when it does not end.
        """
        if not self.is_running(submission):
            return False
        self._client.stop_job(submission)
        deadline = time.monotonic() + STOP_SECONDS + 30
        while self.is_running(submission):
            if time.monotonic() > deadline:
                raise StoppedError(f"{submission}: is still there; see {self.address}")
            time.sleep(POLL_S)
        return True

    def _start(self, name: str, parcel: Parcel) -> None:
        """Submit; a cluster that has just started is asked again until its nodes take jobs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._submit(name, parcel)
            except RuntimeError as error:
                if _NOT_YET not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _submit(self, name: str, parcel: Parcel) -> None:
        self._client.submit_job(
            entrypoint=ENTRYPOINT,
            submission_id=name,
            runtime_env={
                "working_dir": str(parcel.folder),
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)},
            },
            metadata={DIGEST: parcel.digest, "pipeline": parcel.name, "output": parcel.output},
        )

    def _attach(self, info: Any, parcel: Parcel) -> Submission:
        if (info.metadata or {}).get(DIGEST) != parcel.digest:
            raise OutputBusyError(
                f"{parcel.output}: {info.submission_id} on {self.address} runs another pipeline "
                "into this output; wait for it, stop it, or choose another output.path"
            )
        return Submission(str(info.submission_id), attached=True)

    def _newest(self, output: str) -> tuple[int, Any]:
        prefix = _prefix(output)
        found = {
            int(info.submission_id.removeprefix(prefix)): info
            for info in self._client.list_jobs()
            if info.submission_id and info.submission_id.startswith(prefix)
        }
        return (max(found), found[max(found)]) if found else (0, None)

    def _info(self, submission: str) -> Any:
        """Return what the cluster knows of a job, None where it knows nothing.

        Raises StoppedError when the cluster is silent for longer than PATIENCE_S.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._client.get_job_info(submission)
            except RuntimeError:
                return None
            except OSError as error:  # of the connection: requests' errors are OSErrors
                if time.monotonic() > deadline:
                    raise StoppedError(
                        f"{self.address}: does not answer any more: {_first_line(error)}; the run "
                        "may go on without us, and the same command attaches to it again"
                    ) from error
                time.sleep(POLL_S)

    async def _tail(self, submission: str, write: Write) -> str:
        """Pass lines on and return the last ones; after a break, shown ones are left out."""
        from aiohttp import ClientError

        shown, text = 0, ""
        while True:
            skip = shown
            try:
                async for lines in self._client.tail_job_logs(submission):
                    fresh = lines[skip:]
                    skip = max(0, skip - len(lines))
                    if fresh:
                        write(fresh)
                        shown += len(fresh)
                        text = (text + fresh)[-4000:]
            except (RuntimeError, OSError, ClientError):
                await asyncio.sleep(POLL_S)
            if not self.is_running(submission):
                return text
            await asyncio.sleep(POLL_S / 4)

    def _judge(self, submission: str, info: Any, text: str) -> Ended:
        status = None if info is None else info.status
        code = None if info is None else info.driver_exit_code
        if status == "SUCCEEDED" or (status == "FAILED" and code == ExitCode.QUARANTINED):
            numbers = _RESULT.findall(text)
            rows, quarantined = numbers[-1] if numbers else (0, 0)
            return Ended(int(rows), int(quarantined))
        if status == "STOPPED":
            raise InterruptedRunError(
                f"{submission} on {self.address} was stopped; what it committed is kept, and the "
                "same command makes the rest"
            )
        failure = _FAILURES.get(-1 if code is None else code, StoppedError)
        said = "" if info is None else _last_line(info.message or "")
        raise failure(
            f"{submission} on {self.address} failed"
            + (f" with exit code {code}" if code is not None else "")
            + f": {said or 'see its lines above'}"
        )


def _prefix(output: str) -> str:
    """Return the start of an output's submission ids."""
    return f"eagle-batch-{hashlib.sha256(output.encode()).hexdigest()[:16]}-"


def _headers() -> dict[str, str] | None:
    """Return the token that the user named, as Ray's own variables do."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and not named and os.environ.get("RAY_AUTH_MODE") == "token":
        named = "~/.ray/auth_token"
    if not token and named:
        try:
            token = Path(named).expanduser().read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"{named}: cannot be read for the cluster's token: {error}"
            ) from error
    return {"Authorization": f"Bearer {token}"} if token else None


def _refusal(error: Exception) -> str:
    said = _last_line(error)
    if _NOT_YET not in said:
        return said
    return (
        f"{said} The head took none for {PATIENCE_S:.0f} s; its dashboard_agent.log says why: "
        "another Ray of that machine may have the port (ray start --dashboard-agent-listen-port)"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(text: object) -> str:
    lines = [line.strip() for line in str(text).replace("\\n", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""
