"""Files on web servers, read by ranges: https:// and http://.

Requests go through huggingface_hub's client. It is installed already (the tokenizers need it),
keeps connections open, uses the user's proxies and certificates, and exposes every answer's
headers. A web server lists nothing, so a URL names one file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

from spile.core.errors import ConfigError, SpileError, StoreError, first_line
from spile.core.libraries import import_library
from spile.core.retry import PASSING, PATIENCE, PATIENCE_AT_FIRST
from spile.objects.protocol import Entry, FilelessObjects, Stream, check_held, check_key, retrying

_TIMEOUT = 60.0  # seconds without data
_REDIRECTS = 5
_LONGEST_WISH = 120.0  # most seconds to wait at a server's request
_WHOLE = 16 << 20  # largest file to read whole if the server does not support ranges
_NETWORK = ("httpx", "httpcore")
_HOPELESS = ("InvalidURL", "UnsupportedProtocol", "LocalProtocolError", "OfflineModeIsEnabled")


@dataclass(frozen=True)
class Answer:
    """The answer of a server."""

    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes | None  # None: larger than requested
    url: str  # the final one, after redirects


class Client:
    """Read requests, retried until they are answered."""

    def __init__(self) -> None:
        self._answered = False  # whether there has been any answer

    def ask(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str],
        *,
        secret: Mapping[str, str] | None = None,
        most: int = _WHOLE,
    ) -> Answer:
        """Return the first answer that does not ask to retry, whatever its status.

        Args:
            what: the request, as shown to a user; addresses may hold signatures.
            secret: headers for this server only, not for those it redirects to.
            most: the largest body to read, in bytes.
        """
        trying = retrying(what, PATIENCE if self._answered else PATIENCE_AT_FIRST)
        while True:
            try:
                answer = _redirected(method, url, headers, secret or {}, most)
            except SpileError as error:
                raise type(error)(f"{what}: {error}") from error.__cause__
            except Exception as error:
                if any(cls.__name__ in _HOPELESS for cls in type(error).__mro__):
                    raise ConfigError(f"{what}: {first_line(error)}") from error
                if not of_the_network(error):
                    raise
                trying.again(first_line(error), error)
                continue
            if answer.status in PASSING or answer.status >= 500:
                wish = wish_of(answer.headers)
                if answer.status == 429:
                    wish = wish or 0.05  # the server is up
                trying.again(f"the server answered {answer.status}", at_least=wish)
                continue
            self._answered = True
            return answer


def _redirected(
    method: str, url: str, headers: Mapping[str, str], secret: Mapping[str, str], most: int
) -> Answer:
    """Make one attempt, following redirects."""
    first = url
    for _ in range(_REDIRECTS + 1):
        sent = {"Accept-Encoding": "identity", **headers}
        if _origin(url) == _origin(first):
            sent |= secret
        with session().stream(
            method, url, headers=sent, follow_redirects=False, timeout=_TIMEOUT
        ) as response:
            answer = Answer(response.status_code, response.headers, _body(response, most), url)
        if answer.status not in (301, 302, 303, 307, 308) or "location" not in answer.headers:
            return answer
        url = urljoin(url, answer.headers["location"])
        if first.startswith("https:") and not url.startswith("https:"):
            raise StoreError(f"redirected from https to {_origin(url)}, which is not safe")
    raise StoreError(f"redirected more than {_REDIRECTS} times")


def _body(response: Any, most: int) -> bytes | None:
    """Read the whole body, so that the connection can be reused; None if it is too large."""
    if int(response.headers.get("content-length") or 0) > most:
        return None
    pieces: list[bytes] = []
    taken = 0
    for piece in response.iter_raw():
        taken += len(piece)
        if taken > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


class WebObjects(FilelessObjects):
    """Files below an address of a web server."""

    parallel = most_closing = 16

    def __init__(self, url: str, query: str = "") -> None:
        self.url, self._query = url.rstrip("/"), query
        self._client = Client()
        self._sizes: dict[str, int] = {}
        self._whole: dict[str, bytes] = {}  # small files of a server without range support
        self._located: dict[str, str] = {}  # where the last redirect of a key led

    def get(self, key: str) -> bytes:
        size = self.size(key)
        check_held(self.url, key, size)
        return self.get_range(key, 0, size)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start or start >= self.size(key):
            return b""
        if key in self._whole:
            return self._whole[key][start:stop]
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        answer = self._read(key, headers, max(stop - start, _WHOLE))
        if answer.status == 416:
            return b""
        if answer.status == 206 and answer.body is not None:
            sent = re.match(r"bytes (\d+)-(\d+)/", answer.headers.get("content-range") or "")
            if sent and (int(sent[1]), int(sent[2]) + 1) == (start, start + len(answer.body)):
                return answer.body
            raise StoreError(f"{self.url}/{key}: the server did not send the requested range")
        if answer.body is None or len(answer.body) > _WHOLE:
            raise StoreError(
                f"{self.url}/{key}: the server ignores ranges, and the file is too large to be "
                "read whole each time; download it and give its path"
            )
        self._whole[key] = answer.body
        return answer.body[start:stop]

    def size(self, key: str) -> int:
        if key not in self._sizes:
            self._sizes[key] = self.entry(key).size
        return self._sizes[key]

    def entry(self, key: str) -> Entry:
        check_key(self.url, key)
        answer = self._ask("HEAD", key, {})
        length = answer.headers.get("content-length")
        if answer.status in (404, 410):
            self._refuse(key, answer)
        if answer.status != 200 or length is None:  # HEAD is unsupported, or not signed for
            answer = self._ask("GET", key, {"Range": "bytes=0-0"})
            self._refuse(key, answer)
            total = (answer.headers.get("content-range") or "").rpartition("/")[2]
            length = total if answer.status == 206 else answer.headers.get("content-length")
        if length is None or not length.isdigit():
            raise StoreError(f"{self.url}/{key}: the server does not report its size")
        etag = answer.headers.get("etag") or answer.headers.get("last-modified") or ""
        return Entry(key, int(length), etag)

    def list(self, prefix: str = "") -> Iterator[str]:
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        raise ConfigError(
            f"{self.url}/{prefix.removesuffix('/')}: there is no such file, and folders and globs "
            "do not work on a web server; name one file"
        )

    # -- requests ----------------------------------------------------------------------------

    def _address(self, key: str) -> str:
        return f"{self.url}/{key}{self._query}"

    def _secret(self) -> Mapping[str, str]:
        """Return headers for this server only."""
        return {}

    def _ask(self, method: str, key: str, headers: Mapping[str, str], most: int = _WHOLE) -> Answer:
        what = f"reading {self.url}/{key}"
        return self._client.ask(
            method, self._address(key), what, headers, secret=self._secret(), most=most
        )

    def _read(self, key: str, headers: Mapping[str, str], most: int) -> Answer:
        """Read part of a file, from the target of the last redirect while that works.

        This halves the requests to servers that limit their rate.
        """
        located = self._located.get(key)
        if located is not None:
            what = f"reading {self.url}/{key}"
            answer = self._client.ask("GET", located, what, headers, most=most)
            if answer.status < 400:
                return answer
            self._located.pop(key, None)
        answer = self._ask("GET", key, headers, most)
        if answer.status != 416:
            self._refuse(key, answer)
        if _origin(answer.url) != _origin(self._address(key)):
            self._located[key] = answer.url
        return answer

    def _refuse(self, key: str, answer: Answer) -> None:
        """Raise the error for an answer without the file."""
        if answer.status in (404, 410):
            raise FileNotFoundError(f"{self.url}: no {key}")
        if answer.status in (401, 403):
            raise StoreError(
                f"{self.url}/{key}: access denied ({answer.status}); the file must be readable "
                "without logging in"
            )
        if answer.status not in (200, 206):
            raise StoreError(f"{self.url}/{key}: the server answered {answer.status}")

    # -- unsupported operations -----------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        self._only_read()

    def replace(self, key: str, data: bytes) -> None:
        self._only_read()

    def move(self, key: str, to: str) -> None:
        self._only_read()

    def stream(self, key: str) -> Stream:
        self._only_read()

    def delete(self, key: str) -> None:
        self._only_read()

    def _only_read(self) -> NoReturn:
        raise ConfigError(f"{self.url}: is read-only; write to a directory, gs:// or s3:// instead")


def split_url(url: str) -> tuple[str, str, str]:
    """Return server, path and query of a file's address."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError(f"{url}: names no server; write {parts.scheme}://HOST/FILE")
    if "@" in parts.netloc:
        raise ConfigError(f"{parts.scheme}://{parts.hostname}: remove the password from the URL")
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"), query


def session() -> Any:
    """Return the client that the whole process shares."""
    client = library().get_session()
    if not hasattr(client, "stream"):
        raise ConfigError("huggingface_hub is too old; pip install 'spile[hub]'")
    return client


def library(module: str = "") -> Any:
    """Return huggingface_hub, or a module of it."""
    return import_library(f"huggingface_hub{module}", "https:// or the Hub", "'spile[hub]'")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def wish_of(headers: Mapping[str, str]) -> float:
    """Return the seconds a server asks us to wait, by the standard header or the Hub's."""
    found = re.fullmatch(r"\s*(\d+)\s*", headers.get("retry-after") or "")
    found = found or re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("ratelimit") or "")
    return min(float(found[1]), _LONGEST_WISH) if found else 0.0


def of_the_network(error: Exception) -> bool:
    """Return whether an error may be temporary; any other is a bug of ours."""
    module = type(error).__module__.partition(".")[0].rstrip("0123456789")
    return module in _NETWORK or isinstance(error, OSError)
