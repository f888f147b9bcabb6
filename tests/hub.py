"""A Hugging Face hub on loopback: the routes that uploads use, and a record of them."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret_token"


class Hub:
    """Repositories in memory; files of more than `lfs_from` bytes go the long way."""

    def __init__(self) -> None:
        self.url = ""
        self.user: Any = {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}}
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.lfs: dict[str, bytes] = {}
        self.seen: list[tuple[str, str]] = []
        self.commits: list[dict[str, Any]] = []
        self.lfs_from = 1000
        self.refuse: dict[str, int] = {}
        """Statuses by a part of the path …"""
        self.words = "refused"
        """… and what is said with them."""
        self.signature = ""
        """Put behind the addresses of large files."""
        self.chunk_size: int | None = None
        self.stall: dict[str, float] = {}
        """Seconds of silence by a part of the path."""
        self.on_request: Callable[[str], object] = lambda path: None

    def put(self, repo: str, name: str, data: bytes, branch: str = "main") -> None:
        self.repos.setdefault(repo, {"main": {}}).setdefault(branch, {})[name] = data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for its second half
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _say(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # whoever asked may have gone
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def _serve(self) -> None:
        hub, path, body = self.hub, unquote(urlsplit(self.path).path), self._body()
        hub.seen.append((self.command, self.path))
        hub.on_request(path)
        threading.Event().wait(sum(seconds for part, seconds in hub.stall.items() if part in path))
        for part, status in hub.refuse.items():
            if part in path:
                return self._say(
                    status,
                    {"error": f"{hub.words} with {status}"},
                    **{"X-Error-Message": hub.words},
                )
        if path.startswith("/lfs/"):
            hub.lfs[path.removeprefix("/lfs/").partition("/")[0]] = (
                hub.lfs.get(path.removeprefix("/lfs/").partition("/")[0], b"") + body
            )
            return self._say(200, b"", ETag=f'"{len(body)}"')
        if path.startswith("/complete/"):
            return self._say(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say(
                401, {"error": "Invalid user token."}, **{"X-Error-Message": "Invalid user token."}
            )
        if path == "/api/whoami-v2":
            return self._say(200, hub.user)
        if path == "/api/validate-yaml":
            return self._say(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            told = json.loads(body)
            owner = told.get("organization") or "me"
            repo = told["name"] if "/" in told["name"] else f"{owner}/{told['name']}"
            if repo in hub.repos:
                return self._say(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
            hub.repos[repo] = {"main": {}}
            hub.private[repo] = bool(told.get("private") or told.get("visibility") == "private")
            return self._say(200, {"url": f"{hub.url}/{repo}", "name": repo})
        return self._in_repo(path, body)

    def _in_repo(self, path: str, body: bytes) -> None:
        hub = self.hub
        if "/resolve/" in path:
            repo, _, place = path.lstrip("/").partition("/resolve/")
            branch, _, name = place.partition("/")
            found = hub.repos.get(repo, {}).get(branch, {}).get(name)
            return self._say(404, b"not here") if found is None else self._say(200, found)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._say(
                200,
                {
                    "transfer": "basic",
                    "objects": [self._lfs(o) for o in json.loads(body)["objects"]],
                },
            )
        owner, name, action, *rest = path.removeprefix("/api/models/").split("/")
        repo = f"{owner}/{name}"
        if action == "branch":
            branches, branch = hub.repos[repo], "/".join(rest)
            if branch in branches:
                return self._say(409, {"error": "exists"})
            branches[branch] = dict(branches["main"])
            return self._say(200, {})
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] > hub.lfs_from else "regular"}
                for f in files
            ]
            return self._say(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if action == "commit":
            return self._commit(repo, "/".join(rest), body)
        if action == "revision":
            return self._say(200, {"id": repo, "sha": "0" * 40, "siblings": []})
        return self._say(404, {"error": f"no route {path}"})

    def _lfs(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.lfs:
            return {**wanted}
        header: dict[str, str] = {}
        href = f"{self.hub.url}/lfs/{wanted['oid']}{self.hub.signature}"
        if self.hub.chunk_size is not None:
            count = -(-wanted["size"] // self.hub.chunk_size)
            header = {"chunk_size": str(self.hub.chunk_size)}
            header |= {
                str(n): f"{self.hub.url}/lfs/{wanted['oid']}/{n}" for n in range(1, count + 1)
            }
            href = f"{self.hub.url}/complete/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href, "header": header}}}

    def _commit(self, repo: str, branch: str, body: bytes) -> None:
        header, *lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = self.hub.repos[repo][branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
        self.hub.commits.append(
            {"repo": repo, "branch": branch, "query": urlsplit(self.path).query, **header["value"]}
        )
        url = f"{self.hub.url}/{repo}/commit/{'0' * 40}"
        self._say(
            200,
            {
                "commitUrl": url,
                "commitOid": "0" * 40,
                "pullRequestUrl": f"{self.hub.url}/{repo}/discussions/1",
            },
        )

    do_GET = do_POST = do_PUT = do_HEAD = _serve


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub in a thread of its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
