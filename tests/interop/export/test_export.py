"""Exports in general: refusals, leftovers and messages."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.errors import ConfigError, StoreError
from spile.dataset.format import TapInfo
from spile.interop import export as module
from spile.interop.export import FORMATS, Exported, export
from spile.interop.export.export_source import ExportSource
from support import stored, tiny, zygote
from support.marks import some

Run = Callable[..., tuple[Path, Exported]]
TAPS = "resid_post:all"
# (Others need latents, features or more taps, and have tests of their own.)
OTHERS = ("delphi", "specforge", "deepspec", "neuronpedia", "circuit-tracer", "feature-table")
DENSE = [to for to in FORMATS if to not in OTHERS]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("to", DENSE)
def test_every_format_holds_every_row_and_says_what_is_left_over(
    floats: stored.Stored, exported: Run, tmp_path: Path, to: str
) -> None:
    dest, made = exported(floats, to, taps=TAPS)
    files = [path for path in dest.rglob("*") if path.is_file()]
    assert made == Exported(
        dest=str(dest),
        format=to,
        taps={f"resid_post.{i}": "float32" for i in range(3)},
        rows=104 if FORMATS[to].contexts else 111,
        left_over=7 if FORMATS[to].contexts else 0,
        context_size=8 if FORMATS[to].contexts else None,
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
    )
    assert names(tmp_path) == [to], "nothing else is left"


@pytest.mark.parametrize("to", DENSE)
def test_rows_that_are_lost_on_the_way_are_noticed(
    floats: stored.Stored, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[to]

    def damage(source: ExportSource, at: Path) -> Any:
        endings = (".arrow", ".parquet", ".npy", ".safetensors", ".pt", ".bin", ".gz")
        data = [p for p in at.rglob("*") if p.is_file() and (p.suffix in endings or to == "zarr")]
        largest = max(data, key=lambda path: (path.name != "zarr.json", path.stat().st_size))
        os.truncate(largest, largest.stat().st_size // 2)
        try:
            return form.count(source, at)
        except Exception as error:  # each library has its own
            raise StoreError(f"cannot be read back: {error}") from error

    monkeypatch.setitem(FORMATS, to, module.ExportFormat(**{**vars(form), "count": damage}))
    with pytest.raises(StoreError, match="rows were written, but it holds|cannot be read back"):
        export(str(floats.path), tmp_path / "dest", to=to, taps=TAPS)
    assert names(tmp_path) == []


def test_nothing_is_overwritten(floats: stored.Stored, tmp_path: Path) -> None:
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine").write_text("precious")
    file.write_text("precious")
    empty.mkdir()
    for dest in (full, file):
        with pytest.raises(ConfigError, match="exists already, and nothing is overwritten"):
            export(str(floats.path), dest, to="npy")
    assert (full / "mine").read_text() == file.read_text() == "precious"
    export(str(floats.path), empty, to="npy")
    assert "index.npy" in names(empty)


def test_what_appears_meanwhile_is_not_overwritten(
    floats: stored.Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, dest = FORMATS["npy"], tmp_path / "dest"

    def write(source: ExportSource, to: Path) -> int:
        dest.mkdir()
        (dest / "mine").write_text("precious")
        return form.write(source, to)

    monkeypatch.setitem(FORMATS, "npy", module.ExportFormat(**{**vars(form), "write": write}))
    with pytest.raises(StoreError, match="dest: Directory not empty"):
        export(str(floats.path), dest, to="npy")
    assert names(tmp_path) == ["dest"]
    assert names(dest) == ["mine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "cassette"}, "no such format; there are saelens, parquet"),
        ({"to": "npy", "context_size": 8}, "npy has no sequences"),
        ({"to": "saelens", "taps": TAPS, "context_size": 0}, "at least 1, got 0"),
        ({"to": "saelens", "taps": TAPS, "context_size": 112}, "111 rows do not fill one sequence"),
        ({"to": "saelens"}, "logprob has no TransformerLens name"),
        ({"to": "saelens", "taps": TAPS, "dtype": "bfloat16"}, "this format has float32, float16"),
        ({"to": "saev", "taps": TAPS, "dtype": "float16"}, "this format has float32"),
        ({"to": "saev", "taps": "resid_post.0,q.1"}, "one site and width"),
        ({"to": "saev", "taps": "logprob"}, "one site and width"),
        ({"to": "legacy", "taps": "resid_post.1,q.1"}, "one tap per layer"),
        ({"to": "legacy", "taps": "logprob"}, "one tap per layer"),
        ({"to": "npy", "taps": "resid_post.9"}, "no tap 'resid_post.9'"),
        ({"to": "npy", "taps": "resid_post:0-3"}, "no tap 'resid_post.3'"),
        ({"to": "npy", "taps": "resid_post:x"}, "'x' is not a layer"),
        ({"to": "npy", "taps": " , "}, "names no tap"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    floats: stored.Stored, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(str(floats.path), tmp_path / "dest", **options)
    assert names(tmp_path) == []


def test_a_destination_that_is_no_place_of_its_own_is_refused(floats: stored.Stored) -> None:
    with pytest.raises(ConfigError, match="inside the dataset"):
        export(str(floats.path), floats.path / "npy", to="npy")
    with pytest.raises(ConfigError, match="local directory"):
        export(str(floats.path), "gs://bucket/npy", to="npy")


def test_an_unfinished_dataset_is_not_exported(tmp_path: Path) -> None:
    partial = stored.build(tmp_path / "out", commit=(1,))
    with pytest.raises(StoreError, match="1 of 5 units are done"):
        export(str(partial.path), tmp_path / "dest", to="npy")


def test_too_large_values_are_known_from_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "random_rows", lambda rng, n, info: np.full((n, 6), 7e4, "float32"))
    made = stored.build(tmp_path / "out", taps={"resid_post.0": 6})
    with pytest.raises(ConfigError, match="reaches 7e\\+04, which float16 cannot hold"):
        export(str(made.path), tmp_path / "dest", to="npy", dtype="float16")
    assert export(str(made.path), tmp_path / "dest", to="npy").rows == 111


def test_the_command_prints_what_it_made(floats: stored.Stored, tmp_path: Path) -> None:
    out = str(floats.path)
    result = tiny.spile(
        "export", out, "--to", "saelens", str(tmp_path / "a"), "--taps", TAPS, "--context-size", "9"
    )
    assert "108 rows of 3 taps as saelens" in result.stdout
    assert "left over: the last 3 rows" in result.stdout
    result = tiny.spile("export", out, str(tmp_path / "b"), "--to", "npy", "--json")
    assert json.loads(result.stdout)["rows"] == 111
    result = tiny.spile("export", out, "--to", "npy", str(tmp_path / "b"), check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "nothing is overwritten" in result.stderr


_SLOW = """
import sys, time
from pathlib import Path
from spile.interop.export import export_source
from spile.interop.export import export
read = export_source.ExportSource.read
def slowly(self, *args):
    print("reading", flush=True)
    time.sleep(0.2)
    return read(self, *args)
export_source.ExportSource.read = slowly
export_source.WINDOW_BYTES = 100
export(sys.argv[1], sys.argv[2], to="npy")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_leaves_nothing_that_looks_whole(
    floats: stored.Stored, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = [sys.executable, "-c", _SLOW, str(floats.path), str(tmp_path / "dest")]
    with zygote.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=tiny.environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        while process.poll() is None:
            time.sleep(0.02)
    left = names(tmp_path)
    assert "dest" not in left
    assert len(left) == (number == signal.SIGKILL)
    assert all(name.startswith(".dest.") and name.endswith(".partial") for name in left)
    export(str(floats.path), tmp_path / "dest", to="npy")


def test_importing_it_imports_nothing_heavy() -> None:
    script = """
import sys, spile.interop.export
heavy = {"jax", "torch", "pyarrow", "datasets", "zarr", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=tiny.environment()
    )
    assert result.returncode == 0, result.stderr


_PEAK = """
import sys
from spile.interop.export import export_source
from spile.interop.export import export
export_source.WINDOW_BYTES = 1 << 20
export(sys.argv[1], sys.argv[2], to=sys.argv[3], dtype="float32")
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) - int(status["RssFile"].split()[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("to", some(["npy", "zarr", "parquet", "saelens", "openmoss", "saev"]))
def test_memory_does_not_grow_with_the_dataset(
    tmp_path: Path, large: stored.Stored, to: str
) -> None:
    """Exports 128 MiB of values in windows of 1 MiB; mapped files do not count as memory."""
    small = stored.build(tmp_path / "small", [[64]], taps=large.table.taps)
    peaks = [
        subprocess.run(
            [sys.executable, "-c", _PEAK, str(made.path), str(tmp_path / name), to],
            capture_output=True,
            text=True,
            check=True,
            env=tiny.environment(),
        ).stdout
        for name, made in (("a", small), ("b", large))
    ]
    few, many = (int(peak) // 1024 for peak in peaks)
    assert many - few < 48, (few, many)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    taps: stored.Taps = {
        "resid_post.0": TapInfo((2048,), "bfloat16", ("blocks.0.hook_resid_post",))
    }
    path = tmp_path_factory.mktemp("large") / "out"
    return stored.build(path, [[4096]] * 4, taps=taps, shard_bytes=8 << 20)


def test_the_next_export_removes_what_a_killed_one_left_and_nothing_else(
    floats: stored.Stored, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    arguments = [sys.executable, "-c", _SLOW, str(floats.path), str(dest)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "env": tiny.environment()}
    killed, alive = (zygote.Popen(arguments, **options) for _ in range(2))
    try:
        for process in (killed, alive):
            assert process.stdout is not None
            process.stdout.readline()
        alive.send_signal(signal.SIGSTOP)
        killed.kill()
        killed.wait()
        assert len(left := names(tmp_path)) == 2
        strangers = [".dest.01234567.partial", ".dest.old.partial", ".dest2.01234567.partial"]
        for name in strangers:
            (tmp_path / name / "rows").mkdir(parents=True)
            (tmp_path / name / "mine").write_text("kept")
        (tmp_path / ".dest.89abcdef.partial").mkdir()  # killed before there was anything in it
        export(str(floats.path), dest, to="npy")
        (staged,) = {*names(tmp_path)} - {*strangers, "dest"}
        assert staged in left  # the other's, which is alive
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()
    with pytest.raises(ConfigError, match="exists already"):
        export(str(floats.path), dest, to="npy")
    assert {*names(tmp_path)} == {*strangers, "dest"}
