"""Self-signed certificates for the servers of tests, made by openssl."""

import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    cert: str
    key: str

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", self.cert, "--tls-key", self.key)


def self_signed(folder: Path, name: str = "server", *, password: str = "") -> Certificate:
    """For localhost, its addresses and this machine's name; with a password, the key is
    encrypted."""
    names = f"DNS:localhost,DNS:{socket.gethostname()},IP:127.0.0.1,IP:0.0.0.0"
    made = Certificate(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-days", "2", "-subj", f"/CN={name}", "-out", made.cert, "-keyout", made.key,
         "-addext", f"subjectAltName={names}",
         *(["-passout", f"pass:{password}"] if password else ["-nodes"])],
        check=True, capture_output=True,
    )  # fmt: skip
    return made
