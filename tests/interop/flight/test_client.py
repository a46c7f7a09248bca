"""The trainer's side: a wrong address, and a server that is not Spile's."""

import socket

import pytest

from spile.core.errors import ConfigError, StoreError
from spile.interop.flight.client import Connection, connect


def test_a_wrong_address_says_so() -> None:
    with pytest.raises(ConfigError, match="not a server's address"):
        connect("http://127.0.0.1:1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreError, match="connect"):
            next(Connection(url, None, None, False))
