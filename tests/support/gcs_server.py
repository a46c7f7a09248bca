"""A server that speaks what Spile uses of Google Cloud Storage's XML API, preconditions included.

    python gcs_server.py PORT [FAULT ...]

Emulators that were tried ignore preconditions without a word, and so pass broken code. Faults that
it has on purpose:
    careless    preconditions are ignored
    corrupting  a byte of every large object is changed before it is stored
    opaque      etags are no digests
    closed      nothing may be written
"""

import email.utils
import hashlib
import sys
import threading
import time
import xml.sax.saxutils
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_PAGE = 100  # keys in a listing's page: small, so that there are several


class Stored:
    def __init__(self, data: bytes, generation: int) -> None:
        self.data, self.generation, self.made = data, generation, time.time()
        named = f"{generation}".encode() if "opaque" in FAULTS else data
        self.etag = hashlib.md5(named).hexdigest()


class Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.lock = threading.Lock()
        self.generation = 0

    def put(self, key: str, data: bytes, wanted: str | None) -> Stored | None:
        """None if the generation is not the wanted one; 0: there must be no object."""
        with self.lock:
            present = self.objects.get(key)
            if wanted is not None and int(wanted) != (present.generation if present else 0):
                return None
            self.generation += 1
            self.objects[key] = Stored(data, self.generation)
            return self.objects[key]


BUCKETS: dict[str, Bucket] = {}
FAULTS = set(sys.argv[2:])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece, or each answer waits 40 ms for an ACK

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _where(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        return bucket, key, {k: v[0] for k, v in parse_qs(parts.query).items()}

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do_PUT(self) -> None:
        name, key, _ = self._where()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not key:
            BUCKETS.setdefault(name, Bucket())
            return self._answer(200)
        if name not in BUCKETS:
            return self._error(404, "NoSuchBucket")
        if "closed" in FAULTS:
            return self._error(403, "AccessDenied")
        wanted = None if "careless" in FAULTS else self.headers.get("x-goog-if-generation-match")
        if "corrupting" in FAULTS and len(data) > 4096:
            data = data[:-1] + bytes([data[-1] ^ 1])
        stored = BUCKETS[name].put(key, data, wanted)
        if stored is None:
            return self._error(412, "PreconditionFailed")
        return self._answer(200, ETag=f'"{stored.etag}"', x_goog_generation=str(stored.generation))

    def do_GET(self) -> None:
        name, key, query = self._where()
        if name not in BUCKETS:
            return self._error(404, "NoSuchBucket")
        if not key:
            return self._list(BUCKETS[name], query)
        stored = BUCKETS[name].objects.get(key)
        if stored is None:
            return self._error(404, "NoSuchKey")
        headers = {
            "ETag": f'"{stored.etag}"', "x_goog_generation": str(stored.generation),
            "Last_Modified": email.utils.formatdate(stored.made, usegmt=True),
        }  # fmt: skip
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, stored.data, **headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(stored.data))
        if start >= len(stored.data):
            return self._error(416, "InvalidRange")
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
        return self._answer(206, stored.data[start:stop], **headers)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        name, key, _ = self._where()
        if name not in BUCKETS or BUCKETS[name].objects.pop(key, None) is None:
            return self._error(404, "NoSuchKey")
        return self._answer(204)

    def _list(self, bucket: Bucket, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        with bucket.lock:
            found = sorted(
                (key, stored)
                for key, stored in bucket.objects.items()
                if key.startswith(query.get("prefix", "")) and key > after
            )
        folders = ""
        if query.get("delimiter"):
            begin = len(query.get("prefix", ""))
            below = {key[: key.index("/", begin) + 1] for key, _ in found if "/" in key[begin:]}
            found = [(key, stored) for key, stored in found if "/" not in key[begin:]]
            folders = "".join(
                f"<CommonPrefixes><Prefix>{xml.sax.saxutils.escape(each)}</Prefix></CommonPrefixes>"
                for each in sorted(below)
            )
        page = found[:_PAGE]
        entries = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key><Size>{len(stored.data)}</Size>"
            f"<ETag>&quot;{stored.etag}&quot;</ETag><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stored.made))}</LastModified>"
            "</Contents>"
            for key, stored in page
        )
        more = len(found) > _PAGE
        token = (
            f"<NextContinuationToken>{xml.sax.saxutils.escape(page[-1][0])}"
            "</NextContinuationToken>" if more else ""
        )  # fmt: skip
        self._answer(
            200,
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            f"{folders}</ListBucketResult>".encode(),
        )


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
