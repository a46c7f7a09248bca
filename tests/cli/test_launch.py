"""`spile launch` refuses here what every host would refuse there."""

from pathlib import Path

import pytest

from spile import cli
from spile.cli.launch import launch
from spile.core.errors import ConfigError
from support import stored


def asked(*words: str) -> None:
    launch(cli.make_parser().parse_args(["launch", "local", "--dry-run", *words]))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--", "--model", "demo"), "--out is missing: after -- come the arguments"),
        (("--", "--out", "acts", "--seq-len", "long"), "--seq-len"),
        (("--", "--out", "acts", "--nothing"), "--nothing"),
        (
            ("--", "--out", "acts", "--corpus", "c", "--taps", "t"),
            "--model is missing: give the whole recipe",
        ),
        (("--", "--out", "acts", "--model", "m", "--taps", "t"), "--corpus is missing"),
        (("--", "--out", "acts", "--model", "m", "--corpus", "c"), "--taps is missing"),
    ],
)
def test_options_of_extract_are_read_here(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        asked(*words)


def test_options_may_come_from_a_file_here_or_there(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\ncorpus = "c"\n')
    with pytest.raises(ConfigError, match="--taps is missing"):
        asked("--", "--out", "acts", "--config", str(file))
    asked("--", "--out", "acts", "--taps", "t", "--config", str(file))
    asked("--", "--config", str(tmp_path / "on_the_hosts.toml"))
    file.write_text('model = "m"\ncorpus = "c"\ntaps = "t"\nout = "acts"\n')
    words = ["launch", "sky", "--dry-run", "--", "--config", str(file)]
    with pytest.raises(ConfigError, match="--out acts: give the absolute path"):
        launch(cli.make_parser().parse_args(words))


def test_a_dataset_that_is_there_says_the_rest(tmp_path: Path) -> None:
    stored.build(tmp_path / "acts")
    asked("--", "--out", str(tmp_path / "acts"))


def test_a_dry_run_prints_the_command_of_every_slice(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ("--model", "demo", "--corpus", "demo", "--taps", "embed")
    asked("--slices", "2", "--", "extract", *recipe, "--out", "acts")
    told = capsys.readouterr().out
    assert "# slice 0\n" in told and "# slice 1\n" in told
