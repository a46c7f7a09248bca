"""A server of the Hub's large files, at another address: URLs are signed, and expire."""

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


def ranged(asked: str | None, data: bytes) -> tuple[int, bytes, dict[str, str]]:
    """The answer of a server that supports ranges: status, body, headers."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
    if not found:
        return 200, data, {"Accept-Ranges": "bytes"}
    start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
    if start >= len(data):
        return 416, b"", {"Content-Range": f"bytes */{len(data)}"}
    return 206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}


class Network(ThreadingHTTPServer):
    """Files by their hashes."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.url = files, f"http://127.0.0.1:{self.server_address[1]}"
        self.signature = 0  # the only one that is good
        self.seen: list[tuple[int, dict[str, str]]] = []  # status, headers of the request
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece, or each answer waits 40 ms for an ACK
    server: Network  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        large = self.server.files[parts.path.rpartition("/")[2]]
        status, data, headers = ranged(self.headers["Range"], large)
        if parse_qs(parts.query)["signature"] != [str(self.server.signature)]:
            status, data, headers = 403, b"expired", {}
        self.server.seen.append((status, dict(self.headers.items())))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET
