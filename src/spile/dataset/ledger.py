"""The records of a dataset: unit table, done records, manifest. Every commit goes through here.

A unit exists when its done record does. Records are created exclusively. A worker that is told that
a record already exists reads it back, because a lost answer to its own request looks the same.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from spile.core.errors import CorruptError, DriftError, NotCreatedError, StoreError
from spile.core.recipe import ResolvedRecipe
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.write.quantization import scales_from_json, scales_to_json
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import Objects, exists
from spile.objects.local import settle


@dataclass(frozen=True)
class Table:
    """The unit table, as stored. `units` and `files` are JSON; corpus/ defines their meaning."""

    recipe: ResolvedRecipe
    fingerprint: str
    taps: Mapping[str, TapInfo]
    files: tuple[Mapping[str, Any], ...]
    units: tuple[Mapping[str, Any], ...]
    kept: float  # the share of tokens that become rows, estimated from a sample
    # For a shuffled dataset (`maintain/shuffle.py`), whose units no longer hold the rows of their
    # own documents: the seed, and the sum of all index entries (`maintain/scatter.py`).
    shuffled: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        body = {
            "recipe": self.recipe.to_json(),
            "fingerprint": self.fingerprint,
            "taps": {name: asdict(info) for name, info in self.taps.items()},
            "files": list(self.files),
            "units": list(self.units),
            "kept": self.kept,
        }
        return {**body, "shuffled": dict(self.shuffled)} if self.shuffled else body

    @property
    def order(self) -> str:
        """The identity of the order of the rows."""
        if not self.shuffled:
            return self.fingerprint
        return f"{self.fingerprint}, shuffled {self.shuffled['seed']} {self.shuffled['drawn']}"


class Ledger:
    """The records of one dataset."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def read_table(self) -> Table | None:
        body = self._read(fmt.UNITS, "units")
        if body is None:
            return None
        try:
            table = Table(
                recipe=ResolvedRecipe.from_json(body["recipe"]),
                fingerprint=body["fingerprint"],
                taps={n: TapInfo.from_json(info) for n, info in body["taps"].items()},
                files=tuple(body["files"]),
                units=tuple(body["units"]),
                kept=float(body["kept"]),
                shuffled=body.get("shuffled"),
            )
            _audit_table(table)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(fmt.UNITS, f"is not a unit table ({fmt.shown(error)})") from error
        return table

    def table(self) -> Table:
        """Return the unit table; raise StoreError if there is no dataset."""
        table = self.read_table()
        if table is None:
            raise StoreError(f"{self.objects.url}: no dataset there (no {fmt.UNITS})")
        return table

    def create_table(self, table: Table) -> Table:
        """Store the table, or return the one that came first."""
        self.objects.create(fmt.UNITS, fmt.encode_record("units", table.to_json()))
        return self.table()

    def check_weights(self, digests: Mapping[str, str]) -> None:
        """Record the weights' full hashes, or compare them with those recorded before."""
        body = {"tensors": dict(sorted(digests.items()))}
        if self.objects.create(fmt.MODEL, fmt.encode_record("model", body)):
            return
        found = self._read(fmt.MODEL, "model")
        if found is None:
            raise self._unreadable(fmt.MODEL)
        record: Any = found.get("tensors", {})
        if not isinstance(record, dict):
            raise CorruptError(fmt.MODEL, "holds no hashes")
        stored = cast(dict[str, Any], record)
        changed = {
            f"weights of {name}": (stored.get(name), digests.get(name))
            for name in sorted({*stored, *digests})
            if stored.get(name) != digests.get(name)
        }
        if changed:
            differences = dict(list(changed.items())[:3])
            raise DriftError(self.objects.url, differences, holds_rows=self.holds_rows())

    def read_scales(self, table: Table) -> dict[str, np.ndarray] | None:
        """Return the scale of each channel, for taps that have them; None if not measured yet."""
        if all(info.scaled_by != "channel" for info in table.taps.values()):
            return {}
        body = self._read(fmt.SCALES, "scales")
        return None if body is None else scales_from_json(body, table.taps)

    def create_scales(self, table: Table, measured: Mapping[str, np.ndarray]) -> None:
        """Store the scales, unless others came first: those apply to every worker."""
        body = scales_to_json(measured)
        scales_from_json(body, table.taps)  # an unreadable record would block every worker forever
        self.objects.create(fmt.SCALES, fmt.encode_record("scales", body))

    def done_units(self) -> set[int]:
        """Return the units that exist, from a listing alone."""
        found = (fmt.parse_done_key(key) for key in self.objects.list(fmt.DONE))
        return {unit for unit in found if unit is not None}

    def read_done(self, unit: int) -> Done | None:
        key = fmt.done_key(unit)
        body = self._read(key, "done")
        if body is None:
            return None
        done = Done.from_json(key, body)
        if done.unit != unit:
            raise CorruptError(key, f"is the record of unit {done.unit}")
        return done

    def holds_rows(self) -> bool:
        """Return whether a committed unit holds a row. An unreadable record counts as one."""
        for unit in sorted(self.done_units()):
            try:
                done = self.read_done(unit)
            except StoreError:
                return True
            if done is not None and done.rows:
                return True
        return False

    def commit(self, done: Done) -> bool:
        """Create the done record; return False if another attempt came first.

        Raises:
            NotCreatedError: if the record was not and will not be created: a file that it would
                name has vanished, or the disk is full.
            StoreError: if the record may exist, now or later.
        """
        key = fmt.done_key(done.unit)
        gone = self.missing_files(done)
        if gone:
            # `gc` deletes the files of an attempt that lost; nothing else may delete them.
            stored = self.read_done(done.unit)
            if stored is not None:
                return stored.attempt == done.attempt
            raise NotCreatedError(
                f"{self.objects.url}/{gone[0]}: vanished before unit {done.unit} was committed; "
                "nothing but spile may delete there (`gc --abandoned` only when nothing runs): "
                "run the same command again"
            )
        if self.objects.create(key, fmt.encode_record("done", done.to_json())):
            return True
        stored = self.read_done(done.unit)
        if stored is None:
            raise self._unreadable(key)
        return stored.attempt == done.attempt

    def missing_files(self, done: Done) -> list[str]:
        """Return the files that a record names but that are missing or of another size."""
        prefix = fmt.attempt_prefix(done.unit, done.attempt)
        sizes = {entry.key: entry.size for entry in self.objects.entries(prefix)}
        return [file.key for file in done.files() if sizes.get(file.key) != file.bytes]

    def complete(self, table: Table) -> bool:
        """Create the manifest if every unit is done; return whether they are.

        A dataset without any row gets no manifest: it is useless to readers, and another recipe may
        replace it.
        """
        if not self.done_units().issuperset(_unit_ids(table)):
            return False
        settle(self.objects, fmt.done_key(0), fmt.MANIFEST)  # makes others' records durable, too
        if not exists(self.objects, fmt.MANIFEST):
            must_be_done = partial(self._must_be_done, table)
            records = mapped(must_be_done, _unit_ids(table), self.objects.parallel)
            manifest = derive_manifest(table, records)
            if manifest["rows"]:
                self.objects.create(fmt.MANIFEST, fmt.encode_record("manifest", manifest))
        return True

    def read_manifest(self) -> dict[str, Any] | None:
        """Return the manifest. Its units have the form of `Done`, and must be checked as such."""
        manifest = self._read(fmt.MANIFEST, "manifest")
        if manifest is not None:
            _audit_manifest(manifest)
        return manifest

    def _must_be_done(self, table: Table, unit: int) -> Done:
        done = self.read_done(unit)
        if done is not None and done.fingerprint != table.fingerprint:
            raise CorruptError(fmt.done_key(unit), "belongs to another recipe")
        if done is None:
            raise CorruptError(fmt.done_key(unit), "is missing")
        return done

    def _unreadable(self, key: str) -> StoreError:
        return StoreError(
            f"{self.objects.url}/{key}: is said to exist, and cannot be read; "
            "run the same command again"
        )

    def _read(self, key: str, kind: str) -> dict[str, Any] | None:
        try:
            data = self.objects.get(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.objects.url}/{key}: {error.strerror or error}") from error
        return fmt.decode_record(key, data, kind)


class Attempt:
    """The files of one attempt at a unit: removed, unless a record may name them.

    A commit that fails or is interrupted may still have created its record, or its request may
    still be on its way to a bucket. Removing the files then would lose a unit that exists. Files
    are therefore removed only in three cases: before the commit begins; when the record has been
    read back and names another attempt; or when it certainly was not created (`NotCreatedError`: a
    full disk). `gc` deletes any remaining files once the unit has a record; before that,
    `gc --abandoned` does. Nobody else calls `Ledger.commit` or `UnitWriter.discard`.

    with Attempt(ledger, writer) as attempt:
        writer.write(...)
        committed = attempt.commit(writer.finish(...))
    """

    def __init__(self, ledger: Ledger, writer: UnitWriter) -> None:
        self.writer, self._ledger = writer, ledger
        self._removable = True

    def commit(self, done: Done) -> bool:
        """Create the done record; if another came first, remove the files and return False."""
        self.release()
        try:
            if self._ledger.commit(done):
                return True
        except NotCreatedError:
            self._remove()
            raise
        self._remove()
        return False

    def release(self) -> None:
        """Keep the files from now on: a record may name them, whoever creates it."""
        self._removable = False

    def discard(self) -> None:
        """Remove the files, unless a record may name them."""
        if self._removable:
            self._removable = False
            self._remove()

    def _remove(self) -> None:
        # Cleaning up must not hide why an attempt ended.
        with contextlib.suppress(OSError, StoreError):
            self.writer.discard()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _audit_table(table: Table) -> None:
    for unit in table.units:
        if not all(fmt.is_count(unit[name]) for name in ("id", "first_doc", "num_docs", "tokens")):
            raise ValueError("a unit has a count that is not a number")
        fmt.doc_runs(unit)
    if not all(isinstance(part, dict) for part in (*table.units, *table.files)):
        raise ValueError("a unit or a file is not an object")
    if not all(map(fmt.is_name, (table.fingerprint, *table.taps))):
        raise ValueError("a name is not a text")
    if table.shuffled is not None:
        told: dict[str, Any] = {**table.shuffled}
        if not fmt.is_count(told["seed"]) or not all(
            map(fmt.is_name, (told["entries"], told["drawn"]))
        ):
            raise ValueError("the order of its rows is invalid")


def _audit_manifest(manifest: Mapping[str, Any]) -> None:
    try:
        counts = [manifest[name] for name in ("rows", "tokens", "documents", "bytes")]
        counts += manifest["skipped"].values()
        units: list[Any] = list(manifest["units"])
        keys = [file["key"] for unit in units for file in fmt.listed_files(unit)]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(fmt.MANIFEST, f"is not a manifest ({fmt.shown(error)})") from error
    named = all(map(fmt.is_name, (*keys, *manifest["skipped"])))
    if not named or not all(map(fmt.is_count, counts)) or not all(type(u) is dict for u in units):
        raise CorruptError(fmt.MANIFEST, "is not a manifest (a count or a name is invalid)")


def _unit_ids(table: Table) -> list[int]:
    return [int(unit["id"]) for unit in table.units]


def derive_manifest(table: Table, records: Iterable[Done]) -> dict[str, Any]:
    """Derive the manifest from the table and the done records alone."""
    units: list[dict[str, Any]] = []
    skipped: dict[str, int] = {}
    for done in records:
        units.append(
            {k: v for k, v in done.to_json().items() if k not in ("made_by", "fingerprint")}
        )
        for reason, count in done.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    manifest = {
        "fingerprint": table.fingerprint,
        "rows": sum(unit["rows"] for unit in units),
        "tokens": sum(unit["tokens"] for unit in units),
        "documents": sum(unit["documents"] for unit in units),
        "bytes": sum(file["bytes"] for unit in units for file in fmt.listed_files(unit)),
        "skipped": skipped,
        "units": units,
    }
    return json.loads(json.dumps(manifest))  # in the form that is read back: lists, not tuples


# -- predictions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The expected size and duration of a run, to compare with the actual ones.

    The first worker writes it, create-only, once its first steps have shown their speed. It is for
    people only: nothing else reads it, and a dataset without one is complete.
    """

    tokens: int
    rows: int
    bytes: int
    seconds: float | None  # for one slice like the first; None if its run was too short
    device: str
    mesh: str

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Prediction":
        try:
            found = cls(**body)
        except TypeError as error:
            raise CorruptError(fmt.PREDICTION, f"is none ({fmt.shown(error)})") from error
        counts = all(map(fmt.is_count, (found.tokens, found.rows, found.bytes)))
        if not counts or not all(map(fmt.is_name, (found.device, found.mesh))):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (a count or a name is invalid)")
        if found.seconds is not None and not fmt.is_amount(found.seconds):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (its seconds are not a number)")
        return found


def read_prediction(objects: Objects) -> Prediction | None:
    """Return the prediction; None if there is none or it is damaged (`verify` reports that)."""
    with contextlib.suppress(OSError, StoreError):
        data = objects.get(fmt.PREDICTION)
        return Prediction.from_json(fmt.decode_record(fmt.PREDICTION, data, "prediction"))
    return None


def create_prediction(objects: Objects, made: Prediction) -> None:
    """Store the prediction unless another came first. Errors are ignored."""
    with contextlib.suppress(StoreError):
        objects.create(fmt.PREDICTION, fmt.encode_record("prediction", asdict(made)))
