"""Signatures of datasets: a list of SHA-256 digests, signed by ssh-keygen.

Checksums in records detect damage, but an attacker who changes a file can change them, too. A file
for each group of units therefore holds the SHA-256 of its records and of all files that they name.
One list, in the format that `sha256sum --check` reads, holds the SHA-256 of those files and of
everything else that counts, and `ssh-keygen -Y sign` signs that list.
docs/format.md specifies both; anyone can verify them without Spile.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import xxhash

from spile.core.errors import ConfigError, CorruptError, StoreError, printable
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import columns_in, encode_columns, ends_of, ints, run_of
from spile.dataset.format import Done, KeyLayout, Shard
from spile.dataset.maintain.features import listed_records
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records.features import dead_sets, live_sets
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest, named_files
from spile.dataset.records.table import Table, table_records
from spile.objects import Objects, exists

NAMESPACE = "spile"
SIGNERS = Path("~/.ssh/allowed_signers")
_HEADER = "# spile signature 2"
_LINE = re.compile(r"([0-9a-f]{64})  ([!-\[\]-~]+)")  # no space, no backslash: nothing to escape
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk-)[A-Za-z0-9@.-]* [A-Za-z0-9+/=]+")
_KEY_NAME = re.compile(r"SHA256:[A-Za-z0-9+/=]+")
_GROUP = re.compile(r"digests/(\d{6})-[0-9a-f]{32}\.safetensors").fullmatch


class SignedList:
    """The signed list: digests of records and files, by key."""

    def __init__(
        self,
        objects: Objects,
        layout: KeyLayout,
        data: bytes,
        signer: str = "",
        key: str = "",
    ) -> None:
        """Args:
        signer: the name in the file of allowed signers.
        key: SHA256:..., as ssh displays keys.
        """
        self._objects, self._layout = objects, layout
        self.digest, self.signer, self.key = _digest(data), signer, key
        self.fingerprint, self.digests = decode_list(data)
        self._group = lru_cache(4)(self._read_group)
        self._of_groups = {int(match[1]): key for key in self.digests if (match := _GROUP(key))}

    def units_in(self, group: int) -> set[int]:
        """Return the units of a group that are signed."""
        return {*self._group(group)}

    def digests_of(self, done: Done) -> dict[str, str]:
        """Return the SHA-256 of a unit's record and files, by key, as far as they are signed."""
        keys = [self._layout.done_key(done.unit), *(file.key for file in done.files())]
        signed = self._group(self._layout.group(done.unit)).get(done.unit, ())
        return dict(zip(keys, signed, strict=False))

    def _read_group(self, group: int) -> dict[int, list[str]]:
        """Return the digests of a group's units: of the record, then of its files."""
        key = self._of_groups.get(group)
        if key is None:
            return {}
        try:
            data = self._objects.get(key)
        except FileNotFoundError:
            raise CorruptError(key, "is missing") from None
        if _digest(data) != self.digests[key]:
            raise CorruptError(key, "is not the file that was signed")
        columns = columns_in(key, data)
        try:
            units, ends = columns["unit"].tolist(), columns["ends/files"]
            records = [digest.tobytes().hex() for digest in columns["record"]]
            files = [digest.tobytes().hex() for digest in columns["file"]]
            parts = zip(units, records, range(len(units)), strict=True)
            return {unit: [record, *files[run_of(ends, at)]] for unit, record, at in parts}
        except (KeyError, ValueError, IndexError) as error:
            raise CorruptError(key, f"is not a file of digests ({fmt.shown(error)})") from error


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
    layout, count = table.layout, len(table.units)
    manifests = ledger.derived.manifests(table)
    for each in sorted(ledger.derived.unfounded(table, partial(_record, ledger, table))):
        raise CorruptError(each, "does not follow from the done records; see `spile verify`")
    there = ledger.done_units()
    if not there.intersection(range(count)):
        raise StoreError(f"{objects.url}: no unit is done yet; there is nothing to sign")
    counted, columns = _of_features(ledger)
    names = (*_beside(objects, table, manifests), *counted)
    digests = {name: _digest(objects.get(name)) for name in names}
    for name, checksum in columns.items():
        content = objects.get(name)
        if xxhash.xxh3_128_hexdigest(content) != checksum:
            raise CorruptError(name, "checksum does not match (damaged)")
        digests[name] = _digest(content)
    units = files = size = 0
    for group in range(layout.groups(count)):
        wanted = sorted(there.intersection(layout.units_of(group, count)))
        records = list(mapped(partial(_record, ledger, table), wanted, objects.parallel))
        every = [file for done in records for file in done.files()]
        hashed = list[str]()
        for digest in mapped(partial(_hashed, objects), every, objects.parallel):
            hashed.append(digest)
            if progress:
                progress(units * max(1, len(every)) + len(hashed), count * max(1, len(every)))
        data = [objects.get(layout.done_key(done.unit)) for done in records]
        if records:
            name, content = _group_file(group, records, [*map(_digest, data)], hashed)
            objects.create(name, content)
            digests[name] = _digest(content)
        units, files = units + len(records), files + len(every) + len(records)
        size += sum(file.bytes for file in every)
    data = encode_list(table, units, digests)
    signature, name = _signed(program, data, key)
    # In between there is no signature, rather than a wrong one.
    keys = fmt.SIGNATURE, fmt.SIGNED
    for each in keys:
        objects.delete(each)
    for each, content in zip(reversed(keys), (data, signature), strict=True):
        if not objects.create(each, content):
            raise StoreError(f"{objects.url}/{each}: somebody else is signing, too; sign again")
    return Signed(
        url=objects.url,
        units=units,
        units_total=count,
        files=files + len([each for each in digests if not _is_of_unit(each)]),
        bytes=size,
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


def _group_file(
    group: int, records: Sequence[Done], of_records: Sequence[str], of_files: Sequence[str]
) -> tuple[str, bytes]:
    """Return the key and the bytes of the file that holds the digests of a group."""
    content = encode_columns(
        {
            "unit": ints(done.unit for done in records),
            "ends/files": ends_of(len(done.files()) for done in records),
            "record": np.frombuffer(bytes.fromhex("".join(of_records)), np.uint8).reshape(-1, 32),
            "file": np.frombuffer(bytes.fromhex("".join(of_files)), np.uint8).reshape(-1, 32),
        }
    )
    return f"{fmt.DIGESTS}{group:06d}-{_digest(content)[:32]}.safetensors", content


def _beside(objects: Objects, table: Table, manifests: Sequence[Manifest]) -> list[str]:
    """Return the keys of everything to sign that belongs to no single unit."""
    records = (fmt.MODEL, fmt.SCALES, *table_records(table))
    there = [key for key in records if exists(objects, key)]
    return [*there, *sorted(named_files(table, *manifests))]


def _of_features(ledger: Ledger) -> tuple[list[str], dict[str, str]]:
    """Return the keys of records of features, and the files that they name with their checksums.

    Parts that wait for a summary are left out: `gc` removes them once there is one.
    """
    records: list[str] = []
    files: dict[str, str] = {}
    for features, _ in live_sets(ledger):
        listed = replace(listed_records(features), waiting=())
        records += [features.prefix + key for key in listed.own_keys()]
        files |= {features.prefix + file.key: file.digest for file in listed.files()}
    return records, files


def _is_of_unit(key: str) -> bool:
    return key.startswith((fmt.DONE, fmt.ATTEMPTS))


def _record(ledger: Ledger, table: Table, unit: int) -> Done:
    record = ledger.read_done(unit)
    key = table.layout.done_key(unit)
    if record is None:
        raise CorruptError(key, "is missing")
    if record.fingerprint != table.fingerprint:
        raise CorruptError(key, "belongs to another recipe")
    return record


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
    signed, signature = fmt.SIGNATURES
    try:
        data, made = objects.get(signed), objects.get(signature)
    except FileNotFoundError:
        raise StoreError(
            f"{objects.url}: is not signed (no {signature}); `spile sign` does that"
        ) from None
    signer, key = _verified(objects.url, data, made, signers)
    return SignedList(objects, Ledger(objects).layout, data, signer, key)


def decode_list(data: bytes) -> tuple[str, dict[str, str]]:
    """Return the fingerprint and the digests of a list, which must be in canonical form."""
    lines = data.decode("ascii", "replace").split("\n")
    told = re.fullmatch(r"# fingerprint ([0-9a-f]{64})", lines[1] if len(lines) > 1 else "")
    name = fmt.SIGNED
    if lines[0] != _HEADER:
        raise StoreError(
            f"{name}: is not a list that this version of spile knows "
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
        raise CorruptError(name, "is not a list of digests in the order of their keys")
    return told[1], {match[2]: match[1] for match in found if match}


def refuse_another(objects: Objects, table: Table, signed: SignedList) -> None:
    """Refuse the signature of another dataset."""
    if signed.fingerprint != table.fingerprint or _differs(objects, fmt.UNITS, signed.digests):
        raise CorruptError(fmt.SIGNED, f"is the signature of another dataset ({fmt.UNITS} differs)")


def check_beside(objects: Objects, table: Table, signed: SignedList) -> list[str]:
    """Compare everything but units with a list; return the faults.

    Files that were derived later follow from the records, which `verify` checks.
    """
    digests, ledger = signed.digests, Ledger(objects)
    gone = tuple(each.prefix for each in dead_sets(ledger))  # features that were dropped since
    faults = [
        f"{key}: is not the record that was signed"
        for key in digests
        if not _is_of_unit(key) and not key.startswith(gone) and _differs(objects, key, digests)
    ]
    records, _ = _of_features(ledger)  # (their files are audited by these)
    generations = (fmt.generation_key(number + 1) for number in range(len(table.generations)))
    needed = (fmt.MODEL, fmt.SCALES, *generations, *sorted(named_files(table)), *records)
    return faults + [
        f"{key}: is not signed; whoever added it is unknown"
        for key in needed
        if key not in digests and exists(objects, key)
    ]


def check_units(
    table: Table, group: int, records: Sequence[Done], signed: SignedList
) -> tuple[list[str], list[int]]:
    """Compare the records of a group with a list; return the faults, and the units not covered.

    Files of units are checked by whoever reads them.
    """
    layout = table.layout
    there = {done.unit: done for done in records}
    faults = [
        f"{layout.done_key(unit)}: was signed, and is missing or damaged"
        for unit in sorted(signed.units_in(group) - there.keys())
    ]
    unsigned: list[int] = []
    for unit, done in there.items():
        key, digests = layout.done_key(unit), signed.digests_of(done)
        if key not in digests:
            unsigned.append(unit)
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
                f"{url}/{fmt.SIGNATURE}: is not a signature of "
                f"{fmt.SIGNED} ({key}); one of the two was changed"
            )
        allowed = _allowed(signers, Path(folder), key)
        _, found = _run([program, "-Y", "find-principals", "-s", str(path), "-f", str(allowed)])
        for name in re.split(r"[,\n]", found):  # (a line may name several, and patterns)
            verify = [program, "-Y", "verify", "-f", str(allowed), "-I", name, "-n", NAMESPACE]
            if _run([*verify, "-s", str(path)], data)[0] == 0:
                return printable(name), key
    raise StoreError(
        f"{url}: is signed with {key}, which {signers or SIGNERS} does not allow; compare "
        "the key with its owner's, then add it there"
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
