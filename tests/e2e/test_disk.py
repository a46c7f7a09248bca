"""Places that cannot be written to, or have too little room, on a real, small disk."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.harness import Result, Work, check_refused, check_same, run
from support import tiny
from support.marks import some

OPTIONS = {
    "taps": "embed,resid_post:all,mlp_out:all",
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine mounts nothing: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def command(*arguments: str) -> Result:
    result = tiny.spile(*arguments, check=False)
    return Result(result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize("space", [True, False])
def test_an_output_below_a_file_is_refused(
    space: bool, model: Path, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    work, out = Work(model, corpus, OPTIONS), tmp_path / "file" / "out"
    check_refused(run("extract", *work.flags(out, ignore_space=space)), 3, out)
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_output_that_is_a_file_is_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    work = Work(model, corpus, OPTIONS)
    check_refused(run("extract", *work.flags(tmp_path / "file")), 3, tmp_path / "file")
    check_refused(run("status", tmp_path / "file"), 3, tmp_path / "file")


def test_an_output_where_nothing_can_be_made_is_refused(model: Path, corpus: Path) -> None:
    work, out = Work(model, corpus, OPTIONS), Path("/proc/spile")
    check_refused(run("extract", *work.flags(out)), 2, out)  # no room there
    check_refused(run("extract", *work.flags(out, ignore_space=True)), 3, out)


def test_a_disk_that_is_read_only_is_refused(small_disk: Path, model: Path, corpus: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro,size=64m", str(small_disk)], check=True)
    work, out = Work(model, corpus, OPTIONS), small_disk / "out"
    check_refused(run("extract", *work.flags(out)), 3, out, "Read-only")


@pytest.mark.parametrize("verb", ["extract", "plan"])
def test_a_disk_that_is_too_small_is_refused_unless_told_otherwise(
    verb: str, small_disk: Path, model: Path, corpus: Path
) -> None:
    work, out = Work(model, corpus, OPTIONS), small_disk / "out"
    check_refused(run(verb, *work.flags(out)), 2, out, "--ignore-space")
    assert list(small_disk.iterdir()) == []
    if verb == "plan":
        assert run(verb, *work.flags(out, ignore_space=True, calibrate="off")).code == 0
        assert list(small_disk.iterdir()) == []


@pytest.mark.full  # tests/chaos/test_faults.py fills the disk at any call
def test_a_full_disk_keeps_committed_units_and_the_run_resumes_with_room(
    small_disk: Path, model: Path, corpus: Path, tmp_path: Path
) -> None:
    work, out = Work(model, corpus, OPTIONS), small_disk / "out"
    flags = work.flags(out, ignore_space=True, quiet=True)
    check_refused(command("extract", *flags), 3, out, "disk full")
    audit = run("verify", out, "--partial", "--json").json
    assert (audit["faults"], audit["orphans"]) == ([], [])
    assert 0 < audit["units_done"] < audit["units"]
    check_refused(run("extract", *flags), 3, out, "disk full")  # and again, no worse
    assert run("verify", out, "--partial", "--json").json == audit

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)

    assert run("extract", *flags) == Result(0, "", "")
    work.extract(tmp_path / "whole")
    check_same(out, tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("free", some([0, 4096, 40960], 4096))
def test_a_disk_that_is_full_from_the_start_is_refused(
    free: int, small_disk: Path, model: Path, corpus: Path
) -> None:
    out = small_disk / "out"
    with (small_disk / "filler").open("wb") as file:
        file.write(bytes((2 << 20) - free))
    flags = Work(model, corpus, OPTIONS).flags(out, ignore_space=True, quiet=True)
    check_refused(command("extract", *flags), 3, out, "disk full")
    assert not list(out.rglob("*.tmp-*"))
    assert not list(out.rglob("*.safetensors"))
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert command("extract", *flags) == Result(0, "", "")
