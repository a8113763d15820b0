"""A real browser without a window, spoken to by the DevTools protocol."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--remote-debugging-port=0",
]
PATIENCE_S = 60.0


class Tab:
    """One page of the browser; `complaints` are its errors and what it was refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            self._note(message)
            if message.get("id") == self._last:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return found["result"]["value"]

    async def open(self, path: Path) -> None:
        """Load a page and wait until it is complete."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=f"file://{path}")
        while await self.value("location.protocol + document.readyState") != "file:complete":
            self._note(await self._socket.receive_json(timeout=PATIENCE_S))

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method in {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}:
            self.complaints.append(str(parameters))
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """Start a browser whose profile is in a folder; yield its port, and end it afterwards."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (line for line in process.stderr if line.startswith("DevTools listening on "))
            yield re.findall(r":(\d+)/", next(lines))[0]
        finally:
            process.kill()


@asynccontextmanager
async def browser_tab(port: str) -> AsyncIterator[Tab]:
    """Connect to the first page of a browser."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        url = pages[0]["webSocketDebuggerUrl"]
        async with session.ws_connect(url, max_msg_size=0) as socket:
            yield Tab(socket)
