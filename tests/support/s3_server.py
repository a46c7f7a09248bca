"""moto's S3 with conditional puts that are atomic, as the real ones are.

    python s3_server.py PORT [KEY SECRET]

moto asks whether a key exists and stores it afterwards, each request in a thread of its own: of
two racing creates both may win, which no real S3 allows. So puts take turns.

With a key and its secret, the server is one account's: every request must carry its signature
(version 4), except that buckets are made without one. moto itself accepts whatever it is sent.
"""

import hashlib
import hmac
import io
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl, quote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

ACCOUNT = sys.argv[2:]
_turn = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


def signed(environ: dict[str, Any], key: str, secret: str) -> bool:
    """Whether a request carries the signature of an account."""
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+/[^/]+/s3/aws4_request), ?"
        r"SignedHeaders=([^,]+), ?Signature=(\w+)",
        environ.get("HTTP_AUTHORIZATION", ""),
    )
    if found is None or found[1] != key:
        return False
    scope, names, signature = found.groups()[1:]
    headers = {
        name: environ.get("HTTP_" + name.upper().replace("-", "_"))
        or environ.get(name.upper().replace("-", "_"), "")
        for name in names.split(";")
    }
    asked = sorted(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
    query = [f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in asked]
    request = "\n".join([
        environ["REQUEST_METHOD"],
        environ["RAW_URI"].partition("?")[0],
        "&".join(query),
        *(f"{name}:{value.strip()}" for name, value in headers.items()),
        "",
        names,
        environ["HTTP_X_AMZ_CONTENT_SHA256"],
    ])  # fmt: skip
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", environ["HTTP_X_AMZ_DATE"], scope, hashed])
    made = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        made = hmac.digest(made, part.encode(), "sha256")
    return hmac.compare_digest(made.hex(), signature)


def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    makes_bucket = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") == 1
    if ACCOUNT and not makes_bucket and not signed(environ, *ACCOUNT):
        # The body is not read: the connection cannot be used again.
        headers = [("Content-Type", "application/xml"), ("Connection", "close")]
        start_response("403 Forbidden", headers)
        return [b"<Error><Code>SignatureDoesNotMatch</Code></Error>"]
    if environ["REQUEST_METHOD"] != "PUT":
        return _moto(environ, start_response)
    # The body first: a client that stalls must not keep others waiting.
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length) if length else b""
    with _turn:
        return _moto({**environ, "wsgi.input": io.BytesIO(body)}, start_response)


if __name__ == "__main__":
    # Connections are kept: without this each request opens one, and ports run out.
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    # Head and body in one piece, or each answer waits 40 ms for an ACK.
    WSGIRequestHandler.wbufsize = -1
    run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
