"""A hub on 127.0.0.1 that speaks ModelScope's and Hugging Face's protocols, fails on demand, and logs every request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".png", "tokenizer.json")  # what Hugging Face keeps in LFS, with a sha256


@dataclass
class Hub:
    """repos: {"ORG/NAME": {path: bytes}}; models and data sets share it. hashes: False leaves sha256 out of listings.

    faults: {path: [fault, ...]}, one used up by each GET of the file: an int cuts the body after so many bytes and
    closes the connection, "wrong" sends other bytes of the same length, "short" a body cut without a trace, 404 and
    500 (as strings) that status. `always` holds faults that are never used up.
    """

    repos: dict[str, dict[str, bytes]]
    hashes: bool = True
    faults: dict[str, list] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def asked(self, part: str) -> list[str]:
        """The logged GETs of file contents whose path contains `part`."""
        return [line for line in self.log if line.startswith("FILE ") and part in line]

    def _answer(self, request: _Handler) -> None:
        url = urlsplit(request.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        path = unquote(url.path)
        self.log.append(f"{request.command} {unquote(request.path)} {request.headers.get('Range', '')}".strip())
        if match := re.fullmatch(r"/api/v1/(?:models|datasets)/([^/]+/[^/]+)/repo/(?:files|tree)", path):
            self._modelscope_list(request, match[1], query)
        elif match := re.fullmatch(r"/api/v1/(?:models|datasets)/([^/]+/[^/]+)/repo", path):
            self._file(request, match[1], query["FilePath"], {})
        elif match := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/tree/[^/]+/?", path):
            self._huggingface_tree(request, match[1])
        elif match := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            known = match[1] in self.repos
            request.json({"id": match[1], "sha": COMMIT, "siblings": []} if known else {"error": "no"}, known)
        elif match := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = self.repos.get(match[1], {}).get(match[2], b"")
            digest = hashlib.sha256(data) if match[2].endswith(LARGE) and self.hashes else hashlib.sha1(data)
            self._file(request, match[1], match[2], {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            request.json({"Code": 404, "Success": False, "Message": "no such page"}, found=False)

    def _modelscope_list(self, request: _Handler, repo: str, query: dict[str, str]) -> None:
        if repo not in self.repos:
            request.json({"Code": 10010205001, "Success": False, "Message": "no such repo"}, found=False)
            return
        root = query.get("Root", "").strip("/")
        files = [
            {"Path": p, "Name": p.split("/")[-1], "Type": "blob", "Size": len(data)}
            | ({"Sha256": hashlib.sha256(data).hexdigest()} if self.hashes else {})
            for p, data in self.repos[repo].items()
            if not root or p.startswith(root + "/")
        ]
        request.json({"Code": 200, "Success": True, "Data": {"Files": files}})

    def _huggingface_tree(self, request: _Handler, repo: str) -> None:
        entries = []
        for path, data in self.repos.get(repo, {}).items():
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict = {"type": "file", "path": path, "size": len(data), "oid": oid}
            if path.endswith(LARGE) and self.hashes:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        request.json(entries)

    def _file(self, request: _Handler, repo: str, path: str, headers: dict[str, str]) -> None:
        data = self.repos.get(repo, {}).get(path)
        if request.command == "GET":
            asked_range = request.headers.get("Range", "")
            self.log.append(f"FILE {path} {asked_range}".strip())
        queue = self.faults.get(path, []) if request.command == "GET" else []
        fault = queue.pop(0) if queue else self.always.get(path) if request.command == "GET" else None
        if data is None or fault == "404":
            request.json({"error": "Entry not found"}, found=False, headers={"X-Error-Code": "EntryNotFound"})
        elif fault == "500":
            request.json({"error": "broken"}, status=500)
        else:
            if fault == "wrong":
                data = bytes(255 - b for b in data)
            elif fault == "short":
                data = data[: len(data) // 2]
            request.bytes(data, headers, cut=fault if isinstance(fault, int) else None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: the hub keeps its own log."""

    def json(self, value: object, found: bool = True, status: int = 0, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status or (200 if found else 404))
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def bytes(self, data: bytes, headers: dict[str, str], cut: int | None) -> None:
        """The file, or the range of it that was asked for; closes the connection after `cut` bytes of the body."""
        start, total = 0, len(data)
        if match := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            self.send_response(200)
        body = data[start:]
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.wfile.flush()
            if cut is not None:
                self.close_connection = True
                self.connection.close()
