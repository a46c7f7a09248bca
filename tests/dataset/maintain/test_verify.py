"""Verify finds every change to any object, and names that object."""

import dataclasses
import shutil
import struct
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import CorruptError
from spile.core.tensors import DTYPES_BY_NAME, build_header
from spile.dataset import format as fmt
from spile.dataset.codec.columns import encode_columns
from spile.dataset.codec.quantization import scales_to_json
from spile.dataset.codec.shard import ShardWriter, open_tensor, read_shard_header, read_tensors
from spile.dataset.format import Shard
from spile.dataset.maintain.verify import Journal, Report, verify
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.segments import columns_of
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import LocalObjects
from support import stored

TAPS = {"resid_post.0": 4, "mlp_out.1": 2}
# The first two units have as many rows, so that their files and records are of equal size.
UNITS = ((5, 9), (9, 5), (0, 3))


def build(path: Path, **options: Any) -> stored.Stored:
    return stored.copied(path, **{"units": UNITS, "taps": TAPS, "shard_bytes": 128, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    """A finished dataset with a worker's record and a check; tests undo their changes."""
    dataset = build(tmp_path_factory.mktemp("verify") / "out")
    presence = Presence(dataset.objects, 30)
    presence.start()
    presence.close("done")
    assert dataset.listed(fmt.WORKERS)
    dataset.objects.create(fmt.CHECK, fmt.encode_record("check", {"ok": True, "taps": {}}))
    return dataset


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return build(tmp_path / "out")


def named(report: Report, key: str) -> bool:
    return not report.ok and any(key in fault for fault in report.faults)


def test_a_sound_dataset_is_found_sound(whole: stored.Stored) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(whole.objects, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and report.faults == [] and report.orphans == []
    assert (report.units, report.units_done, report.absent) == (3, 3, 0)
    assert report.rows == len(whole.index) == 31
    assert report.bytes == sum(whole.objects.size(k) for k in whole.listed(fmt.ATTEMPTS))
    assert seen == [(0, 3), (1, 3), (2, 3)]


# -- damaged objects -------------------------------------------------------------------------


@pytest.fixture
def every(pytestconfig: pytest.Config) -> int:
    """One byte in so many is flipped in the suite, and every byte with --chaos-full."""
    return 1 if pytestconfig.getoption("--chaos-full") else 29


def apart(dataset: stored.Stored) -> list[list[str]]:
    """All objects, in groups that are judged member by member, so that all are damaged at once."""
    records = dataset.listed(fmt.DONE, fmt.WORKERS, fmt.MODEL, fmt.CHECK)
    derived = dataset.listed(fmt.MANIFEST_COLUMNS)
    return [
        [fmt.UNITS],
        dataset.listed(fmt.UNIT_COLUMNS),
        records,
        [fmt.MANIFEST, *dataset.listed(fmt.ATTEMPTS)],
        *([key] for key in (*derived, *dataset.listed(fmt.SEGMENTS))),
    ]


def each_found(dataset: stored.Stored, places: dict[str, list[int]]) -> None:
    """Flip the bytes of each object in turn, of all objects at once: each is to be named."""
    with stored.changed(dataset, *places) as paths:
        for step in range(max(map(len, places.values()))):
            flips = [(path, places[key][step % len(places[key])]) for key, path in paths.items()]
            for path, position in flips:
                stored.flip(path, position, 1 << step % 8)
            report = verify(dataset.objects)
            assert all(named(report, key) for key in places), [position for _, position in flips]
            for path, position in flips:
                stored.flip(path, position, 1 << step % 8)


def each_found_replaced(
    dataset: stored.Stored, keys: list[str], contents: Callable[[bytes], list[bytes]]
) -> None:
    """Replace the content of all objects at once, by one thing after the other."""
    with stored.changed(dataset, *keys) as paths:
        replaced = {key: contents(path.read_bytes()) for key, path in paths.items()}
        for number, _ in enumerate(replaced[keys[0]]):
            for key, path in paths.items():
                path.write_bytes(replaced[key][number])
            report = verify(dataset.objects)
            for key in keys:
                assert named(report, f"{key}: "), (key, number)


def test_a_flipped_byte_is_found_in_every_object(whole: stored.Stored) -> None:
    assert sorted(sum(apart(whole), [])) == whole.listed()
    for keys in apart(whole):
        places: dict[str, list[int]] = {}
        for key in keys:
            size = whole.objects.size(key)
            spread = np.linspace(0, size - 1, 7).astype(int).tolist()
            ends = [7, 8, 60, 4000, 4095, 4096, size - 2]  # header, padding, first and last
            places[key] = [*spread, *(p for p in ends if p < size)]
        each_found(whole, places)


@pytest.mark.varied
def test_every_byte_of_every_record_counts(whole: stored.Stored, every: int) -> None:
    for keys in apart(whole)[:2]:
        each_found(whole, {key: list(range(0, whole.objects.size(key), every)) for key in keys})


@pytest.mark.varied
def test_every_byte_of_the_manifest_and_of_every_shard_counts(
    whole: stored.Stored, every: int
) -> None:
    places = {fmt.MANIFEST: list(range(0, whole.objects.size(fmt.MANIFEST), 4 * every))}
    for key in whole.listed(fmt.ATTEMPTS):
        size = whole.objects.size(key)
        # the header's text, some of the padding, and all the rows
        places[key] = [*range(420), *range(420, 4096, 97), *range(4096, size)][::every]
    each_found(whole, places)


def test_a_truncated_object_is_found(whole: stored.Stored) -> None:
    for keys in apart(whole):
        each_found_replaced(
            whole, keys, lambda data: [data[:n] for n in (0, 1, len(data) // 2, len(data) - 1)]
        )


def test_an_extended_object_is_found(whole: stored.Stored) -> None:
    for keys in apart(whole):
        each_found_replaced(
            whole, keys, lambda data: [data + extra for extra in (b"\0", b"\n", data)]
        )


def test_a_deleted_object_is_found(whole: stored.Stored) -> None:
    # heartbeats may come and go; the manifest has a test of its own
    for prefix in (fmt.UNITS, fmt.MODEL, fmt.DONE, fmt.ATTEMPTS):
        keys = whole.listed(prefix)
        with stored.changed(whole, *keys) as paths:
            for path in paths.values():
                path.unlink()
            report = verify(whole.objects)
            assert all(named(report, key) for key in keys), report.faults


def test_a_deleted_manifest_is_found(dataset: stored.Stored) -> None:
    dataset.objects.delete(fmt.MANIFEST)
    assert named(verify(dataset.objects), fmt.MANIFEST)
    assert verify(dataset.objects, partial=True).ok


def test_a_record_of_another_kind_in_the_place_of_the_check_is_found(
    dataset: stored.Stored,
) -> None:
    dataset.objects.create(fmt.CHECK, dataset.objects.get(fmt.MODEL))
    assert named(verify(dataset.objects), f"{fmt.CHECK}: holds a 'model' record")


def test_two_objects_of_equal_size_in_each_others_place_are_found(whole: stored.Stored) -> None:
    swapped: set[str] = set()
    for a, b in combinations(whole.listed(fmt.DONE, fmt.ATTEMPTS), 2):
        first, second = whole.objects.get(a), whole.objects.get(b)
        if len(first) != len(second) or first == second:
            continue
        with stored.changed(whole, a, b) as paths:
            paths[a].write_bytes(second)
            paths[b].write_bytes(first)
            report = verify(whole.objects)
            assert named(report, a) and named(report, b), (a, b)
        swapped |= {a.rpartition("/")[2], b.rpartition("/")[2]}
    assert {"index.safetensors", "00000000.json", "mlp_out.1.00000.safetensors"} <= swapped


def test_only_the_damaged_file_is_blamed(whole: stored.Stored) -> None:
    for key in whole.listed(fmt.ATTEMPTS):
        with stored.changed(whole, key) as paths:
            stored.flip(paths[key], 4096)
            (fault,) = verify(whole.objects).faults
            assert fault.startswith(f"{key}: ")


def test_a_file_that_cannot_be_read_is_found(dataset: stored.Stored) -> None:
    path = dataset.path / dataset.done(0).shards[0].key
    path.unlink()
    path.symlink_to(path)  # reading it fails with ELOOP, as a bad disk would with EIO
    assert named(verify(dataset.objects), dataset.done(0).shards[0].key)


def test_a_folder_replaced_by_a_file_is_found(dataset: stored.Stored) -> None:
    key = dataset.done(1).index.key
    folder = (dataset.path / key).parent
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    assert named(verify(dataset.objects), key)


# -- records that do not fit together --------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_a_missing_done_record_under_a_manifest_is_found(
    dataset: stored.Stored, partial: bool
) -> None:
    dataset.objects.delete(fmt.CURRENT.done_key(1))
    report = verify(dataset.objects, partial=partial)
    assert any(
        f.startswith("manifest.json") and fmt.CURRENT.done_key(1) in f for f in report.faults
    )


class Finishing(LocalObjects):
    """A dataset whose last unit another process commits once it was not found."""

    def __init__(self, made: stored.Stored, last: int) -> None:
        super().__init__(made.path)
        self._made, self._last = made, last

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        except FileNotFoundError:
            if key == self._made.ledger.layout.done_key(self._last):
                self._made.ledger.commit(self._made.attempt(self._last))
                assert self._made.ledger.complete(self._made.table)
            raise


def test_what_is_derived_while_an_audit_runs_is_no_fault(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", UNITS, commit=[0, 1])
    report = verify(Finishing(made, 2), partial=True)
    assert (report.ok, report.missing) == (True, [2]), report.faults
    assert made.listed(fmt.SEGMENTS, fmt.MANIFEST)[0] == fmt.MANIFEST
    report = verify(made.objects)
    assert report.ok and not report.missing


def test_units_not_done_are_a_fault_unless_partial(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(1,))
    assert verify(dataset.objects).faults == ["2 of 3 units are not done"]
    report = verify(dataset.objects, partial=True)
    assert report.ok
    assert (report.units, report.units_done, report.absent, report.rows) == (3, 1, 2, 14)
    key = dataset.done(1).shards[0].key
    stored.flip(dataset.path / key, 4100)
    assert named(verify(dataset.objects, partial=True), key), "damage is a fault all the same"


def test_another_units_record_is_found(dataset: stored.Stored) -> None:
    (dataset.path / fmt.CURRENT.done_key(1)).write_bytes(
        dataset.objects.get(fmt.CURRENT.done_key(0))
    )
    assert named(verify(dataset.objects), f"{fmt.CURRENT.done_key(1)}: is the record of unit 0")


def test_a_record_of_a_unit_that_does_not_exist_is_found(dataset: stored.Stored) -> None:
    dataset.objects.create(fmt.CURRENT.done_key(3), dataset.objects.get(fmt.CURRENT.done_key(0)))
    assert named(verify(dataset.objects), fmt.CURRENT.done_key(3))


def test_a_unit_of_another_recipe_is_found(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1))
    dataset.ledger.commit(dataset.attempt(2, fingerprint="another"))
    assert named(verify(dataset.objects), f"{fmt.CURRENT.done_key(2)}: belongs to another recipe")


@pytest.mark.parametrize(
    "edit",
    [
        lambda table, units: dataclasses.replace(
            table, recipe=dataclasses.replace(table.recipe, seq_len=16)
        ),
        lambda table, units: with_units(table, units[1:]),
        lambda table, units: with_units(table, units[::-1]),
        lambda table, units: with_units(
            table, [units[0], dataclasses.replace(units[1], first_doc=3), *units[2:]]
        ),
    ],
    ids=["recipe", "unit lost", "units reordered", "documents lost"],
)
def test_a_table_that_contradicts_itself_is_found(
    dataset: stored.Stored, edit: Callable[[Table, list[Any]], Table]
) -> None:
    stored.replace_table(dataset.objects, edit(dataset.table, list(dataset.table.units)))
    assert named(verify(dataset.objects), fmt.UNITS)


def test_a_manifest_that_does_not_follow_from_the_records_is_found(dataset: stored.Stored) -> None:
    path = dataset.path / fmt.MANIFEST
    body = fmt.decode_record(fmt.MANIFEST, path.read_bytes(), "manifest")
    path.write_bytes(fmt.encode_record("manifest", {**body, "tokens": body["tokens"] + 1}))
    assert named(verify(dataset.objects), fmt.MANIFEST)


def test_a_segment_that_does_not_follow_from_the_records_is_found(dataset: stored.Stored) -> None:
    again = dataset.attempt(1, contexts=99)
    columns = columns_of([dataset.done(0), again, dataset.done(2)])
    found = read_tensors(dataset.objects, fmt.CURRENT.segment_key(0))
    (dataset.path / fmt.CURRENT.segment_key(0)).unlink()
    dataset.objects.create(fmt.CURRENT.segment_key(0), encode_columns({**found, **columns}))
    for quick in (False, True):
        assert named(verify(dataset.objects, quick=quick), fmt.CURRENT.segment_key(0))


def test_segment_statistics_that_differ_from_their_units_are_found(
    dataset: stored.Stored,
) -> None:
    edit(dataset, fmt.CURRENT.segment_key(0), "mlp_out.1/mean", 0, 7.0)
    assert named(verify(dataset.objects), fmt.CURRENT.segment_key(0))


# -- content that is wrong behind checksums that are right -----------------------------------


def with_units(table: Table, units: list[Any]) -> Table:
    numbered = [dataclasses.replace(unit, id=number) for number, unit in enumerate(units)]
    return dataclasses.replace(table, units=UnitColumns.of(numbered))


def edit(dataset: stored.Stored, key: str, name: str, row: int, value: Any) -> None:
    """Set one value of a stored tensor."""
    info = read_shard_header(dataset.objects, key)[name]
    np.memmap(dataset.path / key, info.dtype, "r+", info.start, info.shape)[row] = value


@pytest.mark.parametrize("dtype", [*stored.DTYPE_NAMES, "float8_e4m3"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_planted_nan_is_counted(tmp_path: Path, dtype: str, value: float) -> None:
    dataset = build(tmp_path / "out", dtype=dtype)
    shard = dataset.done(1).shards[-1]
    edit(dataset, shard.key, shard.tap, -1, value)
    stored.reseal(dataset, 1)
    (fault,) = verify(dataset.objects).faults
    assert "unit 1" in fault and shard.tap in fault and "not finite" in fault


@pytest.mark.parametrize("dtype", ["float32", *stored.SCALED_NAMES])
def test_a_nan_that_was_kept_on_purpose_is_no_fault(tmp_path: Path, dtype: str) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1), dtype=dtype)
    dataset.rows["mlp_out.1"][-1, 0] = np.nan
    if dtype != "float32":  # int8 has nothing to say it with, but statistics count it
        dataset.coded["mlp_out.1"].codes[-1, 0] = np.nan if dtype != "int8" else 0
    dataset.ledger.commit(dataset.attempt(2))
    assert dataset.ledger.complete(dataset.table)
    assert verify(dataset.objects).ok


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("doc", 2, "outside its unit"), ("doc", -1, "outside its unit"), ("doc", 0, "doubled"),
     ("offset", 100, "missing or doubled"), ("offset", 3, "missing or doubled")],
)  # fmt: skip
def test_an_index_that_cannot_be_is_found(
    dataset: stored.Stored, column: str, value: int, reason: str
) -> None:
    index = dataset.index[dataset.starts[0] : dataset.starts[1]]
    row = int(np.flatnonzero((index["doc"] == 1) & (index["offset"] == 8))[0])
    edit(dataset, dataset.done(0).index.key, column, row, value)
    stored.reseal(dataset, 0)
    assert any(
        dataset.done(0).index.key in f and reason in f for f in verify(dataset.objects).faults
    )


@pytest.mark.parametrize("changes", [{"documents": 1}, {"skipped": {"no tokens": 1}}])
def test_documents_that_do_not_add_up_are_found(
    dataset: stored.Stored, changes: dict[str, Any]
) -> None:
    stored.reseal(dataset, 0, **changes)
    assert named(verify(dataset.objects), "document")


def test_a_unit_without_one_of_the_taps_is_found(dataset: stored.Stored) -> None:
    shards = tuple(s for s in dataset.done(0).shards if s.tap == "mlp_out.1")
    stored.reseal(dataset, 0, shards=shards)
    assert named(verify(dataset.objects), fmt.CURRENT.done_key(0))


def test_statistics_of_other_rows_are_found(dataset: stored.Stored) -> None:
    edit(dataset, dataset.done(0).statistics.key, "mlp_out.1/count", 0, 13)
    stored.reseal(dataset, 0)
    assert named(verify(dataset.objects), dataset.done(0).statistics.key)


@pytest.mark.parametrize("damage", ["another tap's rows", "no header", "nothing of it"])
@pytest.mark.parametrize("victim", ["shard", "index", "statistics"])
def test_a_file_that_is_not_what_its_record_says_is_found(
    dataset: stored.Stored, victim: str, damage: str
) -> None:
    done = dataset.done(0)
    key = {"shard": done.shards[0], "index": done.index, "statistics": done.statistics}[victim].key
    content = {
        "another tap's rows": dataset.objects.get(done.shards[-1].key),
        "no header": b"\0" + dataset.objects.get(key)[1:],
        "nothing of it": b"",
    }
    (dataset.path / key).write_bytes(content[damage])
    stored.reseal(dataset, 0)
    assert named(verify(dataset.objects), key)


# -- taps of other shapes --------------------------------------------------------------------


@pytest.fixture
def shaped(tmp_path: Path) -> stored.Stored:
    return build(tmp_path / "out", taps=stored.SHAPED)


def test_taps_of_any_shape_and_dtype_are_found_sound(shaped: stored.Stored) -> None:
    report = verify(shaped.objects)
    assert (report.faults, report.orphans, report.rows) == ([], [], 31)


def retyped(dataset: stored.Stored, shard: Shard, dtype: str, shape: tuple[int, ...]) -> None:
    """Change the description of a shard's bytes, but none of the bytes."""
    path = dataset.path / shard.key
    data = path.read_bytes()
    start = read_shard_header(dataset.objects, shard.key)[shard.tap].start
    path.write_bytes(build_header([(shard.tap, DTYPES_BY_NAME[dtype], shape)]) + data[start:])
    stored.reseal(dataset, 0)


@pytest.mark.parametrize(
    ("tap", "dtype", "shape"),
    [
        ("q.1", "bfloat16", (6,)),
        ("q.1", "bfloat16", (3, 2)),
        ("q.1", "bfloat16", (2, 3, 1)),
        ("q.1", "float16", (2, 3)),
        ("resid_post.0", "float32", (2, 3)),
        ("resid_post.0", "int32", (6,)),
        ("expert_ids.1", "uint16", (2,)),
        ("expert_ids.1", "bfloat16", (2,)),
        ("logprob", "float32", (1,)),
        ("logprob", "int32", ()),
    ],
)
def test_a_shard_of_another_shape_or_dtype_is_found(
    shaped: stored.Stored, tap: str, dtype: str, shape: tuple[int, ...]
) -> None:
    shard = next(shard for shard in shaped.done(0).shards if shard.tap == tap)
    retyped(shaped, shard, dtype, (shard.count, *shape))
    faults = verify(shaped.objects).faults
    assert any(fault.startswith(f"{shard.key}: does not hold") for fault in faults), faults
    info = shaped.table.taps[tap]
    retyped(shaped, shard, info.dtype, (shard.count, *info.shape))
    assert verify(shaped.objects).ok, "as it was"


@pytest.mark.parametrize(("tap", "value"), [("q.1", np.nan), ("logprob", -np.inf)])
def test_a_planted_nan_is_counted_in_a_row_of_any_shape(
    shaped: stored.Stored, tap: str, value: float
) -> None:
    shard = next(shard for shard in shaped.done(1).shards if shard.tap == tap)
    edit(shaped, shard.key, tap, 0, value)
    stored.reseal(shaped, 1)
    (fault,) = verify(shaped.objects).faults
    assert fault.startswith(f"unit 1: {shaped.table.taps[tap].width} values of {tap} are not")


# -- rows in eight bits ----------------------------------------------------------------------

SCALED = {"resid_post.0": stored.SCALED["resid_post.0"], "q.1": stored.SCALED["q.1"]}


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def scaled(request: pytest.FixtureRequest, tmp_path: Path) -> stored.Stored:
    return build(tmp_path / "out", units=UNITS[:1], taps=SCALED, compress=request.param)


def by_row(dataset: stored.Stored, unit: int = 0) -> Shard:
    """A shard whose rows have scales."""
    return next(s for s in dataset.done(unit).shards if s.tap == "resid_post.0" and s.first)


def tensors_of(dataset: stored.Stored, key: str) -> dict[str, np.ndarray]:
    header = read_shard_header(dataset.objects, key)
    return {n: np.array(open_tensor(dataset.objects, key, i)[:]) for n, i in header.items()}


def rewritten(dataset: stored.Stored, key: str, tensors: dict[str, np.ndarray]) -> None:
    """Replace a shard of the first unit by other tensors, with checksums that fit."""
    dataset.objects.delete(key)
    writer = ShardWriter(dataset.objects, key, [(n, a.dtype, a.shape) for n, a in tensors.items()])
    for array in tensors.values():
        writer.write(array)
    writer.close()
    stored.reseal(dataset, 0)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("taps", [stored.SHAPED, stored.SCALED], ids=["plain", "scaled"])
def test_rows_in_eight_bits_and_compressed_ones_are_found_sound(
    tmp_path: Path, taps: stored.Taps, compress: bool
) -> None:
    dataset = build(tmp_path / "out", taps=taps, compress=compress)
    report = verify(dataset.objects)
    assert (report.faults, report.orphans, report.rows) == ([], [], 31)
    assert report.bytes == sum(dataset.objects.size(k) for k in dataset.listed(fmt.ATTEMPTS))


@pytest.mark.varied
def test_bytes_of_scales_and_of_compressed_shards_count(scaled: stored.Stored, every: int) -> None:
    keys = [fmt.SCALES, *(shard.key for shard in scaled.done(0).shards)]
    # The padding of plain shards is tried elsewhere.
    places = {key: list(range(0, scaled.objects.size(key), every)) for key in keys}
    if not scaled.compress:
        places = {k: [p for p in v if p < 100 or p >= 4096] for k, v in places.items()}
    each_found(scaled, places)


def test_a_truncated_or_extended_shard_or_record_of_scales_is_found(scaled: stored.Stored) -> None:
    each_found_replaced(
        scaled,
        [fmt.SCALES, by_row(scaled).key],
        lambda data: [b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", data * 2],
    )


def test_a_changed_byte_of_a_scale_is_found(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", taps=SCALED)
    shard = by_row(dataset)
    info = read_shard_header(dataset.objects, shard.key)[fmt.scale_name(shard.tap)]
    for position in (info.start, info.stop - 1):
        stored.flip(dataset.path / shard.key, position)
        (fault,) = verify(dataset.objects).faults
        assert fault.startswith(f"{shard.key}: checksum")
        stored.flip(dataset.path / shard.key, position)
    assert verify(dataset.objects).ok


def test_a_scale_that_cannot_be_is_found(scaled: stored.Stored) -> None:
    shard = by_row(scaled)
    tensors = tensors_of(scaled, shard.key)
    fault = f"{shard.key}: holds scales that are not positive"
    for row, value in ((0, 0.0), (-1, -0.0), (0, -1.0), (-1, np.nan), (0, np.inf)):
        scales = tensors[fmt.scale_name(shard.tap)].copy()
        scales[row] = value
        rewritten(scaled, shard.key, {**tensors, fmt.scale_name(shard.tap): scales})
        assert verify(scaled.objects).faults == [fault], value
    rewritten(scaled, shard.key, tensors)
    assert verify(scaled.objects).ok, "as it was"


def without_scales(tensors: dict[str, np.ndarray]) -> None:
    del tensors["resid_post.0/scale"]


def of_another_tap(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.1/scale"] = tensors.pop("resid_post.0/scale")


def one_more_tensor(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0/zero"] = np.zeros(3, np.float32)


def too_few(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0/scale"] = tensors["resid_post.0/scale"][1:]


def one_for_each_value(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0/scale"] = np.ones(tensors["resid_post.0"].shape, np.float32)


def in_float64(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0/scale"] = tensors["resid_post.0/scale"].astype(np.float64)


def in_integers(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0/scale"] = tensors["resid_post.0/scale"].view(np.int32)


def rows_decoded(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0"] = tensors["resid_post.0"].astype(np.float32)


def rows_of_the_other_float8(tensors: dict[str, np.ndarray]) -> None:
    tensors["resid_post.0"] = tensors["resid_post.0"].view(DTYPES_BY_NAME["float8_e5m2"])


@pytest.mark.parametrize(
    "change",
    [without_scales, of_another_tap, one_more_tensor, too_few, one_for_each_value, in_float64,
     in_integers, rows_decoded, rows_of_the_other_float8],
)  # fmt: skip
def test_a_shard_with_other_tensors_than_rows_and_their_scales_is_found(
    scaled: stored.Stored, change: Callable[[dict[str, np.ndarray]], object]
) -> None:
    shard = by_row(scaled)
    tensors = tensors_of(scaled, shard.key)
    change(tensors)
    rewritten(scaled, shard.key, tensors)
    (fault,) = verify(scaled.objects).faults
    assert fault == f"{shard.key}: does not hold {shard.count} rows of resid_post.0"


@pytest.mark.parametrize("tap", ["resid_post.1", "q.1"])
def test_rows_scaled_by_channel_have_no_scales_of_their_own(
    scaled: stored.Stored, tap: str
) -> None:
    shard = next(s for s in scaled.done(0).shards if s.tap == "q.1")
    tensors = tensors_of(scaled, shard.key)
    assert [*tensors] == ["q.1"]
    tensors[fmt.scale_name(tap)] = np.ones(shard.count, np.float32)
    rewritten(scaled, shard.key, tensors)
    assert named(verify(scaled.objects), f"{shard.key}: does not hold")


def test_a_shard_without_its_scales_is_not_read(scaled: stored.Stored) -> None:
    shard = by_row(scaled)
    tensors = tensors_of(scaled, shard.key)
    without_scales(tensors)
    rewritten(scaled, shard.key, tensors)
    ds = spile.open(str(scaled.path))
    with pytest.raises(CorruptError, match=f"^{shard.key}: holds no tensor 'resid_post.0/scale'"):
        ds.read(shard.tap, shard.first, shard.first + 1)


# -- the record of scales --------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_missing_scales_are_found_where_rows_need_them(tmp_path: Path, partial: bool) -> None:
    dataset = build(tmp_path / "out", dtype="int8")
    dataset.objects.delete(fmt.SCALES)
    assert verify(dataset.objects, partial=partial).faults == ["scales.json: is missing"]
    nothing = build(tmp_path / "nothing", dtype="int8", commit=())
    nothing.objects.delete(fmt.SCALES)
    assert verify(nothing.objects, partial=True).ok, "they are measured by the first worker"
    float8 = build(tmp_path / "float8", dtype="float8_e4m3")
    assert fmt.SCALES not in float8.listed() and verify(float8.objects).ok


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({}, "holds no scales of "),
        ({"resid_post.1": ONES, "mlp_out.1": ONES[:2]}, "holds no scales of resid_post.0"),
        ({"resid_post.0": ONES}, "holds no scales of mlp_out.1"),
        ({"resid_post.0": ONES[:3], "mlp_out.1": ONES[:2]}, "holds no scales of resid_post.0"),
        ({"resid_post.0": ONES, "mlp_out.1": ONES}, "holds no scales of mlp_out.1"),
        ({"resid_post.0": ONES[:1], "mlp_out.1": ONES[:2]}, "holds no scales of resid_post.0"),
        ({"resid_post.0": 0 * ONES, "mlp_out.1": ONES[:2]}, "resid_post.0 that are not positive"),
        ({"resid_post.0": ONES, "mlp_out.1": -ONES[:2]}, "mlp_out.1 that are not positive"),
        ({"resid_post.0": ONES * np.nan, "mlp_out.1": ONES[:2]}, "that are not positive"),
        ({"resid_post.0": ONES * np.inf, "mlp_out.1": ONES[:2]}, "that are not positive"),
    ],
    ids=["none", "of other taps", "of one tap", "too few", "too many", "one for all", "zero",
         "negative", "no numbers", "infinite"],
)  # fmt: skip
def test_scales_that_do_not_fit_the_taps_are_found(
    tmp_path: Path, scales: dict[str, np.ndarray], reason: str
) -> None:
    dataset = build(tmp_path / "out", dtype="int8")
    data = fmt.encode_record("scales", scales_to_json(scales))
    (dataset.path / fmt.SCALES).write_bytes(data)
    (fault,) = verify(dataset.objects).faults
    assert fault.startswith("scales.json: ") and reason in fault
    with pytest.raises(CorruptError, match=f"^scales.json: .*{reason}"):
        spile.open(str(dataset.path))


def test_another_record_in_the_place_of_the_scales_is_found(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", dtype="int8")
    for data in (dataset.objects.get(fmt.MODEL), b"{}", b"[]", b"\xff"):
        (dataset.path / fmt.SCALES).write_bytes(data)
        assert named(verify(dataset.objects), "scales.json: ")
        with pytest.raises(CorruptError, match="^scales.json: "):
            spile.open(str(dataset.path))


# -- compressed shards behind checksums that are right ---------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "float8_e4m3"])
def compressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[stored.Stored]:
    """Tests undo their changes."""
    path = tmp_path_factory.mktemp("compressed") / "out"
    made = build(path, units=UNITS[:1], dtype=request.param, compress=True, shard_bytes=1000)
    assert verify(made.objects).ok
    yield made
    assert verify(made.objects).ok, "as it was"


def frames_of(data: bytes) -> list[list[int]]:
    """Return the packed size, the size and the checksum of each frame."""
    (count,) = struct.unpack("<I", data[-9:-5])
    values = struct.unpack(f"<{3 * count}I", data[-9 - 12 * count : -9])
    return [list(values[at : at + 3]) for at in range(0, 3 * count, 3)]


def with_frames(data: bytes, frames: list[list[int]]) -> bytes:
    """Return the same frames with another seek table."""
    body = data[: -17 - 12 * len(frames_of(data))]
    table = b"".join(struct.pack("<III", *frame) for frame in frames)
    head = struct.pack("<II", 0x184D2A5E, len(table) + 9)
    return body + head + table + struct.pack("<IBI", len(frames), 0x80, 0x8F92EAB1)


def bad_everywhere(dataset: stored.Stored, shard: Shard, content: bytes) -> None:
    """Forged content is blamed on its file by the audit, and by whoever reads it."""
    keys = [shard.key, fmt.CURRENT.done_key(0), fmt.MANIFEST, fmt.CURRENT.segment_key(0)]
    with stored.changed(dataset, *keys) as paths:
        paths[shard.key].write_bytes(content)
        stored.reseal(dataset, 0)
        (fault,) = verify(dataset.objects).faults
        assert fault.startswith(f"{shard.key}: "), fault
        ds = spile.open(str(dataset.path))
        with pytest.raises(CorruptError, match=f"^{shard.key}: "):
            ds.read(shard.tap, shard.first, shard.first + shard.count)


def test_the_seek_table_is_understood_here(compressed: stored.Stored) -> None:
    data = compressed.objects.get(compressed.done(0).shards[0].key)
    frames = frames_of(data)
    assert len(frames) >= 3, "a header, and rows in pieces of seven"
    assert frames[0][1] == 4096
    assert with_frames(data, frames) == data


@pytest.mark.parametrize("compressed", ["float8_e4m3"], indirect=True)
@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize(
    ("field", "change"),
    [(0, 1), (0, -1), (1, 1), (1, 4), (1, -4), (1, 1 << 12), (2, 1)],
)
def test_a_seek_table_that_lies_of_one_frame_is_found(
    compressed: stored.Stored, number: int, field: int, change: int
) -> None:
    shard = compressed.done(0).shards[0]
    data = compressed.objects.get(shard.key)
    frames = frames_of(data)
    frames[number][field] = (frames[number][field] + change) % (1 << 32)
    bad_everywhere(compressed, shard, with_frames(data, frames))


def exchanged(frames: list[list[int]]) -> None:
    frames[1], frames[2] = frames[2], frames[1]


def bounds_moved(frames: list[list[int]]) -> None:
    frames[1][0], frames[2][0] = frames[1][0] + 1, frames[2][0] - 1


def sizes_moved(frames: list[list[int]]) -> None:
    frames[1][1], frames[2][1] = frames[1][1] + 4, frames[2][1] - 4


def sizes_moved_from_the_header(frames: list[list[int]]) -> None:
    frames[0][1], frames[1][1] = frames[0][1] - 4, frames[1][1] + 4


def one_left_out(frames: list[list[int]]) -> None:
    frames.pop()


def one_twice(frames: list[list[int]]) -> None:
    frames.append(frames[-1])


def two_as_one(frames: list[list[int]]) -> None:
    packed, size, _ = frames.pop(2)
    frames[1][0] += packed
    frames[1][1] += size


def none_at_all(frames: list[list[int]]) -> None:
    frames.clear()


@pytest.mark.parametrize(
    "lie",
    [exchanged, bounds_moved, sizes_moved, sizes_moved_from_the_header, one_left_out, one_twice,
     two_as_one, none_at_all],
)  # fmt: skip
def test_a_seek_table_that_lies_is_found(
    compressed: stored.Stored, lie: Callable[[list[list[int]]], object]
) -> None:
    shard = compressed.done(0).shards[0]
    data = compressed.objects.get(shard.key)
    frames = frames_of(data)
    lie(frames)
    bad_everywhere(compressed, shard, with_frames(data, frames))


def test_a_truncated_compressed_shard_is_found(compressed: stored.Stored) -> None:
    shard = compressed.done(0).shards[0]
    data = compressed.objects.get(shard.key)
    for length in (0, 1, 16, len(data) // 2, len(data) - 9, len(data) - 1):
        bad_everywhere(compressed, shard, data[:length])
    bad_everywhere(compressed, shard, data + b"\0")
    bad_everywhere(compressed, shard, data[1:])


@pytest.mark.varied
def test_damaged_frames_are_found_or_hold_the_same_rows(
    compressed: stored.Stored, every: int
) -> None:
    shard = compressed.done(0).shards[0]
    wanted = compressed.rows[shard.tap][: shard.count].tobytes()
    data = compressed.objects.get(shard.key)
    keys = [shard.key, fmt.CURRENT.done_key(0), fmt.MANIFEST, fmt.CURRENT.segment_key(0)]
    found = 0
    positions = range(0, len(data), every)
    with stored.changed(compressed, *keys) as paths:
        for position in positions:
            stored.flip(paths[shard.key], position, 1 << position % 8)
            stored.reseal(compressed, 0)
            if verify(compressed.objects).ok:
                ds = spile.open(str(compressed.path))
                assert ds.read(shard.tap, 0, shard.count, dtype="stored").tobytes() == wanted
            else:
                found += 1
            stored.flip(paths[shard.key], position, 1 << position % 8)
    assert found > 0.9 * len(positions)


def test_a_file_that_is_not_compressed_under_such_a_name_is_found(
    compressed: stored.Stored, tmp_path: Path
) -> None:
    dtype = compressed.table.recipe.store_dtype
    plain = build(tmp_path / "out", dtype=dtype, shard_bytes=1000)
    shard = compressed.done(0).shards[0]
    bad_everywhere(compressed, shard, plain.objects.get(plain.done(0).shards[0].key))


# -- filtered rows ---------------------------------------------------------------------------


def rows_of(dataset: stored.Stored, unit: int) -> np.ndarray:
    return dataset.index[dataset.starts[unit] : dataset.starts[unit + 1]]


@pytest.mark.parametrize(
    ("where", "every"),
    [
        ("pos >= 2", None),
        (None, 3),
        ("end", None),
        ("not first", 2),
        ("doc == 1", None),  # nothing of the other units
        ("offset % 3 == 1 or last", 2),
        ("pos > 100", None),  # nothing at all
        ("pos >= 0", None),  # everything, but by a filter
    ],
)
def test_filtered_rows_are_found_sound(
    tmp_path: Path, where: str | None, every: int | None
) -> None:
    dataset = build(tmp_path / "out", taps=stored.SHAPED, where=where, every=every)
    report = verify(dataset.objects)
    assert (report.faults, report.orphans) == ([], [])
    assert report.rows == len(dataset.index)
    assert (report.rows < 31) == (where != "pos >= 0")


@pytest.fixture
def filtered(tmp_path: Path) -> stored.Stored:
    """The rows at positions 1, 3, 5 and 7 of documents 0 and 1, in the first unit."""
    return build(tmp_path / "out", where="pos % 2 == 1")


def test_a_doubled_row_is_found_among_filtered_ones(filtered: stored.Stored) -> None:
    index = rows_of(filtered, 0)
    offsets = sorted(index["offset"][index["doc"] == 1].tolist())
    assert offsets == [1, 3, 5, 7]
    row = int(np.flatnonzero((index["doc"] == 1) & (index["offset"] == 3))[0])
    key = filtered.done(0).index.key
    edit(filtered, key, "offset", row, 5)
    stored.reseal(filtered, 0)
    assert verify(filtered.objects).faults == [f"{key}: a token is doubled"]


def test_the_same_offset_in_two_documents_is_no_doubled_row(filtered: stored.Stored) -> None:
    index = rows_of(filtered, 0)
    assert {*index["offset"][index["doc"] == 0]} & {*index["offset"][index["doc"] == 1]}
    assert verify(filtered.objects).ok


def test_more_rows_than_tokens_are_found(filtered: stored.Stored) -> None:
    done = filtered.done(0)
    stored.reseal(filtered, 0, tokens=done.rows - 1)
    assert named(verify(filtered.objects), f"{done.index.key}: a token is doubled")
    # Up to the last kept token of each document, all must have been read.
    index = spile.open(str(filtered.path)).index(0, done.rows)
    least = sum(int(index["offset"][index["doc"] == doc].max()) + 1 for doc in {*index["doc"]})
    stored.reseal(filtered, 0, tokens=least)
    assert not named(verify(filtered.objects), done.index.key)
    stored.reseal(filtered, 0, tokens=least - 1)
    assert named(verify(filtered.objects), f"{done.index.key}: names tokens")


@pytest.mark.parametrize(("column", "value"), [("offset", 14), ("offset", -1), ("doc", 2)])
def test_a_filtered_row_of_a_token_that_was_not_read_is_found(
    filtered: stored.Stored, column: str, value: int
) -> None:
    key = filtered.done(0).index.key
    edit(filtered, key, column, 0, value)
    stored.reseal(filtered, 0)
    assert named(verify(filtered.objects), key)


def test_filtered_rows_of_more_documents_than_were_read_are_found(filtered: stored.Stored) -> None:
    stored.reseal(filtered, 0, documents=1, skipped={"empty": 1})
    assert named(verify(filtered.objects), filtered.done(0).index.key)


@pytest.mark.parametrize("more", [-1, 1])
def test_where_all_is_kept_there_is_a_row_for_every_token(
    dataset: stored.Stored, more: int
) -> None:
    done = dataset.done(0)
    stored.reseal(dataset, 0, tokens=done.rows + more)
    assert named(verify(dataset.objects), f"{done.index.key}: a token is missing or doubled")


def test_what_is_no_dataset_is_said_to_be_none(tmp_path: Path) -> None:
    assert named(verify(stored.LocalObjects(tmp_path)), "no dataset there")


@pytest.mark.parametrize(
    ("variable", "below"), [("SPILE_CACHE", "verify"), ("XDG_CACHE_HOME", "spile/verify")]
)
def test_the_journal_lies_in_the_one_cache_folder(
    variable: str, below: str, dataset: stored.Stored, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("SPILE_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    url, objects = dataset.objects.url, dataset.objects
    with pytest.raises(KeyboardInterrupt):
        verify(objects, journal=Journal(url, resume=False), progress=interrupt)
    assert len(list((tmp_path / "cache" / below).iterdir())) == 1
    assert verify(objects, journal=Journal(url, resume=True)).resumed == 1
    assert list((tmp_path / "cache" / below).iterdir()) == []


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", sorted(stored.TOKENIZER))
def test_a_damaged_or_missing_file_of_the_tokenizer_is_named(
    tmp_path: Path, name: str, quick: bool
) -> None:
    dataset = stored.build(tmp_path / "out", **stored.WITH_TOKENIZER)
    assert verify(dataset.objects, quick=quick).ok
    key = dataset.table.tokenizer[name].key
    stored.flip(dataset.path / key, 1, 4)
    assert named(verify(dataset.objects, quick=quick), key)
    (dataset.path / key).unlink()
    report = verify(dataset.objects, quick=quick)
    advice = f"`spile verify --repair` restores it from the model's {name}"
    assert report.faults == [f"{key}: is missing; {advice}"]
    assert report.beside == [key]
    dataset.objects.create(key, stored.TOKENIZER[name])
    report = verify(dataset.objects, quick=quick)
    assert report.ok and report.orphans == []


def test_another_tokenizer_than_the_recipes_is_a_fault(tmp_path: Path) -> None:
    options = {**stored.WITH_TOKENIZER, "tokenizer": {"tokenizer.json": b"{}"}}
    report = verify(stored.build(tmp_path / "out", **options).objects)
    assert report.faults == ["units.json: names another tokenizer than that of its recipe"]
