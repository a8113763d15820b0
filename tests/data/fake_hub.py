"""A stand-in for the hub on this machine: the endpoints that huggingface_hub calls, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEN = "2026-01-01T00:00:00.000Z"


@dataclass
class Hub:
    """Repositories by name, and what was asked of them."""

    #: "owner/name" -> path -> content.
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    #: (repository, path) of every file that a commit wrote, in order.
    written: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    #: A status with which every change is answered.
    refuse: int = 0

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _note(self) -> list[str]:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        return path.strip("/").split("/")

    def _send(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), Content_Type="application/json")

    def _missing(self, code: str = "RepoNotFound") -> None:
        self._send(404, b"{}", X_Error_Code=code, X_Error_Message="not there")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match self._note():
            case ["api", "datasets", owner, name, *rest]:
                self._api(f"{owner}/{name}", rest)
            case ["datasets", owner, name, "resolve", _, *path]:
                self._file(f"{owner}/{name}", "/".join(path))
            case ["api", "whoami-v2"]:
                self._json({"name": "me", "type": "user"})
            case _:
                self._missing()

    def _api(self, repo: str, rest: list[str]) -> None:
        files = self.hub.repos.get(repo)
        if files is None:
            self._missing()
        elif not rest or rest[0] == "revision":
            if rest[1:] and rest[1] not in {"main", COMMIT}:
                self._missing("RevisionNotFound")
            else:
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": repo, "sha": COMMIT, "siblings": siblings})
        elif rest[0] == "tree":
            self._tree(files, "/".join(rest[2:]))
        else:
            self._missing()

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        start = f"{folder}/" if folder else ""
        inside = {name: data for name, data in files.items() if name.startswith(start)}
        found, deep = [], "recursive=true" in urlsplit(self.path).query.lower()
        folders = dict.fromkeys(
            start + name.removeprefix(start).partition("/")[0]
            for name in inside
            if "/" in name.removeprefix(start)
        )
        found += [
            {"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders
        ]
        for name, data in inside.items():
            if deep or "/" not in name.removeprefix(start):
                found.append(self.hub.entry(name, data))
        if found or not folder:
            self._json(found)
        else:
            self._missing("EntryNotFound")

    def _file(self, repo: str, path: str) -> None:
        data = self.hub.repos.get(repo, {}).get(path)
        if data is None:
            self._missing("EntryNotFound")
            return
        oid = self.hub.entry(path, data)["oid"]
        wanted = self.headers.get("Range")
        common = {"ETag": f'"{oid}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if wanted is None:
            self._send(200, data, **common)
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        part = data[int(start) : int(end) + 1 if end else None]
        span = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        self._send(206, part, Content_Range=span, **common)

    def do_POST(self) -> None:
        path, body = self._note(), self._body()
        if self.hub.refuse:
            self._json({"error": "no"}, self.hub.refuse)
            return
        match path:
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                name = json.loads(body)
                repo = f"{name.get('organization') or 'me'}/{name['name']}"
                known = repo in self.hub.repos
                self.hub.repos.setdefault(repo, {})
                url = {"url": f"{self.hub.url}/datasets/{repo}", "id": repo}
                self._json(url, 409 if known else 200)
            case ["api", "datasets", owner, name, "paths-info", _]:
                self._paths_info(f"{owner}/{name}", body)
            case ["api", "datasets", _, _, "preupload", _]:
                names = [item["path"] for item in json.loads(body)["files"]]
                regular = {"uploadMode": "regular", "shouldIgnore": False}
                self._json({"files": [{"path": name, **regular} for name in names]})
            case ["api", "datasets", owner, name, "commit", _]:
                self._commit(f"{owner}/{name}", body)
            case _:
                self._missing()

    def _paths_info(self, repo: str, body: bytes) -> None:
        files = self.hub.repos.get(repo, {})
        if self.headers.get("Content-Type", "").startswith("application/json"):
            wanted = json.loads(body)["paths"]
        else:
            pairs = (item.partition("=") for item in body.decode().split("&"))
            wanted = [unquote(value.replace("+", " ")) for key, _, value in pairs if key == "paths"]
        self._json([self.hub.entry(name, files[name]) for name in wanted if name in files])

    def _commit(self, repo: str, body: bytes) -> None:
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                value = item["value"]
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
                self.hub.written.append((repo, value["path"]))
        commit_url = f"{self.hub.url}/datasets/{repo}/commit/{COMMIT}"
        self._json({"commitUrl": commit_url, "commitOid": COMMIT, "success": True})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The real client, told where the hub is; its caches begin empty."""
    import huggingface_hub
    from huggingface_hub import constants

    with running_hub() as running:
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield running
        huggingface_hub.HfFileSystem.clear_instance_cache()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve on a port of this machine alone."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
