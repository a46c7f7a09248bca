"""Requests to engines: many at a time, each repeated until it is answered or refused.

Every request has a connection of its own, so that an answer that comes late, or twice, is never
taken for that to another request. No answer is read beyond a limit in bytes and in seconds.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from spile.core.bounded_json import JsonError, parse_json_object
from spile.core.errors import ConfigError, StoreError, first_line, printable
from spile.core.libraries import import_library
from spile.core.retry import PASSING, PATIENCE, PATIENCE_AT_FIRST, backoff
from spile.core.system import system
from spile.objects.http import wish_of
from spile.rollouts.exchange import UnusableAnswer

T = TypeVar("T")

_log = logging.getLogger("spile.rollouts")
_ATTEMPTS = 8  # answers that cannot be used, or faults of the server, before a request is given up
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
_REFUSED = {400, 413, 422}  # statuses that say something about one request
_SHOWN = 300  # characters of an error of the server


@dataclass(frozen=True)
class Refusal:
    """Why a server will never answer a request, such as a prompt that is too long."""

    reason: str


class GivenUpError(StoreError):
    """A request failed again and again, while the server answered others."""


class Engines:
    """One or several equal servers of one model. Used inside `async with`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None = None,
        timeout: float = 600.0,
        patience: float = PATIENCE,
        patience_at_first: float = PATIENCE_AT_FIRST,
    ) -> None:
        """Args:
        key: sent as a bearer token.
        timeout: seconds for one answer, from the request to its last byte.
        patience: seconds without any answer from any server after which it gives up.
        patience_at_first: the same before the first answer: an address may be wrong.
        """
        self._urls = [_base(url) for url in urls]
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout, self._patience = timeout, (patience_at_first, patience)
        self._httpx = import_library("httpx", "--server", "httpx")
        self._next = 0
        self._answered: float | None = None  # when any server last answered
        self._began = system().monotonic()
        self._client: Any = None

    async def __aenter__(self) -> "Engines":
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = self._httpx.AsyncClient(
            limits=limits, timeout=self._timeout, headers=self._headers, follow_redirects=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self, wanted: str | None) -> tuple[str, str]:
        """Return the name of the model to ask for, and of the engine, if it is recognised."""

        def listed(data: bytes) -> list[dict[str, Any]]:
            try:
                found = parse_json_object(data).get("data")
            except JsonError as error:
                raise UnusableAnswer(str(error)) from None
            if not isinstance(found, list) or not found:
                raise UnusableAnswer("it lists no model")
            return [cast(dict[str, Any], each) for each in cast(list[Any], found)]

        models = await self.ask("GET", "/models", None, listed, most=1 << 20)
        if isinstance(models, Refusal):
            raise ConfigError(f"{self._urls[0]}/models: {models.reason}")
        names = [str(model.get("id")) for model in models]
        if wanted is not None and wanted not in names:
            raise ConfigError(f"--served-model {wanted}: the server has {', '.join(names[:9])}")
        chosen = models[names.index(wanted) if wanted else 0]
        return str(chosen.get("id")), str(chosen.get("owned_by", ""))

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        parse: Callable[[bytes], T],
        *,
        most: int,
    ) -> T | Refusal:
        """Return the parsed answer of a server, or why it refuses the request.

        Args:
            parse: raises UnusableAnswer, and the request is repeated.
            most: the largest answer to read, in bytes.

        Raises:
            GivenUpError: if this request alone fails again and again.
            StoreError: if no server has answered anything for long.
            ConfigError: if the server does not know the path, or asks for a key.
        """
        sent = None if body is None else json.dumps(body).encode()
        failures = faults = 0
        while True:
            url = self._urls[self._next % len(self._urls)] + path
            self._next += 1  # equal shares; and a repeated request goes to another server
            at_least, answered = 0.0, self._answered
            try:
                async with asyncio.timeout(self._timeout):
                    status, headers, data = await self._once(method, url, sent, most)
                if status == 200:
                    found = parse(data)
                    self._answered = system().monotonic()
                    return found
                if status in _REFUSED:
                    self._answered = system().monotonic()
                    return Refusal(f"{status}: {_message(data)}")
                why = f"the server answered {status}"
                if status == 429:  # it is up, and busy
                    self._answered = system().monotonic()
                elif status not in PASSING and status < 500:
                    raise ConfigError(f"{url}: {why}: {_message(data)}")
                else:
                    faults += status == 500
                at_least = wish_of(headers)
            except UnusableAnswer as error:
                why, faults = f"the answer cannot be used: {error}", faults + 1
            except TimeoutError:
                why, faults = f"no whole answer within {self._timeout:g} s", faults + 1
            except (self._httpx.HTTPError, OSError) as error:
                why = first_line(error)
                # A lost connection is this request's fault if others were answered meanwhile.
                faults += self._answered != answered
            except self._httpx.InvalidURL as error:
                raise ConfigError(f"--server {url}: {first_line(error)}") from None
            if faults >= _ATTEMPTS:
                raise GivenUpError(f"{url}: {why} ({faults} times)")
            self._refuse_silence(url, why)
            failures += 1
            pause = backoff(failures, _FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5, at_least=at_least)
            _log.debug("%s: %s; again in %.1f s", url, why, pause)
            await asyncio.sleep(pause)

    async def _once(
        self, method: str, url: str, sent: bytes | None, most: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with self._client.stream(method, url, content=sent, headers=headers) as response:
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > most:
                    raise UnusableAnswer(f"it is larger than {most} bytes")
            return response.status_code, response.headers, bytes(data)

    def _refuse_silence(self, url: str, why: str) -> None:
        """Raise if no server has answered for too long."""
        since = self._began if self._answered is None else self._answered
        waited = system().monotonic() - since
        if waited > self._patience[self._answered is not None]:
            raise StoreError(
                f"{url}: {why} (tried for {waited:.0f} s); is the server running? What is "
                "committed stays valid: run the same command again"
            )


def _base(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--server {url}: write http://HOST:PORT")
    if "@" in parts.netloc:
        raise ConfigError(
            f"--server {parts.scheme}://{parts.hostname}: remove the password from the URL; a key "
            "is taken from OPENAI_API_KEY"
        )
    stripped = url.rstrip("/")
    return stripped if stripped.endswith("/v1") else f"{stripped}/v1"


def _message(data: bytes) -> str:
    """Return what a server says about a request that it refuses."""
    try:
        body: Any = parse_json_object(data)
        told = body.get("error", body.get("message", body.get("detail")))
        told = cast(dict[str, Any], told).get("message") if isinstance(told, dict) else told
    except JsonError:
        told = data[:_SHOWN].decode(errors="replace")
    return printable(" ".join(str(told).split())[:_SHOWN])
