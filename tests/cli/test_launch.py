"""`spile launch` refuses here what every host would refuse there."""

import pytest

from spile import cli
from spile.cli.launch import launch
from spile.core.errors import ConfigError


def asked(*words: str) -> int:
    return launch(cli.make_parser().parse_args(["launch", "local", "--dry-run", *words]))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--", "--model", "demo"), "--out is missing: after -- come the arguments"),
        (("--", "--out", "acts", "--seq-len", "long"), "--seq-len"),
        (("--", "--out", "acts", "--nothing"), "--nothing"),
    ],
)
def test_options_of_extract_are_read_here(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        asked(*words)


def test_a_dry_run_prints_the_command_of_every_slice(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("--slices", "2", "--", "extract", "--model", "demo", "--out", "acts") == 0
    told = capsys.readouterr().out
    assert "# slice 0\n" in told and "# slice 1\n" in told
