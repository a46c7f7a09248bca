"""An OpenAI-compatible engine on loopback: it answers by a hash, and can be hostile.

Answers depend only on what is asked, so that a test knows each of them. A fault happens to a
request a fixed number of times: what is asked again is answered at last.
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import xxhash

FAULTS = (
    "drop", "cut", "long", "twice", "syntax", "429", "500", "503", "endless", "late", "ids",
    "choices", "nan", "nothing",
)  # fmt: skip
LATE = 1.5  # seconds that a late answer takes


def sampled(asked: Any, seed: int, most: int) -> tuple[list[int], list[float]]:
    """The tokens that this engine samples, and their log-probabilities."""
    digest = xxhash.xxh3_64_intdigest(json.dumps([asked, seed]).encode())
    rng = np.random.default_rng(digest)
    count = int(rng.integers(1, most + 1))
    return rng.integers(97, 123, count).tolist(), (-rng.random(count) * 3).tolist()


class EngineServer(ThreadingHTTPServer):
    """Attributes:
    engine: what it says of itself, and so which fields it has.
    faults: what goes wrong with each request, before it is answered.
    refused: texts of prompts that it refuses.
    down: whether it closes every connection.
    delay: seconds that each answer takes.
    retry_after: what it says when it is busy.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: str = "vllm", faults: Sequence[str] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine, self.faults = engine, tuple(faults)
        self.refused: set[str] = set()
        self.down, self.delay, self.retry_after = False, 0.0, "0"
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.most_at_a_time = self.now = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave as they like."""


@contextmanager
def serving(engine: str = "vllm", faults: Sequence[str] = ()) -> Iterator[EngineServer]:
    server = EngineServer(engine, faults)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.down:
            self.close_connection = True
            return
        self._send(200, {"data": [{"id": "tiny", "owned_by": self.server.engine}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.now += 1
            server.most_at_a_time = max(server.most_at_a_time, server.now)
            server.bodies.append(body)
            key = json.dumps([body.get("prompt", body.get("messages")), body["seed"]])
            attempt = server.asked[key]
            server.asked[key] += 1
        try:
            self._serve(body, attempt, key)
        finally:
            with server.lock:
                server.now -= 1

    def _serve(self, body: dict[str, Any], attempt: int, key: str) -> None:
        server = self.server
        if server.delay:
            time.sleep(server.delay)
        if server.down:
            self.close_connection = True
            return
        if any(text in key for text in server.refused):
            self._send(400, {"error": {"message": "the prompt is too long"}})
            return
        answer = answer_to(body, self.path.endswith("/chat/completions"), server.engine)
        # Each request begins with another fault, so that all of them come in any order.
        first = xxhash.xxh3_64_intdigest(key.encode()) % max(1, len(server.faults))
        faults = [*server.faults[first:], *server.faults[:first]][:4]
        fault = faults[attempt] if attempt < len(faults) else ""
        data = json.dumps(answer).encode()
        match fault:
            case "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case "cut":
                self._head(200, len(data))
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            case "long":
                self._head(200, len(data) + 7)
                self.wfile.write(data)
                self.close_connection = True
            case "twice":
                self._send(200, answer)
                other = answer_to({**body, "seed": 1 + body["seed"]}, "messages" in body,
                                  server.engine)  # fmt: skip
                self._send(200, other)
            case "syntax":
                self._head(200, len(data))
                self.wfile.write(b"{" + data[:-1])
            case "429":
                self._send(429, {"error": "busy"}, {"Retry-After": server.retry_after})
            case "500" | "503":
                self._send(int(fault), {"error": {"message": "a fault"}})
            case "endless":
                self.send_response(200)
                self.end_headers()
                while True:
                    self.wfile.write(b" " * (1 << 16))
            case "late":
                time.sleep(LATE)
                self._send(200, answer)
            case "ids":
                choice = answer["choices"][0]
                choice["token_ids"] = [*choice.get("token_ids", [1]), 1, 2]
                self._send(200, answer)
            case "choices":
                answer["choices"] *= 2
                self._send(200, answer)
            case "nan":
                self._head(
                    200,
                    len(
                        data := data.replace(b'"logprob": -', b'"logprob": NaN, "x": ').replace(
                            b'"token_logprobs": [-', b'"token_logprobs": [NaN, '
                        )
                    ),
                )
                self.wfile.write(data)
            case "nothing":
                self._send(200, {})
            case _:
                self._send(200, answer)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self._head(status, len(data), headers)
        self.wfile.write(data)

    def _head(self, status: int, size: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()


def answer_to(body: dict[str, Any], chat: bool, engine: str) -> dict[str, Any]:
    """The whole answer of an engine, in its own spelling."""
    ids, logs = sampled(body.get("messages", body.get("prompt")), body["seed"], body["max_tokens"])
    text = "".join(map(chr, ids))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    own = [token - 33 if token >= 33 else token for token in ids]  # of the tiny tokenizer
    if chat:
        content = [
            {"token": chr(token), "logprob": log, "bytes": [token]}
            for token, log in zip(ids, logs, strict=True)
        ]
        if engine == "llamacpp":
            for each, token in zip(content, own, strict=True):
                each["id"] = token
        choice |= {"message": {"role": "assistant", "content": text},
                   "logprobs": {"content": content}}  # fmt: skip
    else:
        choice |= {"text": text, "logprobs": {
            "tokens": [chr(token) for token in ids], "token_logprobs": logs,
        }}  # fmt: skip
    if engine == "vllm" and body.get("return_token_ids"):
        choice["token_ids"] = own
    return {"id": "x", "model": "tiny", "choices": [choice]}
