"""Text files line by line, compressed or not, from any byte on."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO, Self, cast

import pyarrow as pa

from eagle_batch.data.files import compression_of, open_source

_BOM = b"\xef\xbb\xbf"
_STEP = 1 << 20


class Lines:
    """Keeps one file open at the line it has come to.

    A compressed file can only be read forward. Whoever takes its blocks in their order reads it
    once, however many blocks there are.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._path = ""
        self._file: BinaryIO | None = None
        self._position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open."""
        self._open.close()
        self._path, self._file = "", None

    def since(self, path: str, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line with its end) of each line from `offset` on.

        Offsets count bytes of the plain text. A byte order mark belongs to no line.
        """
        file = self._at(path, offset)
        while raw := file.readline():
            position = self._position
            self._position += len(raw)
            yield position, raw.removeprefix(_BOM) if position == 0 else raw

    def _at(self, path: str, offset: int) -> BinaryIO:
        if self._file is None or self._path != path or offset < self._position:
            self._reopen(path)
        file = self._file
        assert file is not None
        if offset != self._position and compression_of(path) is None and file.seekable():
            file.seek(offset)
        else:
            _skip(file, offset - self._position)
        self._position = offset
        return file

    def _reopen(self, path: str) -> None:
        self.close()
        self._open = ExitStack()
        source = self._open.enter_context(open_source(path))
        codec = compression_of(path)
        file = pa.CompressedInputStream(source, codec) if codec else source
        # Arrow's own files count as binary files for everything that is done here.
        self._file = cast("BinaryIO", io.BufferedReader(file, _STEP))
        self._path, self._position = path, 0


def _skip(file: BinaryIO, count: int) -> None:
    while count > 0:
        found = len(file.read(min(count, _STEP)))
        if not found:
            return  # The file became shorter; its rows will be missed by their number.
        count -= found
