"""The unit table: the first one wins, all files that it names exist, and damage is refused."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spile
from spile.core.errors import (
    ConfigError,
    CorruptError,
    StoreError,
)
from spile.core.units import Unit
from spile.dataset import format as fmt
from spile.dataset.codec.columns import named_by_content
from spile.dataset.format import TapInfo
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table, read_tokenizer
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import LocalObjects, MemoryObjects
from spile.status.status import read_status
from support import stored


def empty(tmp_path: Path, name: str = "new") -> Ledger:
    return Ledger(LocalObjects(tmp_path / name))


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
    assert read_tokenizer(ledger.objects, made) == files
    assert made.tokenizer == ledger.table().tokenizer
    named = {file.key for file in made.tokenizer.values()}
    left = {key for key in ledger.objects.list(fmt.TOKENIZER)} - named
    assert {*collect_garbage(ledger.objects)} == left
    assert bool(left) == other
    assert read_tokenizer(ledger.objects, made) == files


def test_who_comes_second_takes_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    first = ledger.create_table(stored.make_table(), stored.TOKENIZER)
    second = empty(tmp_path).create_table(stored.make_table(), {"tokenizer.json": b"another"})
    assert second.tokenizer == first.tokenizer
    assert read_tokenizer(ledger.objects, second) == stored.TOKENIZER
    assert read_tokenizer(ledger.objects, stored.make_table()) == {}


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


# As version 0.1.0 wrote it: the checksum is right, but taps have only widths.
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
    reason = "units.json: written in format 1, but this version of spile reads format 8"
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
    taps = {"resid_post.0": TapInfo((26,), "float32")}
    units = UnitColumns.of([Unit(0, 0, 1, tokens, ())])
    large = dataclasses.replace(stored.make_table([[1]]), taps=taps, kept=1.0, units=units)
    assert large.row_bytes == 26 * 4 + 22  # with the index
    assert large.shard_limit(objects, wanted) == limit
