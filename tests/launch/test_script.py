"""The scripts for hosts, run by a real shell: hostile words, two starts, a stop."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spile.launch import script
from spile.launch.command import Command, Result, run
from spile.launch.job import LaunchJob, Seat
from support.launches import HOSTILE, calls, contained, hostile_job, job, path_with, recorder
from support.worlds import wait_until

SEAT = Seat(slice=1, slices=2)


class Host:
    """A home in which scripts run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / ".spile/run1/1"

    def hand(self, text: str, **env: str) -> Result:
        command = Command(
            argv=("sh", "-s"), stdin=text, env={"HOME": str(self.folder), **env}, where="here"
        )
        return run(command, 30)

    def state(self, of: LaunchJob) -> script.State:
        (state,) = script.states(self.hand(script.status(of, SEAT)))
        return state

    def ended(self, of: LaunchJob) -> script.State:
        wait_until(lambda: self.state(of).name != "running", 20)
        return self.state(of)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "home").mkdir()
    host = Host(tmp_path / "home")
    yield host
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((host.run_folder / "group").read_text()), signal.SIGKILL)


def program(folder: Path, code: str) -> str:
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_hostile_words_arrive_as_they_are_and_none_is_run(host: Host, tmp_path: Path) -> None:
    tool = recorder(tmp_path / 'odd $(touch pwned) "name' / "it's spile")
    folder = tmp_path / "in here; exit 3"
    folder.mkdir()
    of = hostile_job(spile=str(tool), folder=str(folder), restarts=0)
    started = host.hand(script.start(of, SEAT))
    assert started.code == 0, started.err
    assert host.ended(of) == script.State("ended", 0, "")
    (call,) = calls(tool)
    assert call["argv"] == ["extract", *HOSTILE]
    for number, value in enumerate(HOSTILE):
        assert call["env"][f"E{number}"] == value
        assert call["env"][f"S{number}"] == value
    assert (call["env"]["MACHINE_ID"], call["env"]["TOTAL_MACHINES"]) == ("1", "2")
    assert call["env"]["PWD"] == str(folder)
    assert not list(tmp_path.rglob("pwned"))


def test_nothing_secret_is_written_and_what_is_written_is_ours_alone(
    host: Host, tmp_path: Path
) -> None:
    of = job(spile=str(recorder(tmp_path / "tool")), secrets={"TOKEN": "hf_shh"})
    assert host.hand(script.start(of, SEAT)).code == 0
    host.ended(of)
    files = [path for path in host.folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hf_shh" in path.read_bytes()]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_what_runs_is_not_started_twice_and_stops_when_told(host: Host, tmp_path: Path) -> None:
    code = "import time\nprint('at work', flush=True)\ntime.sleep(60)"
    of = job(spile=program(tmp_path, code))
    assert host.state(of) == script.State("absent", None, "")
    assert host.hand(script.stop(of, SEAT)).out == "never started here\n"
    assert host.hand(script.start(of, SEAT)).out.startswith("started (pid ")
    assert host.hand(script.start(of, SEAT)).out.startswith("already running (pid ")
    wait_until(lambda: host.state(of).said == "at work", 10)
    assert host.state(of) == script.State("running", None, "at work")
    assert host.hand(script.logs(of, SEAT, 5)).out == "at work\n"
    assert host.hand(script.stop(of, SEAT)).out == "stopped\n"
    assert host.state(of) == script.State("ended", 128 + signal.SIGTERM, "at work")
    assert host.hand(script.stop(of, SEAT)).out == "not running\n"


def test_what_does_not_stop_is_killed(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "GRACE", 1)
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)"
    code = f"{deaf}\nprint(1, flush=True)\ntime.sleep(60)"
    of = job(spile=program(tmp_path, code))
    host.hand(script.start(of, SEAT))
    wait_until(lambda: host.state(of).said == "1", 10)
    assert host.hand(script.stop(of, SEAT)).out == "killed: it did not stop within 1 s\n"
    assert host.state(of).name == "lost"
    assert "start it again" in str(host.state(of))


def test_a_run_outlives_the_shell_that_started_it(host: Host, tmp_path: Path) -> None:
    code = "import time, sys\ntime.sleep(0.5)\nprint('still here')\nsys.exit(5)"
    of = job(spile=program(tmp_path, code))
    began = time.monotonic()
    host.hand(script.start(of, SEAT))
    assert time.monotonic() - began < 20
    assert host.ended(of) == script.State("ended", 5, "still here")


def test_a_program_that_is_not_there_is_named(host: Host) -> None:
    missing = host.hand(script.start(job(spile="/no/$(touch pwned)"), SEAT))
    assert missing.code == 127
    assert missing.said == (
        "no program /no/$(touch pwned) here: install spile, or name it with --spile"
    )
    check_never_started(host, job())


def check_never_started(host: Host, of: LaunchJob, said: str = "") -> None:
    """Every host that is asked reports it."""
    assert str(host.state(of)) == (f"never started here: {said}" if said else "never started here")
    assert host.hand(script.logs(of, SEAT, 5)).out.startswith("never started here\n")
    assert host.hand(script.stop(of, SEAT)).out == "never started here\n"


def test_setup_runs_first_and_its_failure_is_told(host: Host, tmp_path: Path) -> None:
    tool = recorder(tmp_path / "tool")
    of = job(spile=str(tool), setup="export MADE=$E0; cat; echo ready", env={"E0": "a b"})
    assert host.hand(script.start(of, SEAT)).code == 0
    host.ended(of)
    assert calls(tool)[0]["env"]["MADE"] == "a b"
    failing = job(spile=str(tool), setup="echo no space left\nfalse\necho not reached")
    failed = host.hand(script.start(failing, SEAT))
    assert (failed.code, failed.said) == (1, "setup failed: no space left")
    assert len(calls(tool)) == 1
    check_never_started(host, failing, "no space left")
    assert host.hand(script.logs(failing, SEAT, 1)).out.endswith("\nno space left\n")


DOCKER = """
import pathlib
state, verb = pathlib.Path(__file__ + '.state'), sys.argv[1]
if verb == 'inspect':
    if not state.exists():
        sys.exit(1)
    print(state.read_text() if 'ExitCode' in str(sys.argv) else state.read_text().split()[0])
elif verb == 'run':
    state.write_text('running 0')
elif verb == 'stop':
    state.write_text('exited 130')
elif verb == 'logs':
    print('first\\tline')
"""


def test_container_values_are_in_the_environment_and_never_in_arguments(
    host: Host, tmp_path: Path
) -> None:
    tool = recorder(tmp_path / "bin/docker", body=DOCKER)
    env = {"PATH": path_with(tool.parent)}
    of = hostile_job(container=contained(device="tpu", mounts=("/a b:/c",)))
    assert "absent" in host.hand(script.status(of, SEAT), **env).out
    assert host.hand(script.start(of, SEAT), **env).said == "started"
    (call,) = [call for call in calls(tool) if call["argv"][0] == "run"]
    assert call["argv"][-len(HOSTILE) - 4 :] == [
        contained().image, "supervise", "--", "extract", *HOSTILE
    ]  # fmt: skip
    assert {"--privileged", "--net=host", "--volume=/a b:/c", "--env=S3"} <= set(call["argv"])
    for number, value in enumerate(HOSTILE):
        assert call["env"][f"S{number}"] == value
        assert f"--env=S{number}" in call["argv"]
    assert not [word for word in call["argv"] if word.startswith("--env=S0=")]
    assert host.hand(script.start(of, SEAT), **env).said == "already running"
    (running,) = script.states(host.hand(script.status(of, SEAT), **env))
    assert running == script.State("running", None, "first line")
    assert host.hand(script.stop(of, SEAT), **env).said == "stopped"
    (ended,) = script.states(host.hand(script.status(of, SEAT), **env))
    assert ended == script.State("ended", 130, "first line")
    assert host.hand(script.start(of, SEAT), **env).said == "started"
    assert ["rm", "spile-run1-1"] in [call["argv"] for call in calls(tool)]


def test_scripts_are_plain_sh(tmp_path: Path) -> None:
    for of in (job(setup="true"), job(container=contained())):
        for text in (
            script.start(of, SEAT), script.status(of, SEAT), script.logs(of, SEAT, 5),
            script.stop(of, SEAT),
        ):  # fmt: skip
            checked = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
            assert checked.stderr == ""
