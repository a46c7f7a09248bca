"""From flags to a job and a target, and from the answers of hosts to lines for people."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import ConfigError
from spile.launch.command import Result
from spile.launch.flags import TARGETS, add_launch
from spile.launch.gcloud import Gcloud
from spile.launch.kubernetes import Kubernetes
from spile.launch.local import Local
from spile.launch.run import build_job, check_out, told
from spile.launch.sky import Sky
from spile.launch.slurm import Slurm
from spile.launch.ssh import Ssh
from spile.launch.target import LaunchTarget
from support.launches import IMAGE


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_launch(parser)
    return parser.parse_args([*words])


def built(arguments: argparse.Namespace) -> LaunchTarget:
    return TARGETS[arguments.target].build(arguments)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["local", "--slices", "2"], Local),
        (["docker", "--container", IMAGE], Local),
        (["gcloud", "--zone", "z"], Gcloud),
        (["slurm", "--world-size", "2"], Slurm),
        (["kubernetes", "--tpu", "v5e:4x4"], Kubernetes),
        (["sky", "--spot"], Sky),
    ],
)
def test_flags_make_the_target_that_they_name(words: list[str], kind: type[Any]) -> None:
    assert isinstance(built(parse(*words)), kind)


def test_hosts_are_read_from_a_file_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("me@one\ntwo 10.0.0.2\n")
    target = built(parse("ssh", "--hosts", str(hosts)))
    assert isinstance(target, Ssh) and len(target.lines) == 2
    with pytest.raises(ConfigError, match="--hosts /none: No such file"):
        built(parse("ssh", "--hosts", "/none"))


def test_a_job_takes_values_from_here_and_secrets_never_from_the_line() -> None:
    words = ("slurm", "--name", "r", "--env", "A=1", "--env", "B", "--secret", "T", "--", "--x")
    job = build_job(parse(*words), {"B": "2", "T": "hidden", "C": "3"})
    assert (job.name, job.extract) == ("r", ("--x",))
    assert (dict(job.env), dict(job.secrets)) == ({"A": "1", "B": "2"}, {"T": "hidden"})
    for given, said in (
        (("--env", "B"), "--env B: it is not set here"),
        (("--secret", "T=x"), "--secret takes a name"),
        (("--max-restarts", "-1"), "--max-restarts must be at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_job(parse("slurm", *given), {})


@pytest.mark.parametrize(
    ("words", "out", "said"),
    [
        (["ssh", "--hosts", "h"], "acts", "give the absolute path of a folder"),
        (["kubernetes", "--container", IMAGE], "/acts", "mounted there by --claim"),
        (["docker", "--container", IMAGE], "/acts", "mounted there by --mount"),
        (["docker", "--container", IMAGE, "--mount", "/d:/acts:ro"], "/acts", "--mount"),
    ],
)
def test_what_would_be_written_out_of_sight_is_refused(
    words: list[str], out: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_out(parse(*words), out)


@pytest.mark.parametrize(
    ("words", "out"),
    [
        (["ssh", "--hosts", "h"], "gs://b/acts"),
        (["local"], "acts"),
        (["docker", "--container", IMAGE, "--mount", "/d:/acts"], "/acts/one"),
        (["kubernetes", "--container", IMAGE, "--claim", "c:/acts"], "/acts"),
        (["sky"], None),
    ],
)
def test_what_is_seen_again_is_not(words: list[str], out: str | None) -> None:
    check_out(parse(*words), out)


@pytest.mark.parametrize("action", ["submit", "status", "logs", "stop"])
def test_every_action_is_commands_that_nothing_has_run(action: str) -> None:
    arguments = parse("slurm") if action == "submit" else parse(action, "slurm")
    job = build_job(arguments, {})
    assert built(arguments).commands(action, job, 5)


def test_hosts_are_reported_by_name_and_their_output_is_escaped() -> None:
    results = [Result("a", 0, "started\n", ""), Result("b", 1, "", "no"), Result("", 0, "x", "")]
    assert told("submit", results) == "a: started\nx\n"
    assert told("logs", results[:1]) == "== a\nstarted\n"
    assert told("logs", [Result("a", 0, "\x1b[31m", "")]) == "== a\n\\x1b[31m\n"
