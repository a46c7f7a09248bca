"""Datasets made of other datasets' units: a part of one, or several joined."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.harness import run
from spile.core.errors import ConfigError, SpileError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.assemble import Assembled, copy_part, merge, parse_units
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.maintain.verify import verify
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.objects import LocalObjects, Objects, open_objects
from support import servers, stored

OTHER: dict[str, Any] = {"corpus": ("34-cd",), "corpus_source": "/corpora/other.jsonl"}
TOLD = ("doc", "tokens", "rows", "skipped", "preview")


def checked(objects: Objects) -> Dataset:
    """Open a dataset in which an audit finds nothing."""
    report = verify(objects)
    assert (report.faults, report.orphans) == ([], [])
    return open_dataset(objects.url)


def rows_of(made: stored.Stored, units: list[int]) -> np.ndarray:
    return np.concatenate([np.arange(*made.starts[unit : unit + 2]) for unit in units])


@pytest.mark.parametrize(
    ("kind", "taps", "units"),
    [
        ("SHAPED", "q:1,logprob", None),
        ("SHAPED", None, [0, 3, 4]),
        ("SCALED", "q.1,v.1", [1, 2]),
        ("LATENTS", "mlp_out_latents.1,mlp_out_latent_ids.1", [4]),
    ],
)
def test_a_part_is_a_dataset_of_its_own(
    kind: str, taps: str | None, units: list[int] | None, tmp_path: Path
) -> None:
    changes = stored.ENCODED if kind == "LATENTS" else {}
    made = stored.copied(tmp_path / "out", taps=getattr(stored, kind), **changes)
    dest = LocalObjects(tmp_path / "dest")
    told = copy_part(made.objects, dest, taps=taps, units=units)
    ds, rows = checked(dest), rows_of(made, units or [*range(5)])
    assert told.taps == tuple(ds.taps) == tuple(ds.recipe.stored_taps)
    assert (told.rows, told.units) == (len(rows), len(units or range(5)))
    assert ds.index(0, ds.num_tokens).tobytes() == made.index[rows].tobytes()
    for tap in ds.taps:
        assert np.array_equal(ds.read(tap, 0, ds.num_tokens), made.rows[tap][rows])
        assert ds.statistics(tap).count == len(rows)
    doc = int(made.index[rows]["doc"][0])
    assert ds.document(doc).index.tobytes() == open_dataset(made.path).document(doc).index.tobytes()
    (origin,) = Ledger(dest).table().made_of
    assert (origin["url"], origin["fingerprint"]) == (str(made.path), made.table.fingerprint)
    if taps is None:
        assert ds.fingerprint == made.table.fingerprint
        assert Ledger(dest).table().order != made.table.order


def test_a_part_with_fewer_taps_has_the_recipe_of_an_extraction_of_those(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SHAPED)
    copy_part(made.objects, LocalObjects(tmp_path / "dest"), taps="logprob")
    wanted = dataclasses.replace(made.table.recipe, taps=("logprob",))
    assert open_dataset(tmp_path / "dest").fingerprint == wanted.fingerprint()


@pytest.mark.parametrize("kind", ["SHAPED", "SCALED"])
def test_datasets_are_joined_one_after_the_other(kind: str, tmp_path: Path) -> None:
    taps = getattr(stored, kind)
    one = stored.copied(tmp_path / "a", taps=taps, keep=("url",))
    units = ((7, 0), (9, 2, 11))
    two = stored.build(
        tmp_path / "b", units, taps=taps, seed=5, keep=("url",), scales_of=one, **OTHER
    )
    dest = LocalObjects(tmp_path / "dest")
    told = merge([one.objects, two.objects], dest)
    ds = checked(dest)
    assert (told.units, told.rows) == (7, 111 + 29)
    docs = sum(map(len, stored.UNITS))
    moved = two.index.copy()
    moved["doc"] += docs
    assert ds.index(0, told.rows).tobytes() == np.concatenate([one.index, moved]).tobytes()
    for tap in ds.taps:
        parts = [open_dataset(made.path).read(tap, 0, len(made.index)) for made in (one, two)]
        assert np.array_equal(ds.read(tap, 0, told.rows), np.concatenate(parts))
        assert ds.statistics(tap).count == told.rows
    first, second = (open_dataset(made.path).documents() for made in (one, two))
    table = ds.documents()
    assert table["doc"].to_pylist() == [*range(docs + 5)]
    for name in ("tokens", "skipped", "preview", "url"):
        assert table[name].to_pylist() == first[name].to_pylist() + second[name].to_pylist()
    assert np.array_equal(
        ds.document(docs + 2).index["token_id"],
        open_dataset(two.path).document(2).index["token_id"],
    )
    assert ds.recipe.corpus == ("12-ab", "34-cd")
    assert [origin["first_doc"] for origin in Ledger(dest).table().made_of] == [0, docs]
    batch = next(iter(ds.batches([ds.taps[0]], 50, seed=1)))
    assert len(batch["index"]) == 50


def test_a_corpus_file_comes_from_one_part_alone(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a")
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)
    grown = stored.copied(tmp_path / "grown", ((3,), (2,)), grown=(1,), corpus=("78-gh",))
    later = stored.build(tmp_path / "later", ((4,),), corpus=("1-cd",), corpus_source="/c/new")
    joined = LocalObjects(tmp_path / "joined")
    merge([one.objects, two.objects], joined)
    for unit in (0, 1):
        copy_part(one.objects, LocalObjects(tmp_path / f"part-{unit}"), units=[unit])

    def refused(file: str, *sources: Objects) -> None:
        dest = LocalObjects(tmp_path / "dest")
        named = f"{sources[-2].url} and {sources[-1].url} both hold the documents of {file}; leave"
        with pytest.raises(ConfigError, match=named):
            merge(sources, dest)
        assert not dest.root.exists()

    refused("/corpora/other.jsonl", one.objects, two.objects, two.objects)
    refused("/corpora/other.jsonl", joined, two.objects)
    refused("/c/new", one.objects, grown.objects, later.objects)
    refused("/corpora/tiny.jsonl", *(LocalObjects(tmp_path / f"part-{n}") for n in (0, 1)))


MADE_APART = "extract both corpora as one dataset, or --add-corpus one"


@pytest.mark.parametrize(("recipe", "reason"), [
    ({"where": "doc < 3 and pos > 0"}, f"--where 'doc < 3 and pos > 0'.*{MADE_APART}"),
    ({"dedupe": True}, f"--dedupe, and nothing tells .*{MADE_APART}"),
    ({"max_docs": 2}, "a ends at its --max-docs, .*; merge it last, or add them first"),
    ({"max_tokens": 7}, "a ends at its --max-tokens, .*; merge it last, or add them first"),
    ({"max_docs": 2, "shuffle_docs": 3}, "a is a sample of its corpus"),
])  # fmt: skip
def test_what_a_merge_would_make_untrue_is_refused(
    recipe: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    one = stored.build(tmp_path / "a", ((5,), (3,)), **recipe)
    two = stored.build(tmp_path / "b", ((4,),), seed=5, **OTHER, **recipe)
    with pytest.raises(ConfigError, match=reason) as raised:
        merge([one.objects, two.objects], LocalObjects(tmp_path / "dest"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("first", "last", "merged"), [
    (9, 9, None),  # neither corpus had as many documents
    (9, 1, 3),
    (None, 1, 3),
])  # fmt: skip
def test_a_limit_of_the_last_part_counts_all_documents(
    first: int | None, last: int, merged: int | None, tmp_path: Path
) -> None:
    one = stored.build(tmp_path / "a", ((5,), (3,)), max_docs=first, max_tokens=100)
    two = stored.build(tmp_path / "b", ((4,),), max_docs=last, max_tokens=100, **OTHER)
    dest = LocalObjects(tmp_path / "dest")
    merge([one.objects, two.objects], dest)
    recipe = checked(dest).recipe
    assert (recipe.max_docs, recipe.max_tokens) == (merged, None)


def refuses_an_extraction(begun: Objects, table: Table) -> None:
    """What was begun there is not taken for units of another table, and stays as it is."""
    before = [*begun.list()]
    if any(map(fmt.parse_done_key, before)):
        with pytest.raises(ConfigError, match="a unit that no table names: .* merge"):
            Ledger(begun).create_table(table)
        assert [*begun.list()] == before


@pytest.mark.parametrize("verb", ["part", "merge"])
def test_what_is_killed_cannot_be_opened_and_the_same_command_continues(
    verb: str, tmp_path: Path
) -> None:
    one = stored.copied(tmp_path / "a", ((5, 21), (4,)))
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)

    def make(dest: Objects) -> Assembled:
        if verb == "merge":
            return merge([one.objects, two.objects], dest)
        return copy_part(one.objects, dest, taps="mlp_out.1")

    root, stopped = tmp_path / "dest", 0
    while True:
        try:
            told = make(stored.Stopping(root, 3 + 2 * stopped))
            break
        except stored.Stopped:
            stopped += 1
            with pytest.raises(StoreError, match="no dataset there"):
                open_dataset(str(root), partial=True)
            refuses_an_extraction(LocalObjects(root), one.table)
    assert stopped > 3
    whole = make(LocalObjects(tmp_path / "whole"))
    assert (told.rows, told.units, told.bytes) == (whole.rows, whole.units, whole.bytes)
    assert told.units_there > 0
    assert stored.unit_files(root) == stored.unit_files(tmp_path / "whole")
    checked(LocalObjects(root))
    assert make(LocalObjects(root)).units_there == told.units, "what is there stays as it is"


def test_other_datasets_are_not_merged_and_one_line_says_what_differs(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a", taps=stored.SCALED)
    dest = LocalObjects(tmp_path / "dest")

    def refused(other: stored.Stored, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            merge([one.objects, other.objects], dest)
        assert not dest.root.exists()

    def other(name: str, **changes: Any) -> stored.Stored:
        return stored.build(tmp_path / name, ((3,),), **{"taps": stored.SCALED, **OTHER, **changes})

    refused(other("b", seq_len=4), "differ in seq-len: 8 and 4; extract both by one recipe")
    refused(other("c", every=2), "differ in every: None and 2")
    refused(
        other("d", corpus=("56-ef", "12-ab")),
        f"{one.path} and {tmp_path / 'd'} both hold the documents of /corpora/other.jsonl",
    )
    refused(other("e"), "have different int8 scales for q.1")
    weights = other("f", scales_of=one)
    weights.objects.delete(fmt.MODEL)
    weights.ledger.check_weights({"embed": "cc"})
    refused(weights, "were made with different weights")
    with pytest.raises(ConfigError, match="needs at least two datasets"):
        merge([one.objects], dest)
    shuffle(one.objects, LocalObjects(tmp_path / "mixed"), seed=1)
    with pytest.raises(ConfigError, match="was shuffled; merge the dataset that it was made from"):
        merge([LocalObjects(tmp_path / "mixed"), other("g").objects], dest)
    with pytest.raises(ConfigError, match="--units: .* was shuffled"):
        copy_part(LocalObjects(tmp_path / "mixed"), dest, units=[0])
    with pytest.raises(StoreError, match="1 of 1 units|0 of 1 units are done"):
        unfinished = stored.build(tmp_path / "h", ((3,),), taps=stored.SCALED, commit=[], **OTHER)
        merge([one.objects, unfinished.objects], dest)


def test_a_merge_says_in_one_line_why_a_place_or_a_dataset_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stored.copied(tmp_path / "a")
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)
    dest = LocalObjects(tmp_path / "dest")

    def refused(match: str, other: stored.Stored = two, dest: Objects = dest) -> None:
        with pytest.raises(SpileError, match=match) as raised:
            merge([one.objects, other.objects], dest)
        assert "\n" not in str(raised.value)
        assert Ledger(dest).read_table() is None or dest.url == one.objects.url

    refused("must not contain one another", dest=LocalObjects(one.path))
    refused("must not contain one another", dest=LocalObjects(two.path / "inside"))
    named = {
        tap: stored.TapInfo((size,), "float32", (f"of_{tap}",)) for tap, size in stored.TAPS.items()
    }
    refused(
        "store their taps differently", stored.build(tmp_path / "c", ((3,),), taps=named, **OTHER)
    )
    refused("holds no rows", stored.build(tmp_path / "d", ((0,),), **OTHER))
    home = LocalObjects(tmp_path / "home")
    home.create("letter.txt", b"dear")
    refused("holds letter.txt, which belongs to no dataset; choose an empty place", dest=home)
    with monkeypatch.context() as full:
        full.setattr(LocalObjects, "free_bytes", lambda self: 10)
        refused(r"GB would be written, but only 0.00 GB are free")
    merge([one.objects, two.objects], dest)
    for sources in ([two, one], [one, stored.build(tmp_path / "f", ((4,),), **OTHER)]):
        with pytest.raises(ConfigError, match="holds another dataset, or other units or taps"):
            merge([each.objects for each in sources], dest)
    checked(dest)


def test_parts_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.LATENTS, **stored.ENCODED)
    dest = LocalObjects(tmp_path / "dest")
    with pytest.raises(ConfigError, match="has 5 units, 0 to 4"):
        copy_part(made.objects, dest, units=[3, 5])
    with pytest.raises(
        ConfigError, match=r"mlp_out_latents.1, mlp_out_latent_ids.1 go together; give all"
    ):
        copy_part(made.objects, dest, taps="mlp_out_latents.1")
    with pytest.raises(ConfigError, match="no tap 'z.9'"):
        copy_part(made.objects, dest, taps="z.9")
    copy_part(made.objects, dest, units=[1])
    with pytest.raises(ConfigError, match="or other units or taps of this one"):
        copy_part(made.objects, dest, units=[2])
    assert parse_units("3, 0-2,2", 5) == [0, 1, 2, 3]
    assert parse_units("99999990-99999999,3-99999999", 5) == [3, 4, 5]
    for text in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(ConfigError, match="is not a unit"):
            parse_units(text, 5)


@pytest.mark.varied
def test_damage_is_not_copied(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a")
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)
    for number, file in enumerate(two.done(0).files()):
        dest = LocalObjects(tmp_path / f"dest-{number}")
        stored.flip(two.path / file.key, file.bytes - 1)
        with pytest.raises(SpileError, match="checksum does not match"):
            merge([one.objects, two.objects], dest)
        stored.flip(two.path / file.key, file.bytes - 1)
        assert Ledger(dest).read_table() is None


@pytest.mark.full
def test_parts_and_merges_of_buckets(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a")
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)
    bucket = open_objects(servers.new_s3_store())
    merge([one.objects, two.objects], bucket)
    copy_part(bucket, LocalObjects(tmp_path / "dest"), units=[5])
    assert checked(LocalObjects(tmp_path / "dest")).index(0, 7)["doc"][0] == 10
    assert verify(bucket, quick=True).ok


def test_the_commands_say_what_was_made(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a")
    two = stored.copied(tmp_path / "b", ((7, 0),), seed=5, **OTHER)
    said = run("merge", one.path, two.path, tmp_path / "both")
    assert said.code == 0, said.err
    assert said.out.startswith(f"{tmp_path / 'both'}: 118 rows of 2 taps in 6 units, ")
    said = run("copy", tmp_path / "both", tmp_path / "part", "--taps", "mlp_out:1", "--units", "5")
    assert said.out.startswith(f"{tmp_path / 'part'}: 7 rows of 1 tap in 1 unit, ")
    part = run("copy", tmp_path / "both", tmp_path / "part", "--units", "x")
    assert (part.code, part.err.count("\n")) == (2, 1)
    part = run("copy", tmp_path / "both", tmp_path / "part", "--units", "5-99999999")
    assert (part.code, part.err.count("\n")) == (2, 1) and "has 6 units, 0 to 5" in part.err
