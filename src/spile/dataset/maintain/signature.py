"""Signatures: who vouches for a dataset, by a list of SHA-256 digests and ssh-keygen.

Checksums in records detect damage, but an attacker who changes a file can change them, too. One
list therefore holds the SHA-256 of every record and of every file of every unit, in the format that
`sha256sum --check` reads, and `ssh-keygen -Y sign` signs that list. docs/format.md specifies its
contents; anyone can verify both without Spile.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.core.errors import ConfigError, CorruptError, StoreError, printable
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, Shard
from spile.dataset.ledger import Ledger, Table, derive_manifest
from spile.dataset.read.checked_file import CheckedFile
from spile.objects import Objects, exists

NAMESPACE = "spile"
SIGNERS = Path("~/.ssh/allowed_signers")
_HEADER = "# spile signature 1"
_LINE = re.compile(r"([0-9a-f]{64})  ([!-\[\]-~]+)")  # no space, no backslash: nothing to escape
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk-)[A-Za-z0-9@.-]* [A-Za-z0-9+/=]+")
_KEY_NAME = re.compile(r"SHA256:[A-Za-z0-9+/=]+")
_BESIDE = {fmt.MODEL: "model", fmt.SCALES: "scales", fmt.MANIFEST: "manifest"}


@dataclass(frozen=True)
class SignedList:
    """The signed list: digests of records and files, by key."""

    data: bytes
    fingerprint: str
    digests: Mapping[str, str]
    signer: str = ""  # the name in the file of allowed signers
    key: str = ""  # SHA256:..., as ssh displays keys

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def covers(self, unit: int) -> bool:
        return fmt.done_key(unit) in self.digests


@dataclass(frozen=True)
class Signed:
    """The result of `sign`."""

    url: str
    units: int
    units_total: int
    files: int  # including records
    bytes: int  # total size of the units' files
    key: str


# -- signing ---------------------------------------------------------------------------------


def sign(
    objects: Objects, key: Path, *, progress: Callable[[int, int], None] | None = None
) -> Signed:
    """Sign every unit that is done. An earlier signature is replaced.

    Every file is compared with its record as it is hashed: damaged files are not signed.

    Args:
        key: an ssh private key, or the public key of one that an agent holds.
    """
    program = _ssh_keygen()
    if not key.is_file():
        raise ConfigError(f"--key {key}: no such file; `ssh-keygen -t ed25519 -f {key}` makes one")
    ledger = Ledger(objects)
    table = ledger.table()
    records = _records(ledger, table)
    digests = {fmt.UNITS: _digest(objects.get(fmt.UNITS))}
    for name, kind in _BESIDE.items():
        if exists(objects, name):
            data = objects.get(name)
            body = fmt.decode_record(name, data, kind)
            if name == fmt.MANIFEST and body != derive_manifest(table, records):
                raise CorruptError(
                    name, "does not follow from the done records; see `spile verify`"
                )
            digests[name] = _digest(data)
    for done in records:
        data = objects.get(fmt.done_key(done.unit))
        digests[fmt.done_key(done.unit)] = _digest(data)
    files = [file for done in records for file in done.files()]
    hashed = mapped(lambda file: _hashed(objects, file), files, objects.parallel)
    for number, (file, digest) in enumerate(zip(files, hashed, strict=True)):
        digests[file.key] = digest
        if progress:
            progress(number + 1, len(files))
    data = encode_list(table, len(records), digests)
    signature, name = _signed(program, data, key)
    # In between there is no signature, rather than a wrong one.
    for each in (fmt.SIGNATURE, fmt.SIGNED):
        objects.delete(each)
    for each, content in ((fmt.SIGNED, data), (fmt.SIGNATURE, signature)):
        if not objects.create(each, content):
            raise StoreError(f"{objects.url}/{each}: somebody else is signing, too; sign again")
    return Signed(
        url=objects.url,
        units=len(records),
        units_total=len(table.units),
        files=len(digests),
        bytes=sum(file.bytes for file in files),
        key=name,
    )


def encode_list(table: Table, units: int, digests: Mapping[str, str]) -> bytes:
    """Return the bytes to sign."""
    head = [
        _HEADER,
        f"# fingerprint {table.fingerprint}",
        f"# units {units} of {len(table.units)}",
    ]
    lines = [f"{digests[key]}  {key}" for key in sorted(digests)]
    return "".join(f"{line}\n" for line in [*head, *lines]).encode("ascii")


def _records(ledger: Ledger, table: Table) -> list[Done]:
    done = ledger.done_units()
    units = [int(unit["id"]) for unit in table.units if int(unit["id"]) in done]
    if not units:
        raise StoreError(f"{ledger.objects.url}: no unit is done yet; there is nothing to sign")
    found = mapped(ledger.read_done, units, ledger.objects.parallel)
    records = [record for record in found if record is not None]
    for record in records:
        if record.fingerprint != table.fingerprint:
            raise CorruptError(fmt.done_key(record.unit), "belongs to another recipe")
    return records


def _hashed(objects: Objects, file: Shard) -> str:
    digest = hashlib.sha256()
    for piece in CheckedFile(objects, file).pieces():
        digest.update(piece)
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- verifying -------------------------------------------------------------------------------


def read_signed(objects: Objects, signers: Path | None = None) -> SignedList:
    """Read the list, and check that an allowed signer has signed it.

    Args:
        signers: a file of allowed signers, as ssh-keygen reads it, or a public key
            [~/.ssh/allowed_signers].

    Raises:
        StoreError: if there is no valid signature of an allowed signer.
    """
    try:
        data, signature = objects.get(fmt.SIGNED), objects.get(fmt.SIGNATURE)
    except FileNotFoundError:
        raise StoreError(
            f"{objects.url}: is not signed (no {fmt.SIGNATURE}); `spile sign` does that"
        ) from None
    signer, key = _verified(objects.url, data, signature, signers)
    fingerprint, digests = decode_list(data)
    return SignedList(data, fingerprint, digests, signer, key)


def decode_list(data: bytes) -> tuple[str, dict[str, str]]:
    """Return the fingerprint and the digests of a list, which must be in canonical form."""
    lines = data.decode("ascii", "replace").split("\n")
    told = re.fullmatch(r"# fingerprint ([0-9a-f]{64})", lines[1] if len(lines) > 1 else "")
    if lines[0] != _HEADER:
        raise StoreError(
            f"{fmt.SIGNED}: is not a list that this version of spile knows "
            f"({fmt.shown(lines[0][:40])!r}, expected {_HEADER!r})"
        )
    found = [_LINE.fullmatch(line) for line in lines[3:-1]]
    keys = [match[2] for match in found if match]
    told_units = re.fullmatch(r"# units \d+ of \d+", lines[2] if len(lines) > 2 else "")
    if (
        not (told and told_units)
        or lines[-1]
        or len(keys) < len(found)
        or keys != sorted(set(keys))
    ):
        raise CorruptError(fmt.SIGNED, "is not a list of digests in the order of their keys")
    return told[1], {match[2]: match[1] for match in found if match}


def check_listed(
    objects: Objects, table: Table, records: Sequence[Done], signed: SignedList
) -> tuple[list[str], list[int]]:
    """Compare records with a list; return the faults, and the units that it does not cover.

    Files of units are checked by whoever reads them. The manifest follows from the records, so it
    may be newer than the signature.
    """
    digests = signed.digests
    if signed.fingerprint != table.fingerprint or _differs(objects, fmt.UNITS, digests):
        return [f"{fmt.SIGNED}: is the signature of another dataset ({fmt.UNITS} differs)"], []
    faults = [
        f"{key}: is not the record that was signed"
        for key in _BESIDE
        if key in digests and _differs(objects, key, digests)
    ]
    faults += [
        f"{key}: is not signed; whoever added it is unknown"
        for key in (fmt.MODEL, fmt.SCALES)
        if key not in digests and exists(objects, key)
    ]
    there = {fmt.done_key(done.unit): done for done in records}
    for key in digests:
        if fmt.parse_done_key(key) is not None and key not in there:
            faults.append(f"{key}: was signed, and is missing or damaged")
    unsigned: list[int] = []
    for key, done in there.items():
        if key not in digests:
            unsigned.append(done.unit)
        elif _digest(fmt.encode_record("done", done.to_json())) != digests[key]:
            faults.append(f"{key}: is not the record that was signed")
        else:
            faults += [
                f"{file.key}: is not signed, but the record that names it is"
                for file in done.files()
                if file.key not in digests
            ]
    return faults, unsigned


def _differs(objects: Objects, key: str, digests: Mapping[str, str]) -> bool:
    try:
        return _digest(objects.get(key)) != digests.get(key)
    except FileNotFoundError:
        return True


# -- ssh-keygen ------------------------------------------------------------------------------


def _ssh_keygen() -> str:
    found = shutil.which("ssh-keygen")
    if found is None:
        raise ConfigError(
            "signatures need ssh-keygen, which is not installed: install OpenSSH 8.2 or later "
            "(Debian: apt install openssh-client)"
        )
    return found


def _run(command: Sequence[str], given: bytes = b"") -> tuple[int, str]:
    """Run a command; return its exit code and its output."""
    done = subprocess.run(
        command,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace").strip()


def _last_line(said: str) -> str:
    return printable((said.splitlines() or ["it said nothing"])[-1])


def _signed(program: str, data: bytes, key: Path) -> tuple[bytes, str]:
    """Return the signature, and the fingerprint of the key."""
    with tempfile.TemporaryDirectory(prefix="spile-sign-") as folder:
        path = Path(folder, fmt.SIGNED)
        path.write_bytes(data)
        # (ssh-keygen asks for a passphrase on the terminal itself.)
        code, said = _run([program, "-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(path)])
        made = path.with_name(fmt.SIGNATURE)
        if code or not made.is_file():
            raise ConfigError(f"--key {key}: ssh-keygen does not sign with it ({_last_line(said)})")
        _, told = _check(program, data, made)
        return made.read_bytes(), told


def _check(program: str, data: bytes, signature: Path) -> tuple[bool, str]:
    """Return whether a signature matches the data, and its key; if not, the reason."""
    check = [program, "-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)]
    code, said = _run(check, data)
    found = _KEY_NAME.search(said)
    return code == 0, found[0] if found and code == 0 else _last_line(said)


def _verified(url: str, data: bytes, signature: bytes, signers: Path | None) -> tuple[str, str]:
    """Return the signer and the key."""
    program = _ssh_keygen()
    with tempfile.TemporaryDirectory(prefix="spile-verify-") as folder:
        path = Path(folder, fmt.SIGNATURE)
        path.write_bytes(signature)
        sound, key = _check(program, data, path)
        if not sound:
            raise StoreError(
                f"{url}/{fmt.SIGNATURE}: is not a signature of {fmt.SIGNED} ({key}); one of the "
                "two was changed"
            )
        allowed = _allowed(signers, Path(folder), key)
        _, found = _run([program, "-Y", "find-principals", "-s", str(path), "-f", str(allowed)])
        for name in re.split(r"[,\n]", found):  # (a line may name several, and patterns)
            verify = [program, "-Y", "verify", "-f", str(allowed), "-I", name, "-n", NAMESPACE]
            if _run([*verify, "-s", str(path)], data)[0] == 0:
                return printable(name), key
    raise StoreError(
        f"{url}: is signed with {key}, which {signers or SIGNERS} does not allow; who holds that "
        "key is not known"
    )


def _allowed(signers: Path | None, folder: Path, key: str) -> Path:
    """Return the path of an allowed signers file; one is made from a public key."""
    path = (signers or SIGNERS).expanduser()
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        wanted = "--signers: who may sign" if signers is None else f"--signers {signers}"
        raise ConfigError(
            f"{wanted} ({path}: {error.strerror or error}); a line such as `you@example.org "
            f"ssh-ed25519 AAAA...` names one (this dataset is signed with {key})"
        ) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and _PUBLIC_KEY.match(lines[0]):
        made = folder / "signers"
        made.write_text(f"{path.name} {lines[0]}\n")
        return made
    return path
