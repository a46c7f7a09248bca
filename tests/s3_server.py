"""moto's S3 with conditional puts that are atomic, as the real ones are.

    python s3_server.py PORT

moto asks whether a key exists and stores it afterwards, each request in a thread of its own: of
two racing creates both may win, which no real S3 allows. So puts take turns.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

_turn = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
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
