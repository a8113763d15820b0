"""The little file API that a job needs of its output, over a local disk or any object store.

Owns how one object is put, read and listed: create-only puts with exactly one winner, deadlines,
bounded retries, and errors that name the place but never a credential. It knows no Parquet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync

from eagle_batch.errors import StoreError

T = TypeVar("T")

#: Client libraries whose errors are the store's fault, not a bug of ours.
CLIENT_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs"}
)
SECRET = re.compile(
    r"(?i)((?:access_?key(?:_?id)?|secret|token|signature|credential|password|sig)[\w-]*"
    r"\s*[=:]\s*['\"]?)[^\s&'\",]+"
)
USER_INFO = re.compile(r"//[^/@\s]+@")
#: Filesystems without an atomic create (memory://) get one inside this process.
CREATE_LOCK = threading.Lock()
#: Protocols whose service lets one of any number of create-only puts win.
EXCLUSIVE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "memory"})
#: Protocols whose client asks for that; whether the server at hand heeds it has to be tried.
ASKING = frozenset({"s3", "s3a"})
#: Where it is tried.
TRIAL = "_job/trial"


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient a store is."""

    #: Tries of one operation, the first included.
    tries: int = 5
    #: Seconds before the second try; doubled each time, with jitter.
    pause_s: float = 0.5
    #: Seconds one request may take, beside a second for every mebibyte it carries.
    deadline_s: float = 60.0

    def pause(self, attempt: int) -> float:
        """Return how long to wait after a failed attempt (0-based)."""
        jitter = 0.5 + random.random() / 2  # noqa: S311 - no secret
        return float(self.pause_s * 2**attempt * jitter)

    def deadline(self, size: int) -> float:
        """Return how many seconds a request with a body of `size` bytes may take."""
        return self.deadline_s + size / (1 << 20)


def redact(text: str) -> str:
    """Return the text without user names, passwords, keys and signatures."""
    return SECRET.sub(r"\1***", USER_INFO.sub("//***@", text))


class Store(ABC):
    """Objects below one root; keys are relative, with forward slashes.

    Every method raises StoreError when the store fails for longer than it is retried.
    """

    def __init__(self, root: str, retry: Retry, sleep: Callable[[float], None]) -> None:
        self.root = root
        self.retry = retry
        self._sleep = sleep

    @property
    def name(self) -> str:
        """The root as it may be shown to people."""
        return redact(self.root)

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object where none is; return whether the object that lies there is ours.

        Exactly one of any number of callers with different bytes gets True, unless the store is not
        exclusive: then put_new looks before it puts, and what is put last stays. A lost reply makes
        a retried put fail with "exists" although it is ours, hence every failure is decided by
        reading the object back: equal bytes are ours, so callers put something unique into them.
        """
        for attempt in range(self.retry.tries):
            try:
                self._create(key, data)
                return True
            except Exception as error:  # noqa: BLE001 - judged, then raised again
                stored = self.get(key) if _may_be_exists(error) else None
                if stored is not None:
                    return stored == data
                self._after_failure(error, "write", key, attempt)
        raise AssertionError("unreachable: the last failure raises")  # pragma: no cover

    @abstractmethod
    def is_exclusive(self) -> bool:
        """Tell whether `put_new` has exactly one winner here; may put an object to find out."""

    def put_replace(self, key: str, data: bytes) -> None:
        """Store an object whole, replacing what is there."""
        self._retrying("write", key, lambda: self._replace(key, data))

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, None where there is none."""

        def read() -> bytes | None:
            try:
                return self._read(key)
            except FileNotFoundError:
                return None

        return self._retrying("read", key, read)

    def list(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below a folder, by key, in one listing."""
        return self._retrying("list", prefix, lambda: self._list(prefix))

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._delete(key)

        self._retrying("delete", key, remove)

    def sweep(self) -> None:  # noqa: B027 - most stores leave nothing behind
        """Remove what a killed writer may have left behind; only the holder of the lock may."""

    def _retrying(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        for attempt in range(self.retry.tries):
            try:
                return operation()
            except Exception as error:  # noqa: BLE001 - judged, then raised again
                self._after_failure(error, verb, key, attempt)
        raise AssertionError("unreachable: the last failure raises")  # pragma: no cover

    def _after_failure(self, error: Exception, verb: str, key: str, attempt: int) -> None:
        """Wait before the next try, or raise: bugs as they are, faults as StoreError."""
        if not _is_client_error(error):
            raise error
        final = _is_final(error)
        if final or attempt + 1 == self.retry.tries:
            tries = "" if final else f" (tried {attempt + 1} times)"
            said = redact(str(error).strip().split("\n")[0] or "no message")
            raise StoreError(
                f"{self.name}: cannot {verb} {key}{tries}: {type(error).__name__}: {said}"
            ) from error
        self._sleep(self.retry.pause(attempt))

    @abstractmethod
    def _create(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _replace(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _read(self, key: str) -> bytes: ...

    @abstractmethod
    def _list(self, prefix: str) -> dict[str, int]: ...

    @abstractmethod
    def _delete(self, key: str) -> None: ...


def _is_final(error: Exception) -> bool:
    """Tell whether another try would fare no better: no right, no such place."""
    known = isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError)
    # Azure's client has an error of its own for each answer of the server.
    return known or getattr(error, "status_code", None) in {401, 403, 404}


def _may_be_exists(error: Exception) -> bool:
    return _is_client_error(error) and not _is_final(error)


def _is_client_error(error: Exception) -> bool:
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | TimeoutError | asyncio.TimeoutError) or (
        package in CLIENT_PACKAGES
    )


class LocalStore(Store):
    """A folder: a temporary name, fsync, then a link (new) or a rename (replace) to the key."""

    def is_exclusive(self) -> bool:
        """Links never replace."""
        return True

    def _create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        temporary = self._write_aside(path, data)
        try:
            # A link never replaces, and the name appears with all of the bytes behind it.
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def _replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._write_aside(path, data).replace(path)
        _sync_folder(path.parent)

    def _read(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def _list(self, prefix: str) -> dict[str, int]:
        root = Path(self.root)
        files = (path for path in self._path(prefix).rglob("*") if path.is_file())
        return {
            path.relative_to(root).as_posix(): path.stat().st_size
            for path in files
            if not _is_temporary(path.name)
        }

    def _delete(self, key: str) -> None:
        self._path(key).unlink()

    def sweep(self) -> None:
        """Remove temporary names; a writer that is still alive fails and tries again."""
        for path in Path(self.root).rglob(".*.tmp"):
            if _is_temporary(path.name):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return Path(self.root) / key

    def _write_aside(self, path: Path, data: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStore(Store):
    """Any other fsspec filesystem: one whole put an object, under a deadline of our own."""

    def __init__(self, root: str, retry: Retry, sleep: Callable[[float], None]) -> None:
        super().__init__(root, retry, sleep)
        self._fs, path = fsspec.core.url_to_fs(root)
        self._base = str(path).rstrip("/")
        protocols = protocols_of(self._fs)
        #: None until it was tried.
        self._exclusive = None if protocols & ASKING else bool(protocols & EXCLUSIVE)

    def is_exclusive(self) -> bool:
        """What the protocol promises; where that depends on the server, what a trial shows."""
        if self._exclusive is None:
            key = f"{TRIAL}/{uuid.uuid4().hex}"
            self.put_new(key, b"first")
            self._exclusive = not self.put_new(key, b"second")
            self.delete(key)
        return self._exclusive

    def _create(self, key: str, data: bytes) -> None:
        if self._exclusive is False:
            self._fs.invalidate_cache()
            if self._call("exists", self._path(key), size=0):
                raise FileExistsError(key)
            self._put(key, data, "overwrite")
        elif isinstance(self._fs, AsyncFileSystem):
            self._put(key, data, "create")
        else:
            with CREATE_LOCK:
                self._put(key, data, "create")

    def _replace(self, key: str, data: bytes) -> None:
        self._put(key, data, "overwrite")

    def _put(self, key: str, data: bytes, mode: str) -> None:
        self._call("pipe_file", self._path(key), data, mode=mode, size=len(data))

    def _read(self, key: str) -> bytes:
        return bytes(self._call("cat_file", self._path(key), size=256 << 20))

    def _list(self, prefix: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found = self._call("find", self._path(prefix), detail=True, size=256 << 20)
        except FileNotFoundError:
            return {}
        sizes = {self._key(path): int(item["size"]) for path, item in found.items()}
        # Some servers list an emptied folder as an object of its own.
        return {key: size for key, size in sizes.items() if key.startswith(f"{prefix}/")}

    def _delete(self, key: str) -> None:
        self._call("rm_file", self._path(key), size=0)

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _key(self, path: str) -> str:
        return path.removeprefix(self._base).lstrip("/")

    def _call(self, method: str, *args: Any, size: int, **options: Any) -> Any:
        """Call a method of the filesystem with a deadline.

        A server that accepts a put and never answers would otherwise hang s3fs for ever, its own
        read timeout notwithstanding: aiohttp waits for `100 Continue`.
        """
        if not isinstance(self._fs, AsyncFileSystem):
            return getattr(self._fs, method)(*args, **options)
        coroutine = getattr(self._fs, f"_{method}")
        deadline = self.retry.deadline(size)

        async def bounded() -> Any:
            # Cancelled, not only left behind: a put that was given up must not land later.
            return await asyncio.wait_for(coroutine(*args, **options), deadline)

        return sync(self._fs.loop, bounded)


def protocols_of(fs: Any) -> frozenset[str]:
    """Return the names by which a filesystem is known."""
    return frozenset({fs.protocol} if isinstance(fs.protocol, str) else fs.protocol)


def open_store(
    root: str, retry: Retry | None = None, sleep: Callable[[float], None] = time.sleep
) -> Store:
    """Open the output at a local path or an fsspec URL; nothing is created yet.

    Raises StoreError when the URL names a filesystem that is unknown or not installed.
    """
    retry = retry or Retry()
    try:
        fs, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise StoreError(f"{redact(root)}: no such kind of store: {redact(str(error))}") from error
    if "file" in protocols_of(fs):
        return LocalStore(str(path), retry, sleep)
    return ObjectStore(root, retry, sleep)
