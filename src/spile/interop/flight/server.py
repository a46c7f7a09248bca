"""`spile serve-rows`: a dataset's batches over Arrow Flight, read once for many trainers.

A trainer requests the stream with a ticket, which may hold the state to continue from. It receives
every batch with the state after it. Nothing can be written or run through this server.

`Fanout` reads once for all trainers: each gets the same batches, and none runs far ahead of the
others. A batch is held until every trainer has taken it, and the number of held batches is limited.
A trainer that takes nothing while others wait for it is dropped after a while.
"""

import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from spile.core.bounded_json import JsonError, parse_json
from spile.core.errors import ConfigError, SpileError, StoreError, printable
from spile.core.listening import ListenAddress
from spile.dataset.format import is_count
from spile.dataset.read.batches import Batches
from spile.interop.flight.wire import pyarrow, schema_of, to_arrow

_MOST_TICKET = 1 << 16  # bytes
MOST_TRAINERS = 256
_POLL = 0.2  # seconds between checks whether trainers are still connected
_PARTING = 5.0  # seconds after which a lost connection is noticed
_GRACE = 2.0  # seconds for calls to end

_State = Mapping[str, Any]


class RowServer:
    """Serves batches to trainers."""

    def __init__(
        self,
        batches: Batches,
        address: ListenAddress | None = None,
        *,
        trainers: int = 1,
        buffer: int = 8,
        patience: float = 300.0,
    ) -> None:
        """Args:
        batches: batches of rows in stored form (`encoded=True`).
        address: where to listen, and the token that trainers must send [any port of loopback].
        trainers: how many trainers must connect before the first batch is read.
        buffer: most batches to hold for slower trainers.
        patience: seconds that others wait for a trainer that takes nothing.
        """
        address = address or ListenAddress()
        self.token = address.token
        self._patience = patience
        self._closing: threading.Thread | None = None
        schema = schema_of(batches.view)
        self._fanout = Fanout(
            batches,
            lambda batch: to_arrow(batch, schema),
            takers=trainers,
            buffer=buffer,
            patience=patience,
        )
        flight = pyarrow("pyarrow.flight")
        scheme = "grpc+tls" if address.uses_tls else "grpc"
        try:
            self._server = _flight_server(
                flight, f"{scheme}://{address.in_url}:{address.port}", self._fanout, schema, address
            )
        except (OSError, flight.FlightError, ValueError) as error:
            raise ConfigError(
                f"--host {address.host} --port {address.port}: {printable(str(error))[:200]}"
            ) from None
        anywhere = address.host in ("0.0.0.0", "::")
        reached = socket.gethostname() if anywhere else address.in_url
        self.url = f"{scheme}://{reached}:{self._server.port}"

    def run(self, stop: threading.Event) -> None:
        """Serve until every batch is taken, or `stop` is set."""
        grace = _GRACE
        try:
            self._fanout.run(stop)
            if not stop.is_set():
                grace = self._patience  # the last batches are on their way
        finally:
            # shutdown() waits until trainers have read all that was sent, and some never do.
            self._closing = threading.Thread(target=self._server.shutdown, daemon=True)
            self._closing.start()
            self._closing.join(grace)

    @property
    def is_closed(self) -> bool:
        """Whether the connections of all trainers are closed."""
        return self._closing is not None and not self._closing.is_alive()


def _flight_server(
    flight: Any, location: str, fanout: "Fanout", schema: Any, address: ListenAddress
) -> Any:
    pa = pyarrow()

    class Bearer(flight.ServerMiddlewareFactory):
        """Requires the token in every call."""

        def start_call(self, info: Any, headers: Any) -> None:
            given = [value for value in headers.get("authorization", ()) if isinstance(value, str)]
            wanted = f"Bearer {address.token}".encode()
            if not any(secrets.compare_digest(value.encode(), wanted) for value in given):
                raise flight.FlightUnauthenticatedError("the token is missing or wrong")

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

    middleware = {"token": Bearer()} if address.token else {}
    certificates = [address.pem()] if address.uses_tls else []
    return Server(location, tls_certificates=certificates, middleware=middleware)


def _state_of(ticket: bytes) -> dict[str, Any] | None:
    """Parse the state in a ticket, which is untrusted."""
    try:
        state: Any = parse_json(ticket, max_bytes=_MOST_TICKET) if ticket else None
    except JsonError as error:
        reason = "too long" if error.problem == "size" else "not JSON"
        raise ConfigError(f"the ticket is {reason}") from None
    if state is not None and not isinstance(state, dict):
        raise ConfigError("the ticket does not hold the state of an iteration")
    return cast(dict[str, Any], state) or None


@dataclass(frozen=True)
class HeldBatch:
    """A batch that has been read, and the states before and after it."""

    batch: Any
    before: _State
    after: _State


@dataclass
class _Taker:
    next: int  # the number of the batch it takes next
    moved: float  # when it last took one
    left_behind: bool = False


class Fanout:
    """Hands batches to several takers, which may come and go."""

    def __init__(
        self,
        batches: Batches,
        made: Callable[[Any], Any],
        *,
        takers: int,
        buffer: int,
        patience: float,
    ) -> None:
        """Args:
        made: converts a batch to the form in which it is held.
        takers: how many must join before the first batch is read.
        """
        if takers < 1 or buffer < 1 or patience <= 0:
            raise ConfigError("--trainers and --buffer must be at least 1, --patience above 0")
        self._batches, self._made, self._least = batches, made, takers
        self._buffer, self._patience = buffer, patience
        self._changed = threading.Condition()
        self._held: deque[HeldBatch] = deque()
        self._first = 0  # the number of the first held batch
        self._takers: dict[int, _Taker] = {}
        self._came = 0
        self._begun = self._ended = False
        self._start: _State = batches.state_dict()
        self._after: _State = self._start  # after the last batch that was read
        self._given = False  # whether a batch was read since the last change of position
        self._wanted: _State | None = None  # the position to continue from, if it has changed
        self._error: BaseException | None = None

    # -- takers --------------------------------------------------------------------------------

    def join(self, state: _State | None) -> int:
        """Register a new taker; return its number.

        Args:
            state: the state of `Batches` to continue from; None: start at the first held batch.
        """
        with self._changed:
            if state is not None:
                self._check(state)
                # A taker that reconnects at once must not be refused because of its old connection.
                self._changed.wait_for(
                    lambda: not self._takers or self._found(state) is not None, _PARTING
                )
            if len(self._takers) >= MOST_TRAINERS:
                raise StoreError(f"too many trainers: {MOST_TRAINERS} are connected already")
            over = self._ended and not self._held and not self._takers
            wanted = state or (self._start if over else None)
            first = self._first if wanted is None else self._place(wanted)
            self._came += 1
            self._takers[self._came] = _Taker(first, time.monotonic())
            self._changed.notify_all()
            return self._came

    def _check(self, state: _State) -> None:
        whose = self._start.keys() - {"epoch", "position"}
        known = is_count(state.get("epoch")) and is_count(state.get("position"))
        if not known or any(state.get(name) != self._start[name] for name in whose):
            raise ConfigError("this state does not belong to the served iteration")

    def _found(self, state: _State) -> int | None:
        """Return the number of the batch after a state, if it is held or read next."""
        for number, item in enumerate(self._held, self._first):
            if item.before == state:
                return number
        return self._first + len(self._held) if self._after == state else None

    def _place(self, state: _State) -> int:
        """Return the number of the batch after a state; move the reader there if nobody reads."""
        found = self._found(state)
        if found is not None:
            return found
        if self._takers:
            raise ConfigError(
                f"epoch {state.get('epoch')}, position {state.get('position')} is no longer held, "
                "and other trainers are connected; use `spile.open(…).batches`, or restart all"
            )
        self._wanted = self._after = dict(state)
        self._first, self._ended, self._given = self._first + len(self._held), False, False
        self._held.clear()
        return self._first

    def leave(self, number: int) -> None:
        with self._changed:
            self._takers.pop(number, None)
            self._forget()

    def next(self, number: int, is_there: Callable[[], bool]) -> HeldBatch | None:
        """Return the next batch for a taker; None after the last one.

        Args:
            is_there: called while there is nothing to take; False ends the wait.
        """
        with self._changed:
            while True:
                taker = self._takers.get(number)
                if taker is None or taker.left_behind:
                    raise StoreError(
                        f"dropped: took no batch for {self._patience:.0f} s while others waited; "
                        "connect again with the last state_dict, or increase --patience"
                    )
                if self._error is not None:
                    raise self._error
                place = taker.next - self._first
                if place < len(self._held):
                    item = self._held[place]
                    taker.next, taker.moved = taker.next + 1, time.monotonic()
                    self._forget()
                    return item
                if self._ended or not is_there():
                    return None
                self._changed.wait(_POLL)

    def _forget(self) -> None:
        """Drop batches that all takers have; without takers, keep the last for their return."""
        while self._held and self._takers and self._least_next() > self._first:
            self._held.popleft()
            self._first += 1
        self._changed.notify_all()

    def _least_next(self) -> int:
        return min(taker.next for taker in self._takers.values())

    # -- the reader ----------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Read until every batch is taken, or `stop` is set.

        If reading fails, the takers are told, and the error is raised.
        """
        while not stop.is_set():
            with self._changed:
                ready = self._ready()
                if self._ended and self._given and not self._takers:
                    return
                if not ready:
                    self._leave_behind()
                    self._changed.wait(_POLL)
                    continue
                wanted, self._wanted = self._wanted, None
            try:
                if wanted is not None:
                    self._batches.load_state_dict(wanted)
                before = self._batches.state_dict()
                batch = next(self._batches.unconverted(), None)
                item = None
                if batch is not None:
                    item = HeldBatch(self._made(batch), before, self._batches.state_dict())
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                raise
            with self._changed:
                if self._wanted is None:
                    if item:
                        self._held.append(item)
                        self._after, self._given = item.after, True
                    else:
                        self._ended = True
                    self._changed.notify_all()

    def _ready(self) -> bool:
        """Whether to read another batch now."""
        self._begun |= len(self._takers) >= self._least
        return (
            self._begun
            and bool(self._takers)
            and not self._ended
            and len(self._held) < self._buffer
        )

    def _leave_behind(self) -> None:
        """Drop takers that hold up others."""
        last = self._first + len(self._held)
        waiting = any(taker.next == last for taker in self._takers.values())
        for taker in self._takers.values():
            late = time.monotonic() - taker.moved > self._patience
            if late and taker.next == self._first < last and waiting:
                taker.left_behind = True
        kept = {number: t for number, t in self._takers.items() if not t.left_behind}
        if len(kept) < len(self._takers):
            self._takers = kept
            self._forget()
