"""A proxy that fails: some requests are refused, cut off before or after they reach the server,
answered in part, or held up.

    python flaky_proxy.py PORT UPSTREAM_PORT SHARE SEED

SHARE of the requests fail, in each of these ways equally often:
    503, 429    the body is read, and the server never sees the request
    before      the connection is reset in the middle of the request; the server never sees it
    after       the server has done what it was asked to, and the connection is reset
    cut         half of the answer comes, then a reset
    stall       nothing happens for two seconds, then all is well

`PUT /-/plan` with a list of `[METHOD, PART OF A PATH, STATUS, BODY, DONE]` says what the next such
requests are answered, each once and in this order; where DONE, the server has done what it was
asked to all the same. `GET /-/plan` gives what has not come yet.

`GET /-/counts` says how many requests came, and how many failed in which way; `GET /-/kinds` how
many were of which kind, as S3 prices them: create, list, read, delete.
"""

import asyncio
import json
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator

WAYS = ("503", "429", "before", "after", "cut", "stall")
STALL_SECONDS = 2.0
_CHUNK = 1 << 18
Headers = dict[bytes, bytes]


class Proxy:
    def __init__(self, upstream: int, share: float, seed: int) -> None:
        self._upstream, self._share, self._random = upstream, share, random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._plan: list[tuple[str, str, str, str, bool]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False if the connection is over."""
        first, headers = await _head(reader)
        method, path = first.split(b" ")[:2]
        if path == b"/-/counts":
            await _answer(writer, b"200 OK", json.dumps(self._counts).encode())
            return True
        if path == b"/-/kinds":
            await _answer(writer, b"200 OK", json.dumps(self._kinds).encode())
            return True
        if path == b"/-/plan":
            if method == b"PUT":
                self._plan += json.loads(await reader.readexactly(int(headers[b"content-length"])))
            await _answer(writer, b"200 OK", json.dumps(self._plan).encode())
            return True
        self._counts["requests"] += 1
        self._kinds[_kind(method, path)] += 1
        planned = next((p for p in self._plan if _is_of(p, method, path)), None)
        if planned:
            self._plan.remove(planned)
        way = self._random.choice(WAYS) if self._random.random() < self._share else ""
        if way:
            self._counts[way] += 1
        length = int(headers.get(b"content-length", b"0"))
        if way == "before":
            await reader.readexactly(length // 2)
            return _reset(writer)
        if headers.get(b"expect", b"").lower() == b"100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length)
        if planned:
            _, _, status_line, said, done = planned
            if done:
                await self._ask(first, headers, body)
            await _answer(writer, status_line.encode(), said.encode())
            return True
        if way in ("503", "429"):
            status = b"503 Service Unavailable" if way == "503" else b"429 Too Many Requests"
            await _answer(writer, status, b"" if method == b"HEAD" else b"<Error/>")
            return True
        if way == "stall":
            await asyncio.sleep(STALL_SECONDS)
        status, answered, answer = await self._ask(first, headers, body)
        if way == "after":
            return _reset(writer)
        lines = [status, *(name + b": " + value for name, value in answered.items())]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        if way == "cut":
            writer.write(answer[: len(answer) // 2])
            await writer.drain()
            return _reset(writer)
        writer.write(answer)
        await writer.drain()
        return True

    async def _ask(
        self, first: bytes, headers: Headers, body: bytes
    ) -> tuple[bytes, Headers, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        passed = {n: v for n, v in headers.items() if n not in (b"connection", b"expect")}
        lines = [first, *(name + b": " + value for name, value in passed.items())]
        writer.write(b"\r\n".join([*lines, b"connection: close"]) + b"\r\n\r\n" + body)
        status, answered = await _head(reader)
        answer = b"".join([chunk async for chunk in _body(reader, first, status, answered)])
        writer.close()
        answered = {
            n: v for n, v in answered.items() if n not in (b"connection", b"transfer-encoding")
        }
        answered.setdefault(b"content-length", b"%d" % len(answer))
        return status, answered, answer


def _kind(method: bytes, path: bytes) -> str:
    if method == b"GET" and b"list-type=2" in path:
        return "list"
    if method == b"POST" and path.endswith(b"?delete"):  # of many keys, or of one
        return "delete"
    return {b"PUT": "create", b"POST": "create", b"DELETE": "delete"}.get(method, "read")


def _is_of(planned: tuple[str, str, str, str, bool], method: bytes, path: bytes) -> bool:
    return planned[0].encode() == method and planned[1].encode() in path


async def _head(reader: asyncio.StreamReader) -> tuple[bytes, Headers]:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines[1:] if line)
    return lines[0], {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(
    reader: asyncio.StreamReader, request: bytes, status: bytes, headers: Headers
) -> AsyncIterator[bytes]:
    if request.startswith(b"HEAD") or status.split(b" ")[1] in (b"204", b"304"):
        return
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    left = int(headers[b"content-length"]) if b"content-length" in headers else sys.maxsize
    while left and (chunk := await reader.read(min(left, _CHUNK))):
        left -= len(chunk)
        yield chunk


async def _answer(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> bool:
    """End a connection with a reset instead of a plain close."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


async def main(port: int, upstream: int, share: float, seed: int) -> None:
    proxy = Proxy(upstream, share, seed)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", port, limit=1 << 20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
