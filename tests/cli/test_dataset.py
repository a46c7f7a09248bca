"""What the command prints about a dataset that was audited, exported, compacted or pushed."""

import argparse
import os
import pty
from pathlib import Path

import pytest

from spile.cli.dataset import compact_text, export_text, push_text, rm, verify_text
from spile.dataset.maintain.compact import Compacted
from spile.dataset.maintain.verify import Report
from spile.interop.export import Exported
from spile.interop.hub.push import Pushed
from support import stored


def test_a_sound_dataset_is_one_line() -> None:
    report = Report(units=3, units_done=3, rows=1234, bytes=5_000_000)
    told = "acts: whole and sound (3 of 3 units, 1,234 rows, 5.0 MB read)"
    assert verify_text("acts", report) == told
    report = Report(units=3, units_done=2, quick=True)
    assert verify_text("acts", report) == (
        "acts: sound so far (2 of 3 units, 0 rows, 0 B by size and etag)"
    )
    empty = Report(units=3, units_done=3)
    assert "sound, but without rows (3 of 3 units, 0 rows" in verify_text("acts", empty)
    report = Report(units=3, units_done=3, resumed=2)
    assert "read, 2 units of them by the earlier audit)" in verify_text("acts", report)


def test_faults_come_first_and_orphans_with_what_to_do() -> None:
    report = Report(units=1, units_done=1, faults=["a\x1b: bad"], orphans=["b", "c"])
    assert verify_text("my acts", report).splitlines() == [
        "fault: a\\x1b: bad",
        "orphan: b",
        "orphan: c",
        "2 orphans, harmless; `spile gc 'my acts'` removes those of finished units",
        "my acts: 1 fault (1 of 1 units, 0 rows, 0 B read)",
    ]


def test_an_export_says_what_was_left_over() -> None:
    made = Exported("dest", "saelens", {"q.1": "float32"}, 104, 7, 8, 3, 2048)
    assert export_text(made).splitlines() == [
        "dest: 104 rows of 1 taps as saelens, 2.0 kB in 3 files",
        "sequences of 8 rows, cut from the stored order",
        "left over: the last 7 rows, too few for a sequence or a file",
    ]
    one = Exported("dest", "npy", {}, 104, 1, None, 3, 2048)
    assert export_text(one).splitlines()[1].startswith("left over: the last 1 row, ")


def test_a_compaction_is_held_against_what_was() -> None:
    made = Compacted("dest", 5000, 1, 40, 2, 80, 1000, 2000)
    assert compact_text(made) == (
        "dest: 5,000 rows in 1 unit (of 40), 2 shards (of 80), 1.0 kB (of 2.0 kB)"
    )


def test_a_push_says_how_to_get_it_back_and_whose_card_it_is() -> None:
    made = Pushed("https://hub/me/acts", "main", 4, 1, 10, False, "hf download me/acts")
    assert push_text(made).splitlines() == [
        "https://hub/me/acts: 4 files uploaded, 1 were there already",
        "its README.md was left as it is",
        "  load    hf download me/acts",
    ]


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("", False), ("no", False)])
def test_rm_asks_on_a_terminal(
    answer: str,
    gone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = stored.build(tmp_path / "out", ((3,), (4,)), taps={"embed": 4})
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        rm(argparse.Namespace(out=str(made.path), yes=False, json=False))
    os.close(ours)
    said = capsys.readouterr().out
    assert said.startswith(f"{made.path}: 7 rows of 1 tap, 2 documents, ")
    assert "remove it for good? [y/N] " in said
    assert made.path.exists() is not gone and ("nothing was removed" in said) is not gone
