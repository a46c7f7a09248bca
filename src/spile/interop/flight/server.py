"""`spile serve-rows`: a dataset's batches over Arrow Flight, read once for many trainers.

A trainer asks for the stream with a ticket, which may hold the state it goes on from, and gets
every batch with the state after it. Nothing can be written or run through this server.
"""

import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

from spile.core.bounded_json import JsonError, parse_json
from spile.core.errors import ConfigError, SpileError, printable
from spile.dataset.read.batches import Batches
from spile.interop.flight.fanout import Fanout
from spile.interop.flight.wire import pyarrow, schema_of, to_arrow

_MOST_TICKET = 1 << 16  # bytes
_GRACE = 2.0  # seconds for calls to end


class RowServer:
    """Gives batches to whoever connects."""

    def __init__(
        self,
        batches: Batches,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        trainers: int = 1,
        buffer: int = 8,
        patience: float = 300.0,
    ) -> None:
        """Args:
        batches: of rows as they are stored (`encoded=True`, no dtype).
        token: that trainers must know; made if the address is not this machine's alone.
        trainers: that must have come before the first batch is read.
        buffer: batches that are held for those who are behind.
        patience: seconds that others wait for one that takes nothing.
        """
        self.token = token or (None if _is_loopback(host) else secrets.token_urlsafe(24))
        self._patience = patience
        self._closing: threading.Thread | None = None
        schema = schema_of(batches.view)
        self._fanout = Fanout(
            batches, lambda batch: to_arrow(batch, schema), takers=trainers, buffer=buffer,
            patience=patience,
        )  # fmt: skip
        flight = pyarrow("pyarrow.flight")
        where = f"[{host}]" if ":" in host else host
        try:
            self._server = _flight_server(
                flight, f"grpc://{where}:{port}", self._fanout, schema, self.token
            )
        except (OSError, flight.FlightError, ValueError) as error:
            raise ConfigError(
                f"--host {host} --port {port}: {printable(str(error))[:200]}"
            ) from None
        reached = socket.gethostname() if host in ("0.0.0.0", "::") else where
        self.url = f"grpc://{reached}:{self._server.port}"

    def run(self, stop: threading.Event) -> None:
        """Serve until all is given, or told to stop."""
        grace = _GRACE
        try:
            self._fanout.run(stop)
            if not stop.is_set():
                grace = self._patience  # last batches are on their way
        finally:
            # It waits for trainers to read what they were sent, and some never do.
            self._closing = threading.Thread(target=self._server.shutdown, daemon=True)
            self._closing.start()
            self._closing.join(grace)

    @property
    def is_closed(self) -> bool:
        """Whether every trainer has been parted from."""
        return self._closing is not None and not self._closing.is_alive()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _flight_server(flight: Any, location: str, fanout: Fanout, schema: Any, token: Any) -> Any:
    pa = pyarrow()

    class Bearer(flight.ServerMiddlewareFactory):
        """Asks every call for the token."""

        def start_call(self, info: Any, headers: Any) -> None:
            given = [value for value in headers.get("authorization", ()) if isinstance(value, str)]
            wanted = f"Bearer {token}".encode()
            if not any(secrets.compare_digest(value.encode(), wanted) for value in given):
                raise flight.FlightUnauthenticatedError("the token is missing, or another one")

    class Server(flight.FlightServerBase):
        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.GeneratorStream(schema, self._batches(context, ticket.ticket))

        def _batches(self, context: Any, ticket: bytes) -> Iterator[Any]:
            try:
                number = fanout.join(_state_of(ticket))
                try:
                    while item := fanout.next(number, lambda: not context.is_cancelled()):
                        yield item.batch, pa.py_buffer(json.dumps(item.after).encode())
                finally:
                    fanout.leave(number)
            except SpileError as error:
                raise flight.FlightServerError(str(error)) from None

    middleware = {"token": Bearer()} if token else {}
    return Server(location, middleware=middleware)


def _state_of(ticket: bytes) -> dict[str, Any] | None:
    """What a stranger says it goes on from."""
    try:
        state: Any = parse_json(ticket, max_bytes=_MOST_TICKET) if ticket else None
    except JsonError as error:
        reason = "too long" if error.problem == "size" else "not JSON"
        raise ConfigError(f"the ticket is {reason}") from None
    if state is not None and not isinstance(state, dict):
        raise ConfigError("the ticket is not the state of batches")
    return cast(dict[str, Any], state) or None
