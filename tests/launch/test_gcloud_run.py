"""TPUs that are missing, preempted, partly reached or not ours, with a faulty gcloud."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import LaunchError
from spile.launch.command import Command, Result, run
from spile.launch.gcloud import Gcloud, Keeper
from spile.launch.job import LaunchJob
from spile.launch.run import act, check
from support import tiny
from support.fake_gcloud import HOSTS, Cloud
from support.launches import calls, job, path_with, recorder
from support.worlds import wait_until

MADE: dict[str, Any] = {"accelerator_type": "v5litepod-16", "runtime_version": "v2"}
FULL = 'ERROR: (gcloud) There is no more capacity in the zone "a"; code RESOURCE_EXHAUSTED'
SECRET = "hf_never-on-a-command-line"


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path / "cloud")
    monkeypatch.setenv("PATH", path_with(tmp_path / "cloud/bin"))
    yield cloud
    cloud.end()


@pytest.fixture
def slept() -> list[float]:
    """Records how long it would have slept."""
    return []


def keeper(of: LaunchJob, slept: list[float], **changes: Any) -> Keeper:
    target = Gcloud(**{"zones": ("a",), **changes})

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(0.05)

    return Keeper(target, of, sleep=sleep)


def refused(keeper: Keeper) -> str:
    with pytest.raises(LaunchError) as caught:
        check("submit", keeper.submit())
    return str(caught.value)


def working(folder: Path, code: int = 0, **changes: Any) -> tuple[LaunchJob, Path]:
    """A job whose program records on which host it ran."""
    tool = recorder(folder / "spile", code)
    return job(spile=str(tool), secrets={"TOKEN": SECRET}, **changes), tool


def test_every_host_is_started_and_no_command_line_holds_the_secret(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("run1-0", "b")
    of, tool = working(tmp_path)
    (result,) = keeper(of, slept, zones=("a", "b")).submit()
    assert (result.code, result.out.count("started")) == (0, HOSTS)
    deadline = time.monotonic() + 10
    while len(calls(tool)) < HOSTS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [call["env"]["TOKEN"] for call in calls(tool)] == [SECRET] * HOSTS
    assert SECRET not in json.dumps(cloud.asked())
    assert cloud.verbs() == ["tpu-vm describe", "tpu-vm describe", "tpu-vm scp", "tpu-vm ssh"]
    assert not [path for path in cloud.folder.rglob(".spile-run1.sh")]


def test_only_a_host_that_was_not_reached_is_tried_again(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("run1-0", "a")
    cloud.fault("tpu-vm ssh", err="ssh: connect to host x port 22: Connection refused", host=1,
                code=255)  # fmt: skip
    script = tmp_path / "long"
    script.write_text('#!/bin/sh\necho here >>"$HOME/ran"\nexec sleep 60\n')
    script.chmod(0o755)
    of = job(spile=str(script))
    (result,) = keeper(of, slept).submit()
    assert result.code == 0
    assert "already running" in result.out
    assert slept == [5]
    assert [(cloud.home("run1-0", host) / "ran").read_text() for host in range(HOSTS)] == [
        "here\n", "here\n"
    ]  # fmt: skip


def test_a_zone_that_is_full_is_passed_over(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.fault("tpu-vm create", err=FULL, has="--zone=a")
    of, _ = working(tmp_path)
    (result,) = keeper(of, slept, zones=("a", "b"), **MADE).submit()
    assert result.code == 0
    assert cloud.tpus() == {"run1-0@b": "READY"}
    assert slept == []


def test_where_all_zones_are_full_it_waits_longer_each_time_and_gives_up(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    for _ in range(4):
        cloud.fault("tpu-vm create", err=FULL)
    of, _ = working(tmp_path)
    said = refused(keeper(of, slept, retries=3, **MADE))
    assert "no more capacity" in said
    assert "given up after 4 attempts" in said
    assert slept == [5, 10, 20]
    assert cloud.tpus() == {}


def test_a_tpu_that_is_preempted_is_made_again_and_the_run_started_again(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    marker = tmp_path / "finish"
    script = tmp_path / "long"
    script.write_text(
        f"#!/bin/sh\necho ran >>'{tmp_path}/ran'\nwhile [ ! -e '{marker}' ]; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    cloud.fault("tpu-vm ssh", has="@spile", preempt=True)
    of = job(spile=str(script))

    def watched(command: Command) -> Result:
        if cloud.verbs().count("tpu-vm create") == 2:
            marker.touch()
        return run(command)

    target = Gcloud(zones=("a",), keep=True, spot=True, **MADE)
    (result,) = Keeper(target, of, sleep=slept.append, call=watched).submit()
    assert (result.code, result.out) == (0, "finished"), result
    verbs = cloud.verbs()
    assert verbs.count("tpu-vm create") == 2
    assert verbs.count("tpu-vm delete") == 1
    assert (tmp_path / "ran").read_text() == "ran\n" * 2 * HOSTS
    assert cloud.tpus() == {"run1-0@a": "READY"}


def test_a_run_that_failed_for_good_is_not_started_again(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("run1-0", "a")
    of, tool = working(tmp_path, code=2)
    said = refused(keeper(of, slept, keep=True))
    assert "ended with exit code 2" in said
    assert "a restart would not help" in said
    assert len(calls(tool)) == HOSTS


def test_a_run_that_lost_a_process_is_started_again_until_it_is_given_up(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("run1-0", "a")
    of, tool = working(tmp_path, code=134)
    said = refused(keeper(of, slept, keep=True, retries=1))
    assert "ended with exit code 134" in said
    assert "given up after 2 attempts" in said
    assert len(calls(tool)) == 2 * HOSTS


def test_the_queue_is_waited_for_and_a_suspended_request_made_again(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    for state in ("WAITING_FOR_RESOURCES", "PROVISIONING", "SUSPENDED"):
        cloud.fault("queued-resources describe", state=state)
    of, _ = working(tmp_path)
    (result,) = keeper(of, slept, queued=True, spot=True, **MADE).submit()
    assert result.code == 0
    queue = [verb for verb in cloud.verbs() if verb.startswith("queued")]
    assert queue == [
        "queued-resources create", "queued-resources describe", "queued-resources describe",
        "queued-resources describe", "queued-resources delete", "queued-resources create",
        "queued-resources describe",
    ]  # fmt: skip
    assert slept == [30, 30, 5]


@pytest.mark.parametrize(
    ("verb", "err", "named"),
    [
        (
            "tpu-vm describe",
            "ERROR: (gcloud.compute.tpus) There was a problem refreshing your current auth tokens: "
            "('invalid_grant: Token has been expired or revoked.')\nPlease run:\n"
            "  $ gcloud auth login\n",
            "sign in again: gcloud auth login",
        ),
        ("tpu-vm create", "ERROR: (gcloud) PERMISSION_DENIED: not you", "PERMISSION_DENIED"),
        ("tpu-vm create", "ERROR: (gcloud) Quota limit 'TPUV5s' has been exceeded", "Quota limit"),
    ],
)
def test_what_no_retry_mends_is_told_at_once(
    verb: str, err: str, named: str, cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.fault(verb, err=err)
    of, _ = working(tmp_path)
    said = refused(keeper(of, slept, **MADE))
    assert named in said
    assert "\n" not in said
    assert slept == []


def test_a_tpu_that_is_not_there_is_named_unless_it_is_to_be_made(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    of, _ = working(tmp_path)
    assert "there is no TPU run1-0 in a, b: name one with --tpu" in refused(
        keeper(of, slept, zones=("a", "b"))
    )


def test_slices_that_failed_are_named_and_the_others_started(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("good", "a")
    of, _ = working(tmp_path)
    said = refused(keeper(of, slept, tpus=("good", "bad")))
    assert said.startswith("1 of 2 failed: bad: there is no TPU bad")


def test_status_logs_stop_and_delete_find_the_tpu(cloud: Cloud, tmp_path: Path) -> None:
    cloud.tpu("run1-0", "b")
    script = tmp_path / "long"
    script.write_text("#!/bin/sh\necho at work\nexec sleep 60\n")
    script.chmod(0o755)
    of, target = job(spile=str(script)), Gcloud(zones=("a", "b"), delete=True)
    assert act("submit", target, of, 0)[0].code == 0
    deadline = time.monotonic() + 10
    while True:
        status = [result.out for result in act("status", target, of, 0)]
        if status == ["running: at work"] * HOSTS or time.monotonic() > deadline:
            break
    assert status == ["running: at work"] * HOSTS
    assert act("logs", target, of, 3)[0].out == "at work\n" * HOSTS
    assert act("stop", target, of, 0)[0].code == 0
    assert cloud.tpus() == {}


def test_a_cloud_that_does_not_answer_is_told_by_status(cloud: Cloud) -> None:
    cloud.fault("tpu-vm describe", err="ERROR: (gcloud) UNAVAILABLE: try later")
    (result,) = act("status", Gcloud(zones=("a",)), job(), 0)
    assert (result.code, result.said) == (1, "ERROR: (gcloud) UNAVAILABLE: try later")


def test_hosts_that_do_not_answer_are_started_again(
    cloud: Cloud, slept: list[float], tmp_path: Path
) -> None:
    cloud.tpu("run1-0", "a")
    cloud.fault("tpu-vm ssh", has="@spile", err="ssh: connect to host x: Connection refused")
    of, tool = working(tmp_path)
    (result,) = keeper(of, slept, keep=True).submit()
    assert (result.code, result.out) == (0, "finished")
    assert len(calls(tool)) == 2 * HOSTS


def test_one_that_stays_ends_when_it_is_told_to(cloud: Cloud, tmp_path: Path) -> None:
    cloud.tpu("run1-0", "a")
    script = tmp_path / "long"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    flags = ("--zone", "a", "--name", "run1", "--keep", "--spile", str(script))
    recipe = ("--model", "demo", "--corpus", "demo", "--taps", "embed", "--out", "gs://b/acts")
    process = tiny.start("launch", "gcloud", *flags, "--", *recipe)
    wait_until(lambda: "tpu-vm ssh" in cloud.verbs(), 30)
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "interrupted" in said


def test_no_gcloud_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    of, _ = working(tmp_path)
    assert refused(keeper(of, [])) == (
        "run1-0: gcloud is not installed here; fix that and run the same command again: what "
        "already runs is left alone"
    )
