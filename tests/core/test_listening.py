"""Where servers listen: beyond loopback only with TLS or with --insecure."""

import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import ConfigError
from spile.core.listening import ListenAddress, is_loopback
from support import certificates


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificate:
    return certificates.self_signed(tmp_path_factory.mktemp("own"))


def test_loopback_is_known_by_its_addresses() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""):
        assert not is_loopback(host)


def test_a_server_on_every_address_names_one_that_can_be_opened(
    own: certificates.Certificate,
) -> None:
    hosts = [("0.0.0.0", socket.AF_INET)]
    if socket.has_dualstack_ipv6():
        hosts.append(("::", socket.AF_INET6))
    for host, family in hosts:
        address = ListenAddress(host, insecure=True)
        assert address.is_anywhere
        with socket.create_server((host, 0), family=family) as server:
            found = (address.openable.strip("[]"), server.getsockname()[1])
            with socket.create_connection(found, timeout=30):
                pass
        secured = ListenAddress(host, tls_cert=own.cert, tls_key=own.key)
        assert secured.openable == socket.gethostname(), "as certificates have it"


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("node7", "node7")]
)
def test_a_host_that_is_given_is_named_as_it_is(host: str, shown: str) -> None:
    address = ListenAddress(host, insecure=True)
    assert (address.is_anywhere, address.openable) == (False, shown)


def test_without_a_network_a_server_on_every_address_is_opened_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unconnected(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unconnected)
    assert ListenAddress("0.0.0.0", insecure=True).openable == "localhost"


def test_loopback_needs_neither_token_nor_tls() -> None:
    assert ListenAddress().token is None
    assert ListenAddress(token="given").token == "given"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node7", ""])
def test_a_token_does_not_cross_a_network_unencrypted_unless_told(
    host: str, own: certificates.Certificate
) -> None:
    for token in (None, "given"):
        with pytest.raises(ConfigError) as raised:
            ListenAddress(host, token=token)
        said = str(raised.value)
        assert said.startswith(f"--host {host}: the token would cross the network unencrypted")
        assert all(choice in said for choice in ("--tls-cert", "--tls-key", "--insecure", "ssh -L"))
        assert "\n" not in said
    plain = ListenAddress(host, insecure=True)
    assert plain.token and not plain.uses_tls
    secure = ListenAddress(host, tls_cert=own.cert, tls_key=own.key)
    assert secure.token and secure.uses_tls
    assert secure.token != plain.token
    assert secure.token not in repr(secure)
    assert secure.ssl_context().minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_give_no_tls_are_refused_in_one_line(
    own: certificates.Certificate, tmp_path: Path
) -> None:
    other = certificates.self_signed(tmp_path, "other")
    locked = certificates.self_signed(tmp_path, "locked", password="sesame")
    text = tmp_path / "text"
    text.write_text("no certificate")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": own.cert}, "--tls-cert needs --tls-key"),
        ({"tls_key": own.key}, "--tls-key needs --tls-cert"),
        ({"tls_cert": own.cert, "tls_key": own.key, "insecure": True}, "leave one out"),
        ({"tls_cert": "/nowhere", "tls_key": own.key}, "--tls-cert /nowhere: No such file"),
        ({"tls_cert": own.cert, "tls_key": str(tmp_path)}, "Is a directory"),
        ({"tls_cert": str(text), "tls_key": own.key}, "not a certificate in PEM and its key"),
        ({"tls_cert": own.cert, "tls_key": other.key}, "KEY_VALUES_MISMATCH"),
        ({"tls_cert": locked.cert, "tls_key": locked.key}, "is encrypted; decrypt it with"),
        ({"port": 65536}, "--port must be from 0 to 65535, got 65536"),
    ]
    for options, complaint in cases:
        with pytest.raises(ConfigError, match=complaint) as raised:
            ListenAddress("0.0.0.0", **options)
        assert "\n" not in str(raised.value)
