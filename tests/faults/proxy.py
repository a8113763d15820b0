"""A TCP proxy that delays, throttles, cuts, swallows and loses replies, steered by its fields."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass
class Proxy:
    """What happens to the bytes; change the fields at any time."""

    upstream: tuple[str, int]
    #: Seconds before each chunk, in both directions.
    latency_s: float = 0.0
    #: KiB each second, in both directions; 0 is no limit.
    rate_kib: float = 0.0
    #: Accept, swallow, never answer.
    blackhole: bool = False
    #: Reset the connection after so many bytes to the server, once; 0 is never.
    cut_after: int = 0
    #: The same for bytes from the server: it did it, and the client never hears.
    cut_reply_after: int = 0
    #: Answer so many requests with 503 Slow Down, as S3 does to those that ask too often.
    busy: int = 0
    cuts: int = 0
    port: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event) -> None:
        """Take connections until the proxy is closed."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        for writer in self._writers:
            reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        # A cancelled handler would be reported as if it had failed.
        with contextlib.suppress(ConnectionError, OSError, asyncio.CancelledError):
            while self.blackhole:  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.05)
            if self.busy:
                self.busy -= 1
                await self._slow_down(reader, writer)
                return
            try:
                up_reader, up_writer = await asyncio.open_connection(*self.upstream)
            except OSError:
                reset(writer)
                return
            self._writers.append(up_writer)
            await asyncio.gather(
                self._pump(reader, up_writer, writer, "cut_after"),
                self._pump(up_reader, writer, up_writer, "cut_reply_after"),
            )

    async def _slow_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
        head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        limit: str,
    ) -> None:
        passed = 0
        try:
            while data := await reader.read(CHUNK):
                await self._hold(len(data))
                passed += len(data)
                if 0 < getattr(self, limit) <= passed:
                    setattr(self, limit, 0)
                    self.cuts += 1
                    reset(writer)
                    reset(other)
                    return
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def _hold(self, size: int) -> None:
        while self.blackhole:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.latency_s)
        if self.rate_kib:
            await asyncio.sleep(size / 1024 / self.rate_kib)


def reset(writer: asyncio.StreamWriter) -> None:
    """Drop a connection without the usual goodbye."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Run a proxy to a port of this machine in a thread of its own."""
    proxy = Proxy(("127.0.0.1", port))
    ready = threading.Event()
    thread = threading.Thread(target=_run, args=(proxy, ready), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        proxy.blackhole = False
        proxy._loop.call_soon_threadsafe(proxy._stop.set)
        thread.join(10)


def _run(proxy: Proxy, ready: threading.Event) -> None:
    loop = proxy._loop
    loop.run_until_complete(proxy.serve(ready))
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()
