"""The address a server listens on: who can reach it, the token it requires, and its TLS.

On loopback nothing leaves the machine. On any other address every request carries a token, which
must not cross a network in clear text: such a server needs a certificate, or an explicit waiver.
"""

import ipaddress
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from spile.core.errors import ConfigError


@dataclass(frozen=True)
class ListenAddress:
    """The address of a server, and the credentials it uses.

    Attributes:
        host: a name or an address.
        port: 0 takes any free port.
        token: the token that clients must send; generated if none is given and the host is not
            loopback.
        tls_cert: a PEM file with the server's certificate, then those that signed it.
        tls_key: a PEM file with the certificate's key, unencrypted.
        insecure: whether the token may cross a network unencrypted.

    Raises:
        ConfigError: if the token would cross a network unencrypted, or the files are not usable.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, other = ("cert", "key") if self.tls_cert else ("key", "cert")
            raise ConfigError(f"--tls-{given} needs --tls-{other}: TLS takes both files")
        if self.tls_cert and self.insecure:
            raise ConfigError("--insecure means no TLS, and --tls-cert gives it: leave one out")
        if self.tls_cert:
            self.ssl_context()  # report problems with the files before anything is opened
        elif not self.is_loopback and not self.insecure:
            raise ConfigError(
                f"--host {self.host}: the token would cross the network unencrypted; give "
                "--tls-cert FILE --tls-key FILE, or --insecure if the network is trusted, or "
                "listen on 127.0.0.1 and connect through `ssh -L`"
            )
        if self.token is None and not self.is_loopback:
            object.__setattr__(self, "token", secrets.token_urlsafe(24))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def uses_tls(self) -> bool:
        return self.tls_cert is not None

    @property
    def in_url(self) -> str:
        """The host as it is written in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def is_anywhere(self) -> bool:
        """Whether the host means every address of this machine; clients cannot connect to it."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return self.host == ""

    @property
    def openable(self) -> str:
        """A host that others can connect to, as it is written in a URL.

        If the host means every address of this machine, the result is the machine's name if TLS is
        used, since certificates hold names, and otherwise the address of its outgoing connections.
        No name server is queried.
        """
        if not self.is_anywhere:
            return self.in_url
        if self.uses_tls:
            return socket.gethostname()
        family, elsewhere = socket.AF_INET, "192.0.2.1"  # an address reserved for documentation
        if ":" in self.host:
            family, elsewhere = socket.AF_INET6, "2001:db8::1"
        with socket.socket(family, socket.SOCK_DGRAM) as found:
            try:
                found.connect((elsewhere, 9))  # on a datagram socket this sends nothing
                address = str(found.getsockname()[0])
            except OSError:  # no network
                return "localhost"
        return f"[{address}]" if ":" in address else address

    def ssl_context(self) -> ssl.SSLContext:
        """Return a server-side TLS context, for TLS 1.2 or later."""
        assert self.tls_cert and self.tls_key
        for flag, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=self._refuse_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {self.tls_cert} --tls-key {self.tls_key}: not a certificate in PEM "
                f"and its key ({getattr(error, 'reason', None) or error})"
            ) from None
        return context

    def pem(self) -> tuple[bytes, bytes]:
        """Return the contents of the certificate file and of the key file."""
        assert self.tls_cert and self.tls_key
        return Path(self.tls_cert).read_bytes(), Path(self.tls_key).read_bytes()

    def _refuse_password(self) -> str:
        raise ConfigError(
            f"--tls-key {self.tls_key}: is encrypted; decrypt it with "
            "`openssl pkey -in FILE -out PLAIN`"
        )


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
