"""One embedded Ray for all tests of this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eagle_batch.job.pool import Resources, ray_session
from eagle_batch.pipeline import Workers


@pytest.fixture(scope="session")
def ray_resources() -> Iterator[Resources]:
    """Room for two workers on the CPU."""
    said: list[str] = []
    with ray_session(Workers(count=2, gpus=0), 1, said.append) as resources:
        assert said == ["2 workers on cpu, each with 1 CPU threads"]
        yield resources
