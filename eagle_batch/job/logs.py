"""Structured logs: one JSON object a line, with the ids of job, run, worker and shard.

Workers write to stderr, which Ray keeps in a file for each process, shows in its dashboard and which
collectors read. The driver writes to the file that `submit --log` names; on a cluster also to Ray's
folder of logs.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "eagle_batch.job"


class JsonLines(logging.Formatter):
    """Formats a record of `Log`: time, level and message, then its ids and numbers."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line without its end."""
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "ids", {}),
        }
        return json.dumps(document, ensure_ascii=False, default=str)


class Log:
    """A logger that adds the same ids to every line."""

    def __init__(self, **ids: Any) -> None:
        """Take the ids, such as job and worker."""
        self._ids = ids
        self._logger = logging.getLogger(NAME)

    def info(self, message: str, **more: Any) -> None:
        """Write what happened, with more ids or numbers."""
        self._write(logging.INFO, message, more)

    def warning(self, message: str, **more: Any) -> None:
        """Write what somebody may want to mend."""
        self._write(logging.WARNING, message, more)

    def error(self, message: str, **more: Any) -> None:
        """Write what went wrong."""
        self._write(logging.ERROR, message, more)

    def _write(self, level: int, message: str, more: dict[str, Any]) -> None:
        # Not by `extra`'s own names, which must not clash with those of a record.
        self._logger.log(level, "%s", message, extra={"ids": self._ids | more})


def log_to_stderr() -> None:
    """Send the lines of this process to stderr, once."""
    _add(logging.StreamHandler(sys.stderr))


def log_to_file(path: Path) -> None:
    """Append the lines of this process to a file; raises OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _add(logging.FileHandler(path, encoding="utf-8", delay=False))


def _add(handler: logging.Handler) -> None:
    logger = logging.getLogger(NAME)
    handler.setFormatter(JsonLines())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
