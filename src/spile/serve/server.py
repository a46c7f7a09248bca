"""The web server of `spile serve`: small, read-only, and closed to strangers.

The address decides who may send requests. On loopback, any process of this machine may, but no web
page of another origin: the Host header is checked, because another name may resolve to loopback. On
any other address, only clients with the token may (`core/listening.py`). Documents hold untrusted
text, so the page accepts no script or style but its own files, and shows texts as plain text.
"""

import hmac
import importlib.resources
import json
import logging
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from spile.core.errors import ConfigError, CorruptError, SpileError
from spile.core.listening import ListenAddress, is_loopback
from spile.serve.directions import MOST_BYTES
from spile.serve.routes import Answers, plain

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MOST_CONNECTIONS = 128
_HEAD_SECONDS = 10.0  # limit for a request's head to arrive
_ANSWER_SECONDS = 60.0  # limit after that, for the rest of the request and the answer
_BINARY = "application/octet-stream"

_log = logging.getLogger("spile.serve")


class Server(ThreadingHTTPServer):
    """Serves the page of one dataset."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: ListenAddress, answers: Answers) -> None:
        """Listen on the address; raise ConfigError if it is not available."""
        self.answers = answers
        self.address = address
        self.loopback = address.is_loopback
        self.token = address.token
        self.files = page_files()
        self.tls = address.ssl_context() if address.uses_tls else None
        host, port = address.host, address.port
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); try --port 0") from error
        self.cookie = f"spile-{self.server_address[1]}"
        threading.Thread(target=self._end_slow, name="deadlines", daemon=True).start()

    @property
    def url(self) -> str:
        """A URL that a browser can open; one of several, if there are several addresses."""
        port, scheme = self.server_address[1], "https" if self.tls else "http"
        link = f"{scheme}://{self.address.openable}:{port}/"
        return link + (f"?token={self.token}" if self.token else "")

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The TLS handshake runs at the first read, in the connection's own
        thread: a client that does not finish it holds up nobody else."""
        request, address = super().get_request()
        if self.tls is None:
            return request, address
        try:
            wrapped = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            request.close()
            raise
        return wrapped, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._deadlines) >= _MOST_CONNECTIONS
            if not full:
                self._deadlines[request] = time.monotonic() + _HEAD_SECONDS
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def allow(self, request: Any, seconds: float) -> None:
        """Set a client's deadline, in seconds from now."""
        with self._lock:
            if request in self._deadlines:
                self._deadlines[request] = time.monotonic() + seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except those of clients that went away."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("serving %s", client_address)

    def _end_slow(self) -> None:
        while self.socket.fileno() != -1:
            time.sleep(1)
            now = time.monotonic()
            with self._lock:
                late = [request for request, by in self._deadlines.items() if by < now]
            for request in late:
                try:
                    # Not `request.shutdown`: TLS would lose the object that its thread reads from.
                    socket.socket.shutdown(request, socket.SHUT_RDWR)
                except OSError:
                    continue  # the connection has already ended


class Handler(BaseHTTPRequestHandler):
    """Handles one client's requests, one after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "spile", ""
    timeout = _HEAD_SECONDS

    @property
    def _ours(self) -> Server:
        return cast(Server, self.server)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._began = time.perf_counter()
        self._ours.allow(self.request, _ANSWER_SECONDS)
        try:
            self._route()
        except SpileError as error:
            known = isinstance(error, ConfigError)
            status = HTTPStatus.BAD_REQUEST if known else HTTPStatus.NOT_FOUND
            if isinstance(error, CorruptError):
                status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._send_json({"error": str(error)}, status)
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:
            _log.exception("answering %s", self.path.partition("?")[0])
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the terminal")
        self._ours.allow(self.request, _HEAD_SECONDS)

    def _route(self) -> None:
        if not self._is_our_host():
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this host is not served here")
        try:
            parts = urlsplit(self.path)
            asked = dict(parse_qsl(parts.query, max_num_fields=20, errors="strict"))
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST, "not a request that can be read")
        if self._ours.token is not None and not self._has_token():
            if parts.path == "/" and self._is_token(asked.get("token", "")):
                return self._welcome()
            return self._refuse(
                HTTPStatus.UNAUTHORIZED, "open the address that was printed: it holds the token"
            )
        if self.command == "POST":
            return self._post(parts.path, asked)
        if parts.path == "/" and "token" in asked:
            return self._welcome()
        name = parts.path.removeprefix("/api/")
        if name in self._ours.answers.routes and name != parts.path:
            return self._send_json(self._ours.answers.routes[name](asked))
        file = self._ours.files.get(parts.path)
        if file is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        return self._send(file[0], file[1])

    def _post(self, path: str, asked: dict[str, str]) -> None:
        if path != "/api/directions":
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read-only")
        if not self._is_our_origin() or self.headers.get("Content-Type") != _BINARY:
            return self._refuse(HTTPStatus.FORBIDDEN, "only this page may upload directions")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal() or self.headers.get("Transfer-Encoding"):
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if len(length) > 12 or int(length) > MOST_BYTES:
            return self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BYTES:,} bytes are accepted"
            )
        data = self.rfile.read(int(length))
        if len(data) != int(length):
            raise ConnectionError("cut off")
        return self._send_json(self._ours.answers.add_direction(asked.get("name", ""), data))

    # -- who may ask -------------------------------------------------------------------------

    def _is_our_host(self) -> bool:
        """Return whether the Host header names this machine; other names may resolve to it."""
        if not self._ours.loopback:
            return True  # the token decides
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return is_loopback(host)

    def _is_our_origin(self) -> bool:
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        if site not in (None, "same-origin"):
            return False
        host = self.headers.get("Host")
        return origin in (None, f"http://{host}", f"https://{host}")  # https: through a proxy

    def _has_token(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._ours.cookie)
        except CookieError:
            return False
        return found is not None and self._is_token(found.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._ours.token or "").encode())

    def _welcome(self) -> None:
        """Move the token from the URL, which is visible and kept in histories, into a cookie."""
        cookie = f"{self._ours.cookie}={self._ours.token}; HttpOnly; SameSite=Strict; Path=/"
        cookie += "; Secure" if self._ours.tls else ""
        moved = {"Location": "/", **({"Set-Cookie": cookie} if self._ours.token else {})}
        self._send("text/plain", b"", HTTPStatus.SEE_OTHER, moved)

    # -- answers -----------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # do not read the rest of the request
        more = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send_json({"error": why}, status, {"Connection": "close", **more})

    def _send_json(
        self, value: Any, status: HTTPStatus = HTTPStatus.OK, more: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode()
        self._send("application/json", data, status, more)

    def _send(
        self,
        kind: str,
        data: bytes,
        status: HTTPStatus = HTTPStatus.OK,
        more: dict[str, str] | None = None,
    ) -> None:
        took = 1000 * (time.perf_counter() - getattr(self, "_began", time.perf_counter()))
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Server-Timing": f"app;dur={took:.2f}",
            **_HEADERS,
            **(more or {}),
        }
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the standard library rejects by itself: malformed requests, other methods."""
        refused = HTTPStatus.METHOD_NOT_ALLOWED if code == 501 else HTTPStatus(code)
        self._refuse(refused, "this server is read-only" if code == 501 else refused.phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: URLs may hold the token."""


def page_files() -> dict[str, tuple[str, bytes]]:
    """Return every file that is served, by its URL path."""
    folder = importlib.resources.files("spile.serve") / "page"
    found = {
        f"/{file.name}": (_TYPES[file.name.rpartition(".")[2]], file.read_bytes())
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }
    return {**found, "/": found["/index.html"]}
