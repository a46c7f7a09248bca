"""`spile launch` as it is typed: real slices here, what is refused first, and users' troubles.

Hosts with an sshd each, one of them down at launch, and a real Slurm are in tests/chaos; worlds
with a missing process, other arguments or other versions in test_world.py; disks that are full in
test_disk.py; a gcloud whose sign-in has expired in tests/launch/test_gcloud_run.py.
"""

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chaos.harness import Work, check_refused, check_same, run
from support import tiny
from support.launches import IMAGE, SECRET
from support.worlds import wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that holds the folders of runs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    run("launch", "stop", "local", "--slices", 4, "--name", "run1")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """This spile, under a name with a space in it."""
    path = tmp_path / "my spile"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m spile.cli "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.full
def test_slices_started_here_share_the_work_and_are_looked_at_and_stopped(
    home: Path, program: Path, model: Path, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    work = Work(model, corpus)
    work.extract(tmp_path / "reference")
    who = ("--slices", 2, "--name", "run1")
    how = ("--spile", program, "--max-restarts", 0, "--env", "JAX_PLATFORMS=cpu")
    asked = ("launch", "local", *who, *how, "--", *work.flags("acts"))
    started = run(*asked)
    assert started.code == 0, started.err
    assert started.out.startswith("slice 0: started (pid ")
    assert run("launch", "status", "local", *who).out.startswith("slice 0: running")
    again = run(*asked)
    assert again.out.count("already running") == 2, again.out + again.err

    def ended() -> bool:
        return "running" not in run("launch", "status", "local", *who).out

    wait_until(ended, 90, lambda: run("launch", "logs", "local", *who).out)
    status = run("launch", "status", "local", *who, "--json")
    assert [host["out"][:24] for host in status.json] == ["ended with exit code 0: "] * 2
    check_same(tmp_path / "acts", tmp_path / "reference")
    logs = run("launch", "logs", "local", *who, "--lines", 3)
    assert "== slice 1\n" in logs.out
    stopped = run("launch", "stop", "local", *who)
    assert stopped.out == "slice 0: not running\nslice 1: not running\n"
    assert {path.stat().st_mode & 0o077 for path in home.rglob("*") if path.is_file()} == {0}


def test_a_dry_run_prints_what_would_run_and_runs_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    work = ("--model", "demo", "--corpus", "demo", "--taps", "embed", "--out", "acts")
    how = ("--name", "run1", "--secret", "HF_TOKEN", "--dry-run")
    shown = run("launch", "local", *how, "--", "extract", *work)
    assert shown.code == 0, shown.err
    assert "supervise -- extract --model demo --corpus demo" in shown.out
    assert "export HF_TOKEN='***'" in shown.out
    assert SECRET not in shown.out
    assert not list(home.iterdir())


def hosts(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


EXTRACT = ("--", "--model", "demo", "--corpus", "demo", "--taps", "embed", "--out", "gs://b/acts")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("local", "--", "--modle", "demo"), "--modle"),
        (("local", "--", "--model", "demo"), "--out is missing"),
        (("local", "--", "--out", "x", "--seq-len", "2.5"), "--seq-len"),
        (("local",), "--out is missing"),
        (("local", "--slices", "0", *EXTRACT), "--slices must be at least 1"),
        (("local", "--slices", "two", *EXTRACT), "--slices"),
        (("local", "--secret", "NO_SUCH", *EXTRACT), "--secret NO_SUCH: it is not set here"),
        (("local", "--secret", "A=b", *EXTRACT), "--secret takes a name"),
        (("local", "--env", "A-B=c", *EXTRACT), "'A-B'"),
        (("local", "--max-restarts", "-1", *EXTRACT), "--max-restarts"),
        (("local", *EXTRACT, "--process-id", "1"), "--process-id: the launcher sets it"),
        (("docker", *EXTRACT), "--container"),
        (("docker", "--container", "spile:latest", *EXTRACT), "IMAGE@sha256:DIGEST"),
        (("ssh", "--hosts", "HOSTS", "--", "--out", "acts"), "--out acts: give the absolute path"),
        (("ssh", "--hosts", "no-such-file", *EXTRACT), "--hosts no-such-file: No such file"),
        (("gcloud", *EXTRACT), "--zone is missing"),
        (("docker", "--container", IMAGE, "--", "--out", "acts"), "absolute path"),
        (("slurm", "--container", IMAGE, "--", "--out", "acts"), "absolute path"),
        (("docker", "--container", IMAGE, "--", "--out", "/a"), "lost with its container"),
        (
            ("docker", "--container", IMAGE, "--mount", "/a:/a:ro", "--", "--out", "/a/b"),
            "lost with its container",
        ),
        (("kubernetes", "--container", IMAGE, "--", "--out", "/a"), "mounted there by --claim"),
        (("docker", "--container", IMAGE, "--folder", "/x", *EXTRACT), "--folder"),
        (("docker", "--container", IMAGE, "--spile", "x", *EXTRACT), "--spile"),
        (("gcloud", "--zone", "a", "--tpu", "x", "--slices", "2", *EXTRACT), "--tpu names 1"),
        (("kubernetes", *EXTRACT), "--container"),
        (("sky", *EXTRACT, "--share", "0/2"), "--share"),
        (("moon", *EXTRACT), "moon"),
    ],
)
def test_what_can_be_known_wrong_here_is_refused_here(
    words: tuple[str, ...], named: str, home: Path, tmp_path: Path
) -> None:
    file = str(hosts(tmp_path, "h1\nh2\n"))
    result = run("launch", *(file if word == "HOSTS" else word for word in words))
    check_refused(result, 2, named)
    assert not list(home.iterdir())


def test_every_target_shows_what_it_would_run(tmp_path: Path) -> None:
    targets = {
        "local": (), "docker": ("--container", IMAGE), "slurm": (), "sky": (),
        "ssh": ("--hosts", str(hosts(tmp_path, "h1\n"))), "gcloud": ("--zone", "a"),
        "kubernetes": ("--container", IMAGE),
    }  # fmt: skip
    for target, flags in targets.items():
        shown = run("launch", target, *flags, "--dry-run", *EXTRACT)
        assert shown.code == 0, shown.err
        assert "gs://b/acts" in shown.out, target
        seen = {"docker": ("--mount", "/m:/m"), "kubernetes": ("--claim", "c:/m")}.get(target, ())
        out = run("launch", target, *flags, *seen, "--dry-run", *EXTRACT[:-1], "/m/acts")
        assert out.code == 0, out.err
        for action in ("status", "logs", "stop"):
            shown = run("launch", action, target, *flags, "--dry-run")
            assert (shown.code, bool(shown.out)) == (0, True), shown.err


# -- what users meet -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "named"),
    [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "Could not resolve hostname")],
)
def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(
    host: str, named: str, tmp_path: Path
) -> None:
    if not shutil.which("ssh"):
        pytest.skip("needs openssh-client")
    config = tmp_path / "config"
    config.write_text(f"Port {tiny.free_port()}\n")
    where = ("--hosts", hosts(tmp_path, f"{host}\n"), "--ssh-config", config)
    for words in (("ssh", *where, *EXTRACT), ("status", "ssh", *where)):
        check_refused(run("launch", *words), 3, f"{host} (slice 0)", named, "the same command")


def test_a_tool_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for target in ("slurm", "sky"):
        program = {"slurm": "sbatch", "sky": "sky"}[target]
        check_refused(run("launch", target, *EXTRACT), 3, f"{program} is not installed here")


class Expired(BaseHTTPRequestHandler):
    """A bucket's server whose token has expired."""

    def do_GET(self) -> None:
        body = b"<Error><Code>ExpiredToken</Code><Message>It has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_credentials_that_have_expired_are_named_and_not_shown(
    model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Expired) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
                            "ACCESS_KEY_ID": "AKIAMINE", "SECRET_ACCESS_KEY": "sesame",
                            "REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        result = run("extract", *Work(model, corpus).flags("s3://ours/acts"))
        check_refused(result, 3, "ExpiredToken", "check the credentials")
        assert "sesame" not in result.err
        server.shutdown()


def test_every_trouble_of_the_guide_is_tried_somewhere() -> None:
    root = Path(__file__).parents[1]
    guide = (root.parent / "docs/deploy.md").read_text()
    rows = re.findall(r"^\| .* \| `(.*)` \|$", guide.partition("## Troubles")[2], re.MULTILINE)
    assert len(rows) > 12
    for row in rows:
        file, _, test = row.partition("::")
        assert f"def {test}(" in (root / file).read_text(), row
