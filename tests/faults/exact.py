"""What an output must hold after any crash: the rows of an undisturbed run, and what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_batch.job.verify import verify
from tests.job.fake_engine import LONG
from tests.job.fake_job import expected_rows, read_errors, read_rows


def good_rows(topics: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of an undisturbed run; a topic that is too long gives none."""
    return [row for row in expected_rows(topics) if row["topic"] != LONG]


def assert_exact(output: str, topics: Sequence[str], samples: int = 2) -> None:
    """Fail unless an output holds those rows, quarantined the others, and proves it."""
    assert read_rows(output) == good_rows(topics)
    bad = [n for n, topic in enumerate(topics) if topic == LONG]
    wanted = [(f"row{n}", sample) for n in bad for sample in range(samples)]
    assert [(error["id"], error["sample"]) for error in read_errors(output)] == wanted
    report = verify(output)
    assert report.ok, report.findings
