"""The identity of an engine's files: their names and bytes, in order, and not their place."""

from pathlib import Path

from spile.interop.ingest.ingest_format import identity_of


def test_the_identity_is_of_names_and_bytes_and_order(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("one", "two"):
            (tmp_path / folder / name).write_text(name)
    first, second = tmp_path / "a" / "one", tmp_path / "a" / "two"
    found = identity_of([first, second])
    assert identity_of([tmp_path / "b" / "one", tmp_path / "b" / "two"]) == found
    assert identity_of([second, first]) != found
    assert identity_of([first]) != found != identity_of([first, second], "more")
    second.write_text("TWO")
    assert identity_of([first, second]) != found
