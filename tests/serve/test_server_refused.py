"""The server refuses clients without the token, and requests that nobody may make."""

import contextlib
import socket
import ssl
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from spile.serve.directions import MOST_BYTES
from support import certificates, web_page

API = ("run", "dataset", "documents", "document?doc=0", "layers", "positions", "channels", "top",
       "similarity", "projection")  # fmt: skip


@pytest.fixture(scope="module")
def guarded(built: web_page.Built) -> Iterator[web_page.Served]:
    with web_page.served(built.path, "--host", "0.0.0.0", "--insecure") as found:
        yield found


def raw(server: web_page.Served, data: bytes, *, seconds: float = 30) -> bytes:
    """Return the answer to these bytes."""
    where = urlsplit(server.base)
    with socket.create_connection(("127.0.0.1", where.port or 0), timeout=seconds) as found:
        found.sendall(data)
        return b"".join(iter(lambda: found.recv(1 << 16), b""))


def test_on_every_address_the_printed_one_can_be_opened(guarded: web_page.Served) -> None:
    assert urlsplit(guarded.url).hostname not in ("0.0.0.0", "::")
    answer = guarded.ask("/" + guarded.url.rpartition("/")[2])
    assert (answer.status, answer.headers["Location"]) == (303, "/")


# -- what is not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/../web.py", "/..%2fweb.py", "/%2e%2e/%2e%2e/errors.py", "//etc/passwd", "/page/main.js",
     "/etc/passwd", "/main.js/", "/main.js%00", "/api", "/api/", "/api/../main.js", "/api/routes",
     "/api/__class__", "/.git/config", "/units.json", "/\\..\\web.py", "/main.py"],
)  # fmt: skip
def test_no_path_leads_elsewhere(server: web_page.Served, path: str) -> None:
    answer = raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    status = int(answer.split()[1])
    assert status in (400, 404), answer[:200]
    assert b"import" not in answer and b"root:" not in answer


@pytest.mark.parametrize(
    "asked",
    ["document", "document?doc=-1", "document?doc=1e3", "document?doc=99999999999999999999",
     "document?doc=0&count=0", "document?doc=0&count=99999", "document?doc=0&tap=../x",
     "document?doc=0&by=channel&channel=12", "document?doc=0&by=__class__",
     "document?doc=0&by=direction&direction=99", "documents?count=1000", "documents?start=x",
     "top?channel=-1", "top?end=middle", "channels?by=count", "positions?tap=%3Cscript%3E",
     "projection?method=pickle", "document?doc=%FF", "document?doc=٣"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(server: web_page.Served, asked: str) -> None:
    answer = server.ask("/api/" + quote(asked, safe="?&=%"))
    assert answer.status == 400, answer.body
    assert "\n" not in answer.json["error"]
    assert "Traceback" not in answer.json["error"]


def test_a_document_that_is_not_there_is_not_found(server: web_page.Served) -> None:
    answer = server.ask("/api/document?doc=4000")
    assert answer.status == 404
    assert "document 4000 is not in the dataset" in answer.json["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/api/run"), ("DELETE", "/api/directions"), ("PATCH", "/"), ("OPTIONS", "/api/run"),
     ("TRACE", "/"), ("POST", "/api/run"), ("POST", "/"), ("BREW", "/")],
)  # fmt: skip
def test_it_is_only_read(server: web_page.Served, method: str, path: str) -> None:
    answer = server.ask(path, method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8770", "127.0.0.1.evil.example", "localhost.evil", "[",
             "10.0.0.1", ""]
)  # fmt: skip
def test_another_name_for_loopback_is_refused(server: web_page.Served, host: str) -> None:
    for path in ("/", "/api/run"):
        answer = server.ask(path, Host=host)
        assert answer.status == 421
        assert b"recipe" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8770"])
def test_loopback_by_its_own_names_is_served_through_any_port(
    server: web_page.Served, host: str
) -> None:
    assert server.ask("/api/run", Host=host).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "multipart/form-data"},
    ],
)
def test_no_other_page_hands_in_anything(server: web_page.Served, headers: dict[str, str]) -> None:
    assert server.hand_in(web_page.vector(), **headers).status == 403


def test_what_is_handed_in_has_a_length_and_a_limit(server: web_page.Served) -> None:
    head = (
        "POST /api/directions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/octet-stream\r\n"
    )
    for more, status in (
        ("", 411),
        ("Transfer-Encoding: chunked\r\n", 411),
        ("Content-Length: -1\r\n", 411),
        ("Content-Length: x\r\n", 411),
        (f"Content-Length: {MOST_BYTES + 1}\r\n", 413),
        (f"Content-Length: {'9' * 4000}\r\n", 413),
    ):
        answer = raw(server, f"{head}{more}\r\n".encode())
        assert int(answer.split()[1]) == status, more
    assert server.hand_in(b"[" + b"1," * 1000 + b"1]").status == 400
    assert server.hand_in(b"\x80\x04K\x01.").json["error"] == "neither a .npy file nor JSON"


@pytest.mark.parametrize(
    "data",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00" * 9 + b"\r\n", b"GET / HTTP/9.9\r\n\r\n",
     b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.0\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(200)) + b"\r\n"],
)  # fmt: skip
def test_what_is_no_request_ends_with_an_error_of_ours(
    server: web_page.Served, data: bytes
) -> None:
    answer = raw(server, data)
    assert b"Traceback" not in answer
    # What is no HTTP/1 request is answered without a status line.
    assert not answer or b'{"error":' in answer
    assert not answer.startswith(b"HTTP/1.1 2")
    assert server.ask("/api/run").status == 200


@pytest.mark.full
def test_slow_clients_keep_nobody_waiting_and_are_ended(server: web_page.Served) -> None:
    port = urlsplit(server.base).port or 0
    slow = [socket.create_connection(("127.0.0.1", port), timeout=90) for _ in range(40)]
    try:
        for each in slow:
            each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        began = time.monotonic()
        assert server.ask("/api/run").status == 200
        assert time.monotonic() - began < 60
        ended = False
        while not ended:  # a byte now and then keeps no connection
            assert time.monotonic() - began < 150
            try:
                slow[0].sendall(b"x")
                slow[0].settimeout(0.5)
                ended = slow[0].recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert time.monotonic() - began > 5
    finally:
        for each in slow:
            each.close()


def test_no_more_clients_are_served_at_once_than_there_may_be(server: web_page.Served) -> None:
    port = urlsplit(server.base).port or 0
    many = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(300)]
    try:
        with contextlib.suppress(ConnectionResetError):
            assert many[-1].recv(1) == b"", "closed at once"
        threads = len([*Path(f"/proc/{server.process.pid}/task").iterdir()])
        assert threads < 200
    finally:
        for each in many:
            each.close()
    limit = time.monotonic() + 60
    while True:
        try:
            assert server.ask("/api/run").status == 200
            return
        except OSError:  # room comes back
            assert time.monotonic() < limit
            time.sleep(0.1)


# -- the token -------------------------------------------------------------------------------


def test_beyond_loopback_a_token_is_made_and_needed(guarded: web_page.Served) -> None:
    token = guarded.url.partition("?token=")[2]
    assert len(token) >= 32
    for path in ("/", "/main.js", *(f"/api/{name}" for name in API), "/?token=wrong", "/?token="):
        answer = guarded.ask(path)
        assert answer.status == 401
        assert b"recipe" not in answer.body
    assert guarded.hand_in(web_page.vector()).status == 401
    for given in ("Bearer wrong", f"Basic {token}", "Bearer", token, "Bearer é"):
        assert guarded.ask("/api/run", Authorization=given.encode().decode("latin-1")).status == 401
    assert guarded.ask("/api/run", Authorization=f"Bearer {token}").status == 200


def test_the_token_moves_from_the_address_into_a_cookie(guarded: web_page.Served) -> None:
    token = guarded.url.partition("?token=")[2]
    answer = guarded.ask(f"/?token={token}")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    named = cookie.partition(";")[0]
    for path in ("/", "/api/run", "/main.js"):
        assert guarded.ask(path, Cookie=f"other=1; {named}").status == 200
    assert guarded.ask("/api/run", Cookie=named[:-1]).status == 401
    assert guarded.ask("/api/run", Cookie="\x01=;;==").status == 401


def test_a_token_may_be_given_on_loopback_too(built: web_page.Built) -> None:
    with web_page.served(built.path, "--token", "sixteen-letters-x") as server:
        assert server.url.endswith("?token=sixteen-letters-x")
        assert server.ask("/api/run").status == 401
        assert server.ask("/api/run", Authorization="bearer sixteen-letters-x").status == 200
        assert server.ask("/", Host="evil.example").status == 421


def test_tls_asks_for_the_token_while_another_handshake_stalls(
    built: web_page.Built, tmp_path: Path
) -> None:
    own = certificates.self_signed(tmp_path)
    with web_page.served(built.path, "--host", "0.0.0.0", *own.flags) as server:
        assert server.url.startswith("https://")
        where = urlsplit(server.base)
        with socket.create_connection(("127.0.0.1", where.port or 0)):  # and says nothing
            trusting = ssl.create_default_context(cafile=own.cert)
            token = server.url.partition("token=")[2]
            assert server.ask("/api/run", tls=trusting).status == 401
            told = server.ask("/api/run", tls=trusting, Authorization=f"Bearer {token}")
            assert told.json["state"] == "complete"
            entered = server.ask(f"/?token={token}", tls=trusting)
            assert entered.headers["Set-Cookie"].endswith("; Secure")
            with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
                server.ask("/api/run", tls=ssl.create_default_context())
            assert b"HTTP" not in raw(server, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
