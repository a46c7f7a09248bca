"""`spile.connect`: batches from `spile serve-rows`."""

import json
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from spile.core.errors import ConfigError, StoreError, printable
from spile.core.threads import Producer
from spile.dataset.read.dtypes import parsed_dtype
from spile.dataset.read.window import RowBatch
from spile.interop.flight.wire import Described, pyarrow

_AHEAD = 1  # batches that wait here, besides the one that is arriving


def connect(
    url: str,
    *,
    token: str | None = None,
    dtype: npt.DTypeLike | None = None,
    encoded: bool = False,
    tls_root_certs: str | Path | bytes | None = None,
) -> "Connection":
    """Iterate over the batches of a server, which reads and shuffles like `Dataset.batches`.

    Args:
        url: as the server prints it, grpc://HOST:PORT or grpc+tls://HOST:PORT.
        token: the server's token [SPILE_TOKEN].
        dtype: that of the values, as in `Dataset.read`: by default float32.
        encoded: return `Encoded` codes and scales for 8-bit taps.
        tls_root_certs: a PEM file (or its bytes) of certificates to trust, for example a
            self-signed one of the server [SPILE_TLS_ROOT_CERTS, or the system's certificates].
    """
    if not url.startswith(("grpc://", "grpc+tcp://", "grpc+tls://")):
        raise ConfigError(f"{url}: not a server's address; write e.g. grpc://127.0.0.1:8815")
    parsed_dtype(dtype)  # raises if there is none
    trusted = tls_root_certs or os.environ.get("SPILE_TLS_ROOT_CERTS") or None
    if isinstance(trusted, str | Path):
        try:
            trusted = Path(trusted).read_bytes()
        except OSError as error:
            raise ConfigError(f"tls_root_certs {trusted}: {error.strerror or error}") from None
    return Connection(url, token or os.environ.get("SPILE_TOKEN"), dtype, encoded, trusted)


class Connection:
    """An iterator over batches; `state_dict` may be taken between any two of them.

    The state is the one of `Dataset.batches` with the same options, which can continue from it.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        dtype: npt.DTypeLike | None,
        encoded: bool,
        trusted: bytes | None = None,
    ) -> None:
        """`trusted`: certificates in PEM; None: the system's."""
        self._url, self._token, self._dtype, self._encoded = url, token, dtype, encoded
        self._trusted = trusted
        self._state: dict[str, Any] = {}
        self._client: Any = None
        self._reader: Any = None
        self._coming: Producer[tuple[RowBatch, dict[str, Any]]] | None = None
        self._batches: Iterator[tuple[RowBatch, dict[str, Any]]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, as JSON; empty before the first batch."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; if the server cannot, the next batch raises."""
        self.close()
        self._state = dict(state)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Leave the server; the next batch connects again."""
        if self._reader is not None:
            self._reader.cancel()
        if self._coming is not None:
            self._coming.close()
        if self._client is not None:
            self._client.close()
        self._client = self._reader = self._coming = self._batches = None

    def __iter__(self) -> Iterator[RowBatch]:
        return self

    def __next__(self) -> RowBatch:
        try:
            if self._batches is None:
                self._batches = self._opened()
            found = next(self._batches, None)
        except pyarrow().ArrowException as error:
            self.close()
            raise self._stream_error(error) from None
        if found is None:
            self.close()
            raise StopIteration
        batch, self._state = found
        return batch

    def _opened(self) -> Iterator[tuple[RowBatch, dict[str, Any]]]:
        flight = pyarrow("pyarrow.flight")
        headers = [(b"authorization", f"Bearer {self._token}".encode())] if self._token else []
        self._client = flight.connect(self._url, tls_root_certs=self._trusted)
        ticket = flight.Ticket(json.dumps(self._state).encode() if self._state else b"")
        options = flight.FlightCallOptions(headers=headers)
        self._reader = self._client.do_get(ticket, options)
        described = Described.of(self._reader.schema)
        received = _received(self._reader, described, self._dtype, self._encoded)
        self._coming = Producer(received, _AHEAD, "spile-connect")
        return iter(self._coming)

    def _stream_error(self, error: Exception) -> StoreError | ConfigError:
        flight = pyarrow("pyarrow.flight")
        told = printable(str(error)).partition(". gRPC client debug context")[0]
        told = told.partition(". Detail:")[0][:400]
        if isinstance(error, flight.FlightUnauthenticatedError):
            return ConfigError(f"{self._url}: {told}; give it as token=, or in SPILE_TOKEN")
        return StoreError(f"{self._url}: {told}")


def _received(
    reader: Any, described: Described, dtype: npt.DTypeLike | None, encoded: bool
) -> Generator[tuple[RowBatch, dict[str, Any]], None, None]:
    """Yield the batches of a stream.

    The thread that runs this holds no reference to the `Connection`, so a forgotten one closes.
    """
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        state = json.loads(chunk.app_metadata.to_pybytes())
        yield described.from_arrow(chunk.data, dtype, encoded), state
