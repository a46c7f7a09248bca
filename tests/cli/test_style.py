"""The format of program names, skip reasons and log lines."""

import json
import logging
from pathlib import Path

import pytest

from spile.cli.style import formatter, program, skipped
from spile.core.humanize import FIELDS


def test_reasons_are_said_with_their_counts_in_one_order() -> None:
    assert skipped({"too long": 2, "empty": 1}) == "1 empty, 2 too long"


def test_a_program_is_named_by_its_path_where_its_name_would_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "bin" / "tool"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program("tool", str(own)) == "bin/tool"
    monkeypatch.chdir("/")
    assert program("tool", str(own)) in (str(own), str(own.relative_to("/")))
    monkeypatch.setenv("PATH", str(own.parent))
    assert program("tool", str(own)) == "tool"


def test_lines_say_who_writes_them_as_text_and_as_json() -> None:
    record = logging.makeLogRecord({"msg": "a\x1bline", "levelname": "INFO", FIELDS: {"rows": 3}})
    assert formatter(as_json=False, who="share 1/2").format(record).startswith("spile [share 1/2]:")
    told = json.loads(formatter(as_json=True, who="share 1/2").format(record))
    assert told["place"] == "share 1/2" and told["level"] == "info" and told["rows"] == 3
    assert "\x1b" not in told["message"]
