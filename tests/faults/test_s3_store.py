"""The store on a real S3 server: its suite, its refusals, a kill -9, and a network that fails."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from eagle_batch.errors import StoreError
from eagle_batch.job.store import ObjectStore, Retry, Store, open_store
from tests.faults.proxy import Proxy
from tests.faults.seaweed import ADMIN, BUCKET, READER, Seaweed, environment
from tests.job import test_store as suite

pytestmark = pytest.mark.slow

QUICK = Retry(tries=3, pause_s=0.05, deadline_s=30.0)
SECRETS = (*ADMIN, *READER)


def fresh_store(retry: Retry = QUICK, bucket: str = BUCKET) -> Store:
    """A place of its own in the bucket, through whatever the environment names."""
    return open_store(f"s3://{bucket}/{uuid.uuid4().hex}", retry)


@contextmanager
def refusal() -> Iterator[list[str]]:
    """Expect a StoreError that names no key and no secret."""
    said: list[str] = []
    with pytest.raises(StoreError) as caught:
        yield said
    said.append(str(caught.value))
    assert not [secret for secret in SECRETS if secret in said[0]]


@pytest.mark.parametrize(
    "check",
    suite.ON_EVERY_STORE,
)
def test_the_store_suite_holds_on_s3(s3: Seaweed, check: Callable[[Store], None]) -> None:
    check(fresh_store())


def test_an_emptied_folder_is_no_object(s3: Seaweed) -> None:
    store = fresh_store()
    store.put_new("data/a", b"one")
    store.delete("data/a")
    assert store.list("data") == {}


def test_a_wrong_secret_is_refused_at_once_without_being_told(seaweed: Seaweed) -> None:
    with environment(seaweed.url, (ADMIN[0], READER[1])), refusal() as said:
        fresh_store().put_new("data/a", b"one")
    assert "cannot write data/a: PermissionError" in said[0]


def test_an_unknown_key_is_refused_at_once_without_being_told(seaweed: Seaweed) -> None:
    with environment(seaweed.url, ("AKIANOBODY", ADMIN[1])), refusal() as said:
        fresh_store().list("data")
    assert "PermissionError" in said[0]
    assert "AKIANOBODY" not in said[0]


def test_a_key_that_may_only_read_reads_and_is_refused_to_write(s3: Seaweed) -> None:
    store = fresh_store()
    store.put_new("data/a", b"one")
    with environment(s3.url, READER):
        reading = open_store(store.root, QUICK)
        assert reading.get("data/a") == b"one"
        with refusal() as said:
            reading.put_new("data/b", b"two")
    assert "PermissionError: Access Denied" in said[0]


def test_a_missing_bucket_is_named(s3: Seaweed) -> None:
    with refusal() as said:
        fresh_store(bucket="no-such-bucket").put_new("data/a", b"one")
    assert "s3://no-such-bucket/" in said[0]
    assert "bucket does not exist" in said[0]


def test_a_server_killed_during_a_put_and_started_again_holds_no_torn_object(
    seaweed: Seaweed, s3_proxy: Proxy
) -> None:
    """1. half of a put is on its way. 2. kill -9. 3. the server starts again while we retry."""
    store = fresh_store(Retry(tries=8, pause_s=0.5, deadline_s=60.0))
    data = bytes(range(256)) * 4096
    outcome: list[bool] = []
    s3_proxy.rate_kib = 512
    thread = threading.Thread(target=lambda: outcome.append(store.put_new("data/a", data)))
    thread.start()
    time.sleep(0.8)
    assert thread.is_alive(), "the put was to be under way"
    seaweed.kill()
    s3_proxy.rate_kib = 0
    seaweed.start()
    seen = store.get("data/a")
    assert seen is None or seen == data
    thread.join(100)
    assert outcome == [True]
    assert store.get("data/a") == data
    assert store.list("data") == {"data/a": len(data)}


def test_a_delay_changes_nothing(s3_proxy: Proxy) -> None:
    s3_proxy.latency_s = 0.1
    store = fresh_store()
    assert store.put_new("data/a", b"one")
    assert store.get("data/a") == b"one"


def test_a_throttled_put_arrives_whole(s3_proxy: Proxy) -> None:
    s3_proxy.rate_kib = 256
    store, data = fresh_store(), bytes(300_000)
    begun = time.monotonic()
    assert store.put_new("data/a", data)
    assert time.monotonic() - begun > 0.9
    assert store.get("data/a") == data


def test_a_store_that_asks_to_slow_down_is_asked_again(s3_proxy: Proxy) -> None:
    s3_proxy.busy = 4
    store = fresh_store()
    assert store.put_new("data/a", b"one")
    assert s3_proxy.busy == 0
    assert store.get("data/a") == b"one"


def test_a_store_that_goes_on_asking_is_given_up_after_bounded_tries(s3_proxy: Proxy) -> None:
    s3_proxy.busy = 1_000_000
    store = fresh_store(Retry(tries=2, pause_s=0.05, deadline_s=3.0))
    with refusal() as said:
        store.put_new("data/a", b"one")
    assert "cannot " in said[0]
    assert 1_000_000 - s3_proxy.busy < 100


def test_a_put_that_is_cut_in_its_middle_is_put_again_whole(s3_proxy: Proxy) -> None:
    store, data = fresh_store(), bytes(400_000)
    store.put_new("data/0", b"the connection is up")
    s3_proxy.cut_after = 200_000
    assert store.put_new("data/a", data)
    assert s3_proxy.cuts == 1
    assert store.get("data/a") == data


def test_a_create_only_put_whose_reply_is_lost_is_known_as_ours(s3_proxy: Proxy) -> None:
    """The client puts again by itself and hears "exists"; the object is ours all the same."""
    store = fresh_store()
    # More than `100 Continue`, so that it is the real reply that is lost.
    s3_proxy.cut_reply_after = 60
    assert store.put_new("data/a", b"one")
    assert s3_proxy.cuts == 1
    assert store.get("data/a") == b"one"
    assert not store.put_new("data/a", b"of another")


@pytest.mark.parametrize("verb", ["put_new", "put_replace", "get", "list", "delete"])
def test_a_server_that_accepts_and_never_answers_ends_at_our_deadline(
    s3_proxy: Proxy, verb: str
) -> None:
    store = fresh_store(Retry(tries=2, pause_s=0.0, deadline_s=0.5))
    assert isinstance(store, ObjectStore)
    # A read may carry 256 MiB, for which it is given a second each.
    s3_proxy.blackhole = True
    arguments = ("k", b"one") if verb.startswith("put") else ("k",)
    begun = time.monotonic()
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(Retry, "deadline", lambda retry, size: retry.deadline_s)
        said = stack.enter_context(refusal())
        getattr(store, verb)(*arguments)
    assert "tried 2 times): FSTimeoutError" in said[0]
    assert time.monotonic() - begun < 20


def test_a_put_that_was_given_up_does_not_land_later(s3: Seaweed, s3_proxy: Proxy) -> None:
    with environment(s3_proxy.url, ADMIN):
        store = fresh_store(Retry(tries=1, pause_s=0.0, deadline_s=0.5))
        s3_proxy.blackhole = True
        with refusal():
            store.put_replace("data/a", b"given up")
        s3_proxy.blackhole = False
        time.sleep(1.0)
        assert store.get("data/a") is None
