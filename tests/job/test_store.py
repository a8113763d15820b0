"""One suite over every kind of store: the create-only put, retries, and what an error may say."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from botocore.exceptions import EndpointConnectionError

from eagle_batch.errors import StoreError
from eagle_batch.job.store import LocalStore, ObjectStore, Retry, Store, open_store, redact

QUICK = Retry(tries=3, pause_s=0.0)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield open_store(str(tmp_path / "out"), QUICK)
        return
    yield open_store("memory://bucket/out", QUICK)
    memory = fsspec.filesystem("memory")
    memory.rm("/bucket", recursive=True) if memory.exists("/bucket") else None


def test_a_new_object_is_stored_and_read_back(store: Store) -> None:
    assert store.put_new("data/a", b"one")
    assert store.get("data/a") == b"one"


def test_the_second_writer_of_a_key_loses_and_the_first_bytes_stay(store: Store) -> None:
    store.put_new("data/a", b"one")
    assert not store.put_new("data/a", b"two")
    assert store.get("data/a") == b"one"


def test_a_repeated_put_of_the_same_bytes_is_ours(store: Store) -> None:
    """A lost reply makes the retry see "exists" although the object is ours."""
    store.put_new("data/a", b"one")
    assert store.put_new("data/a", b"one")


def test_of_sixteen_racing_writers_one_wins_and_its_bytes_are_stored(store: Store) -> None:
    gate = threading.Barrier(16)
    won: list[bytes] = []

    def race(number: int) -> None:
        data = f"writer {number}".encode()
        gate.wait()
        if store.put_new("data/a", data):
            won.append(data)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get("data/a")] == won


def test_replace_replaces(store: Store) -> None:
    store.put_replace("_job/x", b"one")
    store.put_replace("_job/x", b"three")
    assert store.get("_job/x") == b"three"


def test_a_listing_gives_sizes_below_the_prefix_only(store: Store) -> None:
    store.put_new("data/a", b"one")
    store.put_new("data/b", b"")
    store.put_new("errors/c", b"xx")
    assert store.list("data") == {"data/a": 3, "data/b": 0}


def test_a_folder_marker_is_no_object(store: Store) -> None:
    """SeaweedFS keeps an emptied folder as an object of no bytes; a disk keeps the folder."""
    store.put_new("data/a", b"one")
    store.delete("data/a")
    if isinstance(store, ObjectStore):
        fsspec.filesystem("memory").pipe_file("/bucket/out/data", b"")
    assert store.list("data") == {}


def test_a_listing_of_nothing_is_empty(store: Store) -> None:
    assert store.list("data") == {}


def test_a_missing_object_reads_as_none_and_deletes_quietly(store: Store) -> None:
    assert store.get("data/a") is None
    store.delete("data/a")


def test_a_deleted_key_can_be_written_again(store: Store) -> None:
    store.put_new("data/a", b"one")
    store.delete("data/a")
    assert store.put_new("data/a", b"two")


def test_a_temporary_name_is_no_object_and_is_swept(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), QUICK)
    store.put_new("data/a", b"one")
    left = tmp_path / "data" / ".b.0123.tmp"
    left.write_bytes(b"ha")
    assert store.list("data") == {"data/a": 3}
    store.sweep()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    store = open_store(str(tmp_path), QUICK)
    with pytest.raises(StoreError, match="No space left"):
        store.put_new("data/a", b"one")
    assert list((tmp_path / "data").iterdir()) == []


class Flaky(LocalStore):
    """A store whose next operations fail, before or after they took effect."""

    def __init__(self, root: Path, errors: list[Exception], *, after: bool = False) -> None:
        super().__init__(str(root), QUICK, lambda seconds: None)
        self.errors = errors
        self.after = after

    def _create(self, key: str, data: bytes) -> None:
        if self.after:
            super()._create(key, data)
        if self.errors:
            raise self.errors.pop(0)
        if not self.after:
            super()._create(key, data)


def test_a_fault_that_passes_is_retried(tmp_path: Path) -> None:
    store = Flaky(tmp_path, [OSError("reset"), EndpointConnectionError(endpoint_url="http://s3")])
    assert store.put_new("data/a", b"one")
    assert store.get("data/a") == b"one"


def test_a_put_whose_reply_is_lost_is_still_ours(tmp_path: Path) -> None:
    store = Flaky(tmp_path, [OSError(errno.EINVAL, "PreconditionFailed")], after=True)
    assert store.put_new("data/a", b"one")


def test_a_store_that_stays_down_is_a_store_error_of_bounded_tries(tmp_path: Path) -> None:
    faults: list[Exception] = [EndpointConnectionError(endpoint_url="http://s3") for _ in range(9)]
    store = Flaky(tmp_path, faults)
    with pytest.raises(StoreError, match=r"cannot write data/a \(tried 3 times\)"):
        store.put_new("data/a", b"one")
    assert len(faults) == 6


def test_a_refusal_is_not_retried(tmp_path: Path) -> None:
    faults: list[Exception] = [PermissionError("Access Denied."), OSError("never reached")]
    store = Flaky(tmp_path, faults)
    with pytest.raises(StoreError, match=r"PermissionError: Access Denied"):
        store.put_new("data/a", b"one")
    assert len(faults) == 1


def test_a_bug_is_not_dressed_up_as_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ours"):
        Flaky(tmp_path, [TypeError("ours")]).put_new("data/a", b"one")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:pw@host/out", "sftp://***@host/out"),
        ("GET /x?X-Amz-Signature=abc&x=1", "GET /x?X-Amz-Signature=***&x=1"),
        ("bad aws_secret_access_key: 'hunter2'", "bad aws_secret_access_key: '***'"),
        ("The specified bucket does not exist", "The specified bucket does not exist"),
    ],
)
def test_credentials_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(StoreError, match="nope://x"):
        open_store("nope://x/out")


def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    import asyncio

    from fsspec.asyn import AsyncFileSystem

    class Silent(AsyncFileSystem):  # type: ignore[misc]
        protocol = "silent"
        cachable = False

        async def _pipe_file(self, path: str, value: bytes, mode: str = "x", **_: object) -> None:
            await asyncio.sleep(60)

        async def _cat_file(self, path: str, **_: object) -> bytes:
            raise FileNotFoundError(path)

        async def _exists(self, path: str, **_: object) -> bool:
            return False

    fsspec.register_implementation("silent", Silent, clobber=True)
    retry = Retry(tries=2, pause_s=0, deadline_s=0.05)
    store = ObjectStore("silent://x/out", retry, lambda s: None)
    with pytest.raises(StoreError, match=r"tried 2 times\): FSTimeoutError"):
        store.put_new("data/a", b"one")


def test_a_disk_and_the_memory_let_one_writer_win(store: Store) -> None:
    assert store.is_exclusive()


def test_a_store_of_another_kind_is_taken_to_let_the_last_writer_win() -> None:
    """Nothing tells whether its "create" is more than a look before the put."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Plain(MemoryFileSystem):  # type: ignore[misc]
        protocol = "plain"

    fsspec.register_implementation("plain", Plain, clobber=True)
    store = open_store("plain://bucket/plain-out", QUICK)
    assert not store.is_exclusive()
    assert store.put_new("data/a", b"one")
    assert not store.put_new("data/a", b"two"), "it looks before it puts"
    assert store.get("data/a") == b"one"
    assert store.list("_job") == {}


#: What holds on every store; the tests of each kind of server run it there.
ON_EVERY_STORE = [
    test_a_new_object_is_stored_and_read_back,
    test_the_second_writer_of_a_key_loses_and_the_first_bytes_stay,
    test_a_repeated_put_of_the_same_bytes_is_ours,
    test_of_sixteen_racing_writers_one_wins_and_its_bytes_are_stored,
    test_replace_replaces,
    test_a_listing_gives_sizes_below_the_prefix_only,
    test_a_listing_of_nothing_is_empty,
    test_a_missing_object_reads_as_none_and_deletes_quietly,
    test_a_deleted_key_can_be_written_again,
]
