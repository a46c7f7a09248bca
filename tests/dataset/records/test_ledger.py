"""The ledger: one table, one record per unit, one manifest, whoever comes first."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import (
    ConfigError,
    CorruptError,
    DriftError,
    NotCreatedError,
    SpileError,
    StoreError,
)
from spile.core.units import Unit
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.records import format as fmt
from spile.dataset.records.columns import named_by_content
from spile.dataset.records.format import Done, TapInfo
from spile.dataset.records.ledger import Attempt, Ledger, Table
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import LocalObjects, MemoryObjects
from spile.status.status import read_status
from support import stored

UNITS = ((5, 3), (9,), (0, 4))


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS, commit=())


def empty(tmp_path: Path, name: str = "new") -> Ledger:
    return Ledger(LocalObjects(tmp_path / name))


# -- the table -------------------------------------------------------------------------------


def test_the_first_table_stays(tmp_path: Path) -> None:
    first, second = stored.make_table([[1]]), stored.make_table([[2], [3]], seq_len=16)
    ledger = empty(tmp_path)
    assert ledger.read_table() is None
    assert ledger.create_table(first) == first
    assert ledger.create_table(second) == first
    assert ledger.table() == first


def test_racing_creators_all_get_the_same_table(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    got: list[Table] = []

    def create(number: int) -> None:
        barrier.wait()
        table = stored.make_table([[number]], model_source=f"/models/{number}")
        got.append(empty(tmp_path).create_table(table))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert all(table == got[0] for table in got)


class Killed(LocalObjects):
    """A disk on which a process ends just before it creates some key."""

    def __init__(self, root: Path, before: str) -> None:
        super().__init__(root)
        self._before = before

    def create(self, key: str, data: bytes) -> bool:
        if key.endswith(self._before):
            raise KeyboardInterrupt
        return super().create(key, data)


@pytest.mark.parametrize("before", ["/tokenizer_config.json", ".safetensors", fmt.UNITS])
@pytest.mark.parametrize("other", [False, True])
def test_a_kill_before_the_table_leaves_nothing_that_blocks_the_next_try(
    tmp_path: Path, before: str, other: bool
) -> None:
    table = stored.make_table()
    with pytest.raises(KeyboardInterrupt):
        Ledger(Killed(tmp_path / "new", before)).create_table(table, stored.TOKENIZER)
    ledger = empty(tmp_path)
    assert ledger.read_table() is None
    files = {**stored.TOKENIZER, "tokenizer.json": b"another"} if other else stored.TOKENIZER
    made = ledger.create_table(table, files)
    assert ledger.read_tokenizer(made) == files
    assert made.tokenizer == ledger.table().tokenizer
    named = {file.key for file in made.tokenizer.values()}
    left = {key for key in ledger.objects.list(fmt.TOKENIZER)} - named
    assert {*collect_garbage(ledger.objects)} == left
    assert bool(left) == other
    assert ledger.read_tokenizer(made) == files


def test_who_comes_second_takes_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    first = ledger.create_table(stored.make_table(), stored.TOKENIZER)
    second = empty(tmp_path).create_table(stored.make_table(), {"tokenizer.json": b"another"})
    assert second.tokenizer == first.tokenizer
    assert ledger.read_tokenizer(second) == stored.TOKENIZER
    assert ledger.read_tokenizer(stored.make_table()) == {}


@pytest.mark.parametrize("change", [{"key": "tokenizer/../units.json"}, {"digest": "0" * 32},
                                    {"key": "units.json"}, {"bytes": -1}])  # fmt: skip
def test_a_tokenizer_file_that_is_not_where_its_digest_says_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    ledger = empty(tmp_path)
    body = body_of(ledger.create_table(stored.make_table(), stored.TOKENIZER))
    body["tokenizer"]["tokenizer.json"] |= change
    ledger.objects.replace(fmt.UNITS, fmt.encode_record("units", body))
    with pytest.raises(CorruptError, match=r"units.json: is not a unit table"):
        ledger.table()


def test_no_dataset_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere: no dataset there"):
        empty(tmp_path, "nowhere").table()
    assert not (tmp_path / "nowhere").exists()


def test_a_table_with_fields_missing_is_refused(tmp_path: Path) -> None:
    good = body_of(stored.make_table())
    for field in (field for field in good if field != "tokenizer"):
        ledger = empty(tmp_path, field)
        body = {k: v for k, v in good.items() if k != field}
        ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
        with pytest.raises(CorruptError, match="units.json"):
            ledger.table()


def body_of(table: Table) -> dict[str, Any]:
    return table.to_json(named_by_content(fmt.UNIT_COLUMNS, table.units.columns)[0])


def with_taps(tmp_path: Path, taps: Any) -> Ledger:
    """A ledger whose table has the right checksum and these taps."""
    ledger = empty(tmp_path)
    body = {**body_of(stored.make_table()), "taps": taps}
    ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
    return ledger


def test_a_table_says_what_is_stored_of_each_tap(tmp_path: Path) -> None:
    table = stored.make_table(taps=stored.SHAPED)
    ledger = empty(tmp_path)
    assert ledger.create_table(table).taps == stored.SHAPED
    body = json.loads(ledger.objects.get(fmt.UNITS))
    assert body["taps"] == {
        "expert_ids.1": {
            "aliases": ["blocks.1.mlp.hook_expert_indices"], "dtype": "int16", "shape": [2],
            "latents": 0,
        },
        "logprob": {"aliases": [], "dtype": "float32", "shape": [], "latents": 0},
        "q.1": {
            "aliases": ["blocks.1.attn.hook_q", "blocks.1.attn.q.hook_out"],
            "dtype": "bfloat16",
            "shape": [2, 3],
            "latents": 0,
        },
        "resid_post.0": {
            "aliases": ["blocks.0.hook_resid_post", "hidden_states[1]"],
            "dtype": "float32",
            "shape": [6],
            "latents": 0,
        },
    }  # fmt: skip


TAP = {"shape": [2, 3], "dtype": "float32", "aliases": ["a"], "latents": 0}


@pytest.mark.parametrize(
    "tap",
    [
        6,  # what format 1 had
        None,
        [],
        "float32",
        {},
        *({k: v for k, v in TAP.items() if k != missing} for missing in TAP),
        *({**TAP, "shape": s} for s in (
            None, 6, "23", ["2", 3], [2.0, 3], [True, 3], [None], [[2, 3]], [-2, 3], [0], {"2": 3},
        )),
        *({**TAP, "dtype": d} for d in (None, "", "float12", 32, "F32", ["float32"], {})),
        *({**TAP, "aliases": a} for a in (None, 5, "blocks", [5], [None], [["a"]], {"a": "b"})),
        *({**TAP, "latents": n} for n in (None, -1, "9", 1.0, True, 1 << 60)),
        {**TAP, "latents": 9},  # of rows with several axes
    ],
)  # fmt: skip
def test_a_tap_that_cannot_be_is_refused(tmp_path: Path, tap: Any) -> None:
    assert with_taps(tmp_path / "good", {"embed": TAP}).table().taps == {
        "embed": TapInfo((2, 3), "float32", ("a",))
    }
    ledger = with_taps(tmp_path / "bad", {"embed": tap})
    with pytest.raises(CorruptError, match=r"^units.json: is not a unit table \("):
        ledger.table()


@pytest.mark.parametrize("taps", [None, [], "embed", 3, [["embed", TAP]]])
def test_taps_that_are_no_table_are_refused(tmp_path: Path, taps: Any) -> None:
    with pytest.raises(CorruptError, match="units.json: is not a unit table"):
        with_taps(tmp_path, taps).table()


@pytest.mark.parametrize("kept", [None, "many", [], {}])
def test_a_share_that_is_no_number_is_refused(tmp_path: Path, kept: Any) -> None:
    ledger = empty(tmp_path)
    body = {**body_of(stored.make_table()), "kept": kept}
    ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
    with pytest.raises(CorruptError, match="units.json: is not a unit table"):
        ledger.table()


# As version 0.1.0 wrote it: its checksum is right, and its taps have widths alone.
FORMAT_1 = {
    "checksum": "b71051ceff67a4efb8ff086c564f094f",
    "files": [{"identity": "12-ab", "path": "/corpora/tiny.jsonl"}],
    "fingerprint": "00244ec2c4f00c038f7728119a360fa29dee94326c6db8bc4d25d05384f6ca09",
    "format": 1,
    "kind": "units",
    "recipe": {
        "compute_dtype": "float32", "corpus": ["12-ab"], "corpus_source": "/corpora/tiny.jsonl",
        "long_docs": "split", "max_docs": None, "max_tokens": None,
        "model": {"config": "c0ffee", "weights": "f00d"}, "model_source": "/models/tiny",
        "pack": "ffd", "seq_len": 8, "special_tokens": "tokenizer", "store_dtype": "float32",
        "taps": ["embed"], "text_column": None, "text_documents": "line", "unit_tokens": 64,
    },
    "taps": {"embed": 4},
    "units": [{"first_doc": 0, "id": 0, "num_docs": 1, "spans": [], "tokens": 3}],
}  # fmt: skip


def test_a_store_of_format_1_is_refused_with_the_reason(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "old")
    objects.create(fmt.UNITS, (json.dumps(FORMAT_1, sort_keys=True, indent=1) + "\n").encode())
    reason = "units.json: written in format 1, but this version of spile reads format 7"
    asks: list[Callable[[], object]] = [
        lambda: Ledger(objects).table(),
        lambda: spile.open(str(tmp_path / "old")),
        lambda: spile.open(str(tmp_path / "old"), partial=True),
        lambda: read_status(objects),
        lambda: collect_garbage(objects, abandoned=True),
        lambda: spile.extract(spile.Recipe(), str(tmp_path / "old")),
    ]
    for ask in asks:
        with pytest.raises(StoreError, match=reason) as caught:
            ask()
        assert not isinstance(caught.value, CorruptError), "old is not damaged"
    (fault,) = verify(objects).faults
    assert fault.startswith(reason)
    assert list(objects.list()) == [fmt.UNITS]


def test_a_recipe_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    body = body_of(stored.make_table())
    body["recipe"]["temperature"] = 1
    ledger = empty(tmp_path)
    ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
    with pytest.raises(ConfigError, match="temperature"):
        ledger.table()


# -- weights ---------------------------------------------------------------------------------


def test_weights_are_recorded_once_and_compared_after(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    stored_bytes = ledger.objects.get(fmt.MODEL)
    ledger.check_weights({"block": "bb", "embed": "aa"})
    assert ledger.objects.get(fmt.MODEL) == stored_bytes


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"embed": "aa", "block": "b0"}, {"weights of block": ("bb", "b0")}),
        ({"embed": "aa"}, {"weights of block": ("bb", None)}),
        ({"embed": "aa", "block": "bb", "head": "cc"}, {"weights of head": (None, "cc")}),
    ],
)
def test_other_weights_are_drift(
    tmp_path: Path, now: dict[str, str], difference: dict[str, tuple[str | None, str | None]]
) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    with pytest.raises(DriftError) as caught:
        ledger.check_weights(now)
    assert caught.value.differences == difference


# -- scales ----------------------------------------------------------------------------------


def int8_table() -> Table:
    return stored.make_table(taps={"q.1": TapInfo((2, 3), "int8"), "embed": 4})


def test_the_first_scales_are_everyones(tmp_path: Path) -> None:
    ledger, table = empty(tmp_path), int8_table()
    assert ledger.read_scales(table) is None
    first = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    ledger.create_scales(table, {"q.1": first})
    ledger.create_scales(table, {"q.1": 2 * first})
    read = ledger.read_scales(table)
    assert read is not None and read.keys() == {"q.1"}
    assert read["q.1"].dtype == np.float32
    assert np.array_equal(read["q.1"], first)


def test_where_no_tap_is_scaled_by_channel_there_are_no_scales_to_miss(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    for dtype in ("float32", "float8_e4m3"):
        assert ledger.read_scales(stored.make_table(dtype=dtype)) == {}


@pytest.mark.parametrize(
    "scales",
    [{}, {"embed": np.ones(4)}, {"q.1": np.ones((2, 2))},
     {"q.1": np.zeros((2, 3))}, {"q.1": np.full((2, 3), 1e-60)}, {"q.1": np.full((2, 3), np.nan)}],
    ids=["none", "of another tap", "too few", "zero", "zero in float32", "no numbers"],
)  # fmt: skip
def test_scales_that_could_not_be_read_are_not_stored(
    tmp_path: Path, scales: dict[str, np.ndarray]
) -> None:
    ledger, table = empty(tmp_path), int8_table()
    with pytest.raises(CorruptError, match="^scales.json: holds"):
        ledger.create_scales(table, scales)
    assert list(ledger.objects.list()) == []


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b" ", lambda _: b""]
)
def test_damaged_scales_are_not_read(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    ledger, table = empty(tmp_path), int8_table()
    ledger.create_scales(table, {"q.1": np.ones((2, 3), np.float32)})
    (tmp_path / "new" / fmt.SCALES).write_bytes(change(ledger.objects.get(fmt.SCALES)))
    with pytest.raises(CorruptError, match="^scales.json: "):
        ledger.read_scales(table)


# -- commits ---------------------------------------------------------------------------------


def test_the_first_attempt_wins_and_the_second_knows_it_lost(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    first, second = unfinished.attempt(1), unfinished.attempt(1)
    assert ledger.read_done(1) is None
    assert ledger.commit(first) is True
    assert ledger.commit(second) is False
    assert ledger.read_done(1) == first
    assert ledger.done_units() == {1}


def test_an_attempt_whose_answer_was_lost_has_won(unfinished: stored.Stored) -> None:
    done = unfinished.attempt(0)
    assert unfinished.ledger.commit(done)
    # the same request again, as after a lost answer, from a new process
    assert Ledger(LocalObjects(unfinished.path)).commit(done)


def test_of_eight_racing_attempts_exactly_one_wins(unfinished: stored.Stored) -> None:
    attempts = [unfinished.attempt(0) for _ in range(8)]
    barrier = threading.Barrier(8)
    won: list[Done] = []

    def commit(done: Done) -> None:
        barrier.wait()
        if unfinished.ledger.commit(done):
            won.append(done)

    threads = [threading.Thread(target=commit, args=(done,)) for done in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert unfinished.ledger.read_done(0) == won[0]


def test_a_record_under_another_units_key_is_refused(unfinished: stored.Stored) -> None:
    unfinished.ledger.commit(unfinished.attempt(0))
    objects = unfinished.objects
    objects.create(fmt.CURRENT.done_key(1), objects.get(fmt.CURRENT.done_key(0)))
    with pytest.raises(CorruptError, match="done/000000/00000001.json: is the record of unit 0"):
        unfinished.ledger.read_done(1)


def test_losing_to_a_damaged_record_is_an_error_and_not_a_loss(unfinished: stored.Stored) -> None:
    unfinished.objects.create(fmt.CURRENT.done_key(0), b"{}")
    with pytest.raises(CorruptError, match="done/000000/00000000.json"):
        unfinished.ledger.commit(unfinished.attempt(0))


def test_leftovers_and_strangers_are_no_done_units(unfinished: stored.Stored) -> None:
    for key in ("done/000000/00000001.json.tmp-abc", "done/readme", "done/1.json"):
        unfinished.objects.create(key, b"")
    assert unfinished.ledger.done_units() == set()


# -- the manifest ----------------------------------------------------------------------------


def test_the_dataset_is_complete_when_every_unit_is_done(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in (2, 0, 1):
        assert ledger.complete(unfinished.table) is False
        assert ledger.read_manifest() is None
        ledger.commit(unfinished.attempt(unit))
    assert ledger.complete(unfinished.table) is True
    manifest = ledger.read_manifest()
    assert manifest is not None
    assert [done.unit for done in ledger.catalog(unfinished.table, manifest)] == [0, 1, 2]
    files = [f for unit in range(3) for f in unfinished.done(unit).files()]
    total = manifest.totals
    assert total.rows == len(unfinished.index) == 21
    assert (total.units, total.tokens, total.documents) == (3, 21, 4)
    assert total.skipped == {"no tokens": 1}
    assert total.bytes == sum(unfinished.objects.size(file.key) for file in files)
    assert manifest.fingerprint == unfinished.table.fingerprint


def test_the_manifest_counts_rows_kept_and_tokens_read(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, where="pos in (1, 2)")
    manifest = dataset.ledger.read_manifest()
    assert manifest is not None
    units = dataset.ledger.catalog(dataset.table, manifest)
    assert [(done.rows, done.tokens) for done in units] == [(4, 8), (2, 9), (2, 4)]
    total = manifest.totals
    assert (total.rows, total.tokens, total.documents) == (8, 21, 4)
    assert [dataset.done(unit).tokens for unit in range(3)] == [8, 9, 4]


def test_completing_again_changes_nothing(unfinished: stored.Stored) -> None:
    for unit in range(3):
        unfinished.ledger.commit(unfinished.attempt(unit))
    unfinished.ledger.complete(unfinished.table)
    before = unfinished.objects.get(fmt.MANIFEST)
    assert unfinished.ledger.complete(unfinished.table) is True
    assert unfinished.objects.get(fmt.MANIFEST) == before


def test_the_manifest_follows_from_the_records_alone(
    unfinished: stored.Stored, tmp_path: Path
) -> None:
    records = [unfinished.attempt(unit) for unit in range(3)]
    manifests = set()
    for name, order in (("a", (0, 1, 2)), ("b", (2, 1, 0))):
        shutil.copytree(unfinished.path / "attempts", tmp_path / name / "attempts")
        ledger = empty(tmp_path, name)
        for unit in order:
            made_by = {"host": name}
            ledger.commit(dataclasses.replace(records[unit], made_by=made_by))
        ledger.complete(unfinished.table)
        manifests.add(ledger.objects.get(fmt.MANIFEST))
    assert len(manifests) == 1
    ledger = empty(tmp_path, "b")
    assert ledger.manifest_follows(unfinished.table)
    manifest = ledger.read_manifest()
    assert manifest and ledger.follows(unfinished.table, manifest, records)
    other = dataclasses.replace(records[1], text_digest="changed")
    assert not ledger.follows(unfinished.table, manifest, [records[0], other, records[2]])


def test_a_segment_reads_back_as_the_records(unfinished: stored.Stored) -> None:
    records = [unfinished.attempt(unit, made_by={"seconds": 1.5}) for unit in range(3)]
    for done in records:
        unfinished.ledger.commit(done)
    assert unfinished.ledger.seal(unfinished.table, 0)
    assert [*unfinished.ledger.catalog_so_far(unfinished.table)] == records


def test_a_record_of_no_unit_does_not_stand_in_for_one_that_is_missing(
    unfinished: stored.Stored,
) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(2))
    unfinished.objects.create(fmt.CURRENT.done_key(99), b"copied here by mistake")
    assert ledger.complete(unfinished.table) is False
    ledger.commit(unfinished.attempt(1))
    assert ledger.complete(unfinished.table) is True


def test_no_manifest_is_made_of_another_recipes_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(1, fingerprint="of another dataset"))
    ledger.commit(unfinished.attempt(2))
    with pytest.raises(SpileError, match="done/000000/00000001.json"):
        ledger.complete(unfinished.table)
    assert ledger.read_manifest() is None


def test_no_manifest_is_made_of_damaged_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in range(2):
        ledger.commit(unfinished.attempt(unit))
    unfinished.objects.create(fmt.CURRENT.done_key(2), b"torn")
    with pytest.raises(CorruptError, match="done/000000/00000002.json"):
        ledger.complete(unfinished.table)
    assert ledger.read_manifest() is None


def test_a_record_is_never_created_for_files_that_are_gone(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", ((5, 9), (9, 5)), commit=(0,))
    ledger = Ledger(dataset.objects)
    attempt = dataset.attempt(1)
    dataset.objects.delete(attempt.shards[0].key)
    with pytest.raises(StoreError, match="vanished before unit 1"):
        ledger.commit(attempt)
    assert ledger.done_units() == {0}
    assert ledger.commit(dataset.attempt(1))
    assert ledger.commit(attempt) is False  # another has won meanwhile: a lost race, no error


@pytest.mark.parametrize(("error", "kept"), [(NotCreatedError, False), (StoreError, True)])
def test_files_of_a_failed_commit_go_only_if_there_is_certainly_no_record(
    unfinished: stored.Stored, monkeypatch: pytest.MonkeyPatch, error: type[StoreError], kept: bool
) -> None:
    index = unfinished.read[0]
    writer = UnitWriter(unfinished.objects, 0, index[:0], {}, 60)
    done = writer.finish(
        table=stored.describe_documents(unfinished.table, 0, index[:0]),
        fingerprint="", tokens=0, documents=0, contexts=0, skipped={}, text_digest="", made_by={},
    )  # fmt: skip

    def fail(*_: object) -> bool:
        raise error("the disk")

    monkeypatch.setattr(LocalObjects, "create", fail)
    with (
        pytest.raises(StoreError, match="the disk"),
        Attempt(unfinished.ledger, writer) as attempt,
    ):
        attempt.commit(done)
    assert bool(unfinished.listed("attempts/")) is kept


@pytest.mark.parametrize(
    ("most", "wanted", "tokens", "limit"),
    [
        (None, 1 << 30, 10**15, 1 << 30),  # a disk
        (256 << 20, 1 << 30, 10**6, 64 << 20),
        (256 << 20, 1 << 30, 10**11, 126 * 10**11 // 100_000),
        (256 << 20, 1 << 30, 10**15, 256 << 20),
        (256 << 20, 1 << 20, 10**15, 1 << 20),
    ],
)
def test_shards_in_buckets_grow_with_the_dataset(
    most: int | None, wanted: int, tokens: int, limit: int
) -> None:
    objects = MemoryObjects()
    objects.most_streamed = most
    taps, units = (
        {"resid_post.0": TapInfo((26,), "float32")},
        UnitColumns.of([Unit(0, 0, 1, tokens, ())]),
    )
    large = dataclasses.replace(stored.make_table([[1]]), taps=taps, kept=1.0, units=units)
    assert large.row_bytes == 26 * 4 + 22  # with the index
    assert large.shard_limit(objects, wanted) == limit
