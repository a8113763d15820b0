"""Structured logs: one JSON object a line, with the ids of job, run, worker and shard.

Workers write to stderr, which Ray keeps in a file for each process, shows in its dashboard, and
which collectors read. The driver writes to the file that `submit --log` names; on a cluster also
to a file beside those of the workers.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_batch.errors import ConfigError

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
        if not self._logger.handlers:
            # Else Python prints warnings that nobody asked for.
            self._logger.addHandler(logging.NullHandler())

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
    """Send the lines of this process to its stderr from now on."""
    _add(logging.StreamHandler(sys.stderr))


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append the lines of this process to a file while entered.

    Raises ConfigError where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log: {path} cannot be written: {error}") from error
    _add(handler)
    try:
        yield
    finally:
        logging.getLogger(NAME).removeHandler(handler)
        handler.close()


def _add(handler: logging.Handler) -> None:
    logger = logging.getLogger(NAME)
    handler.setFormatter(JsonLines())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
