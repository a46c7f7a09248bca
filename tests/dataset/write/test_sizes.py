"""The bytes that a unit will take, against those that it took."""

from pathlib import Path

import pytest

import stored
from spile.dataset.write.sizes import unit_bytes
from spile.dataset.write.unit_writer import UnitWriter


@pytest.mark.parametrize("shard_bytes", [60, 1000, 1 << 30])
@pytest.mark.parametrize("taps", [stored.TAPS, stored.SHAPED, stored.SCALED])
def test_every_unit_takes_the_bytes_that_were_foreseen(
    taps: stored.Taps, shard_bytes: int, tmp_path: Path
) -> None:
    made = stored.build(tmp_path / "out", taps=taps, shard_bytes=shard_bytes, keep=("url",))
    for unit in range(len(made.table.units)):
        done = made.done(unit)
        documents = stored.describe_documents(made.table, unit, made.read[unit])
        foreseen = unit_bytes(made.table.taps, [done.rows], documents, shard_bytes)
        assert foreseen == sum(file.bytes for file in done.files())


def test_parts_of_a_unit_are_files_of_their_own(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", taps=stored.TAPS)
    unit, index = 1, made.read[1]
    parts = [20, 0, len(index) - 20]
    documents = stored.describe_documents(made.table, unit, index)
    written, first = [], 0
    for part, rows in enumerate(parts):
        writer = UnitWriter(
            made.objects, unit, index, made.table.taps, 100, attempt="together", part=part,
            run=(first, rows),
        )  # fmt: skip
        for tap in made.table.taps:
            begin = made.starts[unit] + first
            writer.write(tap, made.rows[tap][begin : begin + rows])
        written.append(writer)
        first += rows
    others = [writer.finish_part() for writer in written[1:]]
    done = written[0].finish(
        others, table=documents, fingerprint="f", tokens=1, documents=1, contexts=1, skipped={},
        text_digest="t", made_by={},
    )  # fmt: skip
    foreseen = unit_bytes(made.table.taps, parts, documents, 100)
    assert foreseen == sum(file.bytes for file in done.files())
