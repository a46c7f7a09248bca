"""The command from end to end: what a user types, its output, and resuming."""

import dataclasses
import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer

import spile
from chaos.harness import (
    Work,
    check_refused,
    check_same,
    check_sound,
    content,
    differences,
    files,
    launch,
    run,
    said,
    wait_for,
)
from spile.core.config import Recipe, Runtime, flag_of
from support import tiny, zygote
from support.marks import some

VERBS = (
    "extract",
    "plan",
    "taps",
    "convert",
    "check",
    "compile",
    "export",
    "compact",
    "push",
    "fetch",
    "status",
    "ls",
    "verify",
    "gc",
)


@dataclasses.dataclass(frozen=True)
class Made:
    """A dataset that the command made in a new process."""

    work: Work
    out: Path


@pytest.fixture(scope="module")
def made(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    work = Work(model, corpus)
    out = tmp_path_factory.mktemp("made") / "out"
    tiny.spile("extract", *work.flags(out))
    return Made(work, out)


@pytest.mark.full
def test_what_the_compiler_optimizes_is_the_reference_still(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    """Compile as users do; the suite compiles quickly (`quick.py`)."""
    taps = "embed,resid_post:all,attn_out:1,mlp_hidden:1,logprob"
    options = {"taps": taps, "seq_len": 64, "compute_dtype": "float32", "max_docs": 12}
    work = Work(model, corpus, options)
    env = tiny.environment()
    env.pop("XLA_FLAGS", None)
    tiny.spile("extract", *work.flags(tmp_path / "out", store_dtype="float32"), env=env)
    checked = run("check", tmp_path / "out", "--samples", 2, "--json")
    assert checked.code == 0 and checked.json["ok"], checked.out


@pytest.fixture(scope="module")
def killed(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same dataset, begun by a process that was killed after three units."""
    out = tmp_path_factory.mktemp("killed") / "begun"
    process = launch({"kill": "commit after", "nth": 3}, "extract", *made.work.flags(out))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(list((out / "done").glob("*/*"))) == 3
    return out


@pytest.fixture
def begun(killed: Path, tmp_path: Path) -> Path:
    """A copy of the dataset."""
    return Path(shutil.copytree(killed, tmp_path / "begun"))


@pytest.mark.full
def test_a_run_without_rows_is_incomplete_and_allows_another_recipe(
    made: Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    nothing = run("extract", *made.work.flags(out, where="pos > 100000"))
    assert nothing.code == 2 and "keeps none of the corpus's" in nothing.err
    assert not (out / "manifest.json").exists()
    assert "complete" not in run("status", out).out
    again = run("extract", *made.work.flags(out, where="pos > 5"))
    assert again.code == 2 and "no row is stored there yet: add --restart" in again.err
    assert run("extract", *made.work.flags(out), "--restart").code == 0
    check_same(out, made.out)
    refused = run("extract", *made.work.flags(out, where="pos > 5"), "--restart")
    assert refused.code == 2 and "committed units, which would be lost" in refused.err
    check_same(out, made.out)


def test_restart_asks_for_the_recipe_it_forgets(tmp_path: Path) -> None:
    for verb in ((), ("supervise", "--")):
        told = run(*verb, "extract", "--out", tmp_path / "none", "--restart")
        assert told.code == 2 and "--restart" in told.err, told.err


@pytest.mark.parametrize("module", some([False, True], True))
def test_the_commands_that_extract_suggests_work_as_they_stand(
    module: bool, made: Made, tmp_path: Path
) -> None:
    def call(command: str) -> str:
        result = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=tiny.environment(),
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    script = [str(Path(sys.executable).with_name("spile"))]
    start = [sys.executable, "-m", "spile.cli"] if module else script
    command = [*start, "extract", "--out", str(made.out)]
    told = zygote.run(command, cwd=tmp_path, env=tiny.environment(), check=True).stdout
    first, *more = told.splitlines()
    assert "40 documents" in first
    suggested = [line for line in more if line.startswith("  ")]
    answers: dict[str, str] = {}
    for line in suggested:
        name, _, command = line.strip().partition(" ")
        if name == "see":  # (it serves until it is stopped)
            command = command.replace(" serve ", " status ")
        elif name == "read":
            python = shlex.quote(f"{command.strip()}; print(ds.taps)")
            command = f"{sys.executable} -c {python}"
        answers[name] = call(command)
    assert set(answers) == {"see", "verify", "read"}
    assert "complete" in answers["see"]
    assert "whole and sound" in answers["verify"]
    assert "resid_post.2" in answers["read"]


def test_every_json_answer_agrees_with_the_dataset(made: Made, tmp_path: Path) -> None:
    dataset = spile.open(str(made.out))
    planned = run("plan", "--calibrate", "off", *made.work.flags(tmp_path / "new"), "--json").json
    extracted = run("extract", *made.work.flags(made.out), "--json").json
    status = run("status", made.out, "--json").json
    audit = run("verify", made.out, "--json").json
    assert run("gc", made.out, "--json").json == {"removed": []}
    assert dataset.num_tokens == extracted["rows"] == status["rows"] == audit["rows"] > 0
    assert planned["documents"] == extracted["documents"] == status["documents"] == 40
    assert planned["units"] == extracted["units"] == status["units_done"] == audit["units"]
    assert planned["tokens"] == pytest.approx(dataset.num_tokens, rel=0.1)
    assert set(planned["bytes_per_tap"]) == set(status["taps"]) == set(dataset.taps)
    assert extracted["bytes"] == status["bytes"] == audit["bytes"]
    assert status["state"] == "complete"
    assert audit["ok"]


def test_version_is_printed() -> None:
    assert run("--version").out == f"spile {spile.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_says_what_it_does(verb: str) -> None:
    result = run(verb, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: spile {verb}")
    if verb in ("extract", "plan"):
        for name in (*Recipe.names(), *Runtime.names(), "out", "config"):
            assert flag_of(name) in result.out
        assert "resid_post" in result.out and "--help-all" in result.out


def test_help_names_every_verb() -> None:
    result = run("--help")
    assert result.code == 0
    for verb in VERBS:
        assert verb in result.out


def test_out_alone_is_enough_to_resume(made: Made, begun: Path) -> None:
    # The batch is runtime, not recipe; the bits agree only under the same one.
    batch = made.work.options["batch_tokens"]
    assert run("extract", "--out", begun, "--batch-tokens", batch).code == 0
    check_same(begun, made.out)


def test_toml_gives_options_and_flags_win(made: Made, tmp_path: Path) -> None:
    options = {"model": made.work.model, "corpus": made.work.corpus, **made.work.options}
    options |= {"out": tmp_path / "wrong", "seq_len": 16}
    lines = [
        f"{name.replace('_', '-')} = {value if isinstance(value, int) else json.dumps(str(value))}"
        for name, value in options.items()
    ]
    config = tmp_path / "job.toml"
    config.write_text("\n".join(lines))
    out = tmp_path / "right"
    seq_len = made.work.options["seq_len"]
    result = run("extract", "--config", config, "--out", out, "--seq-len", seq_len)
    assert result.code == 0, result.err
    assert not (tmp_path / "wrong").exists()
    assert spile.open(str(out)).recipe.seq_len == seq_len
    check_same(out, made.out)


def test_a_finished_dataset_is_left_as_it_is_at_once(made: Made) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        return {name: (os.stat(made.out / name).st_mtime_ns, data)
                for name, data in files(made.out).items()}  # fmt: skip

    before = state()
    began = time.monotonic()
    result = run("extract", *made.work.flags(made.out))
    assert result.code == 0, result.err
    assert time.monotonic() - began < 3.0
    assert "40 documents" in result.out
    assert state() == before


def test_quiet_says_nothing(made: Made) -> None:
    result = tiny.spile("extract", *made.work.flags(made.out), "--quiet")
    assert (result.stdout, result.stderr) == ("", "")


def test_python_makes_what_the_command_makes_in_shards_of_any_size(
    made: Made, tmp_path: Path
) -> None:
    options = dict(made.work.options)
    runtime = spile.Runtime(batch_tokens=options.pop("batch_tokens"), shard_bytes=8192)
    recipe = spile.Recipe(model=str(made.work.model), corpus=str(made.work.corpus), **options)
    outcome = spile.extract(recipe, str(tmp_path / "out"), runtime)
    assert outcome.rows == spile.open(str(made.out)).num_tokens
    sizes: dict[str, list[int]] = {}
    for path in (tmp_path / "out" / "attempts").rglob("*.safetensors"):
        if path.name[0] in "emr":  # taps, not index or statistics
            tap = path.name.rsplit(".", 2)[0]
            sizes.setdefault(f"{path.parent.parent.name} {tap}", []).append(path.stat().st_size)
    assert all(len(split) > 1 for split in sizes.values())
    assert max(size for split in sizes.values() for size in split) == 8192 + 4096  # and a header
    check_same(tmp_path / "out", made.out)


def test_other_batches_threads_and_queues_continue_a_dataset(made: Made, begun: Path) -> None:
    made.work.extract(begun, batch_tokens=512, threads=1, queue_depth=5, shard_bytes=4096)
    check_sound(begun)
    found, wanted = spile.open(str(begun)), spile.open(str(made.out))
    changed = {path.split("/")[0] for path in differences(content(begun), content(made.out))}
    assert "index" not in changed
    assert not any(name.startswith("unit ") for name in changed)
    for tap in wanted.taps:
        rows = wanted.read(tap, 0, wanted.num_tokens)
        np.testing.assert_allclose(
            found.read(tap, 0, found.num_tokens), rows, rtol=0, atol=1e-5 * np.abs(rows).max()
        )
        assert found.statistics(tap).count == wanted.num_tokens


def test_plan_writes_nothing(made: Made, begun: Path, tmp_path: Path) -> None:
    before, listing = files(begun), sorted(tmp_path.rglob("*"))
    assert run("plan", "--calibrate", "off", *made.work.flags(tmp_path / "new")).code == 0
    resumed = run("plan", "--calibrate", "off", "--out", begun, "--json").json
    assert resumed["units_done"] == 3
    assert resumed["remaining_bytes"] < resumed["total_bytes"]
    assert sorted(tmp_path.rglob("*")) == listing
    assert files(begun) == before


def test_an_unfinished_dataset_says_so(begun: Path) -> None:
    status = run("status", begun, "--json").json
    assert (status["state"], status["units_done"]) == ("unfinished", 3)
    assert [worker["state"] for worker in status["workers"]] == ["dead"]
    audit = run("verify", begun)
    assert audit.code == 3
    assert "not done" in audit.out
    assert run("verify", begun, "--partial").code == 0
    with pytest.raises(spile.core.errors.StoreError, match=r"3 of \d+ units are done"):
        spile.open(str(begun))
    assert spile.open(str(begun), partial=True).num_tokens == status["rows"] > 0


@pytest.mark.parametrize("verb", ["status", "gc"])
def test_a_place_without_a_dataset_is_refused_by_name(verb: str, tmp_path: Path) -> None:
    check_refused(run(verb, tmp_path / "nothing"), 3, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_stops_cleanly_and_the_same_command_resumes(
    number: signal.Signals, made: Made, tmp_path: Path
) -> None:
    work = dataclasses.replace(
        made.work, options={**made.work.options, "taps": "resid_post:1", "unit_tokens": 60}
    )
    out = tmp_path / "out"
    for moment in ("loading", "at work"):
        cut = (out / "units.json").exists()  # if so the unit table is not told of again
        process = launch({}, "extract", *work.flags(out))
        assert process.stderr
        if moment == "loading":
            assert "unit table" in process.stderr.readline()
        else:
            wait_for(lambda: len(list((out / "done").glob("*/*.json"))) >= 2, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert said(err)[-1].startswith("spile: interrupted")
        lines = [line for line in said(err) if "stopping: " not in line]  # unless between units
        assert len(lines) == (1 if moment == "loading" or cut else 2), err
        if moment == "at work" or (out / "units.json").exists():
            audit = run("verify", out, "--partial", "--json").json
            assert (audit["faults"], audit["orphans"]) == ([], [])
            assert audit["units_done"] < audit["units"]
            assert (moment == "loading") == (audit["units_done"] == 0)
    result = run("extract", *work.flags(out))
    assert result.code == 0, result.err
    work.extract(tmp_path / "whole")
    check_same(out, tmp_path / "whole")


def test_a_signal_is_heeded_wherever_it_comes(made: Made, tmp_path: Path) -> None:
    process = launch({"terminate": True}, "extract", *made.work.flags(tmp_path / "out"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("spile: interrupted")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_one_directory_may_hold_every_kind_of_file(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    texts = [f"document number {number}, zwölf Boxkämpfer" for number in range(12)]
    jsonl = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    parts = [jsonl.splitlines(keepends=True)[i : i + 2] for i in range(0, 12, 2)]
    (folder / "a.jsonl").write_text("".join(parts[0]))
    pq.write_table(pa.table({"n": [1, 2], "text": texts[2:4]}), folder / "b.parquet")
    (folder / "c.txt").write_text("\n".join(texts[4:6]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(parts[3]).encode()))
    (folder / "deep" / "e.txt").write_text("\r\n".join(texts[8:10]) + "\r\n")
    packed = zstandard.ZstdCompressor().compress("\n".join(texts[10:12]).encode())
    (folder / "f.txt.zst").write_bytes(packed)
    (folder / ".hidden.txt").write_text("not of the corpus")
    out = tmp_path / "out"
    Work(model, folder).extract(out, unit_tokens=200)
    check_sound(out)
    dataset = spile.open(str(out))
    assert dataset.num_documents == 12
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = [tokenizer.decode(dataset.document(i).index["token_id"].tolist()) for i in range(12)]
    assert found == texts  # files in the order of their paths, rows in order


def test_documents_left_out_are_counted_and_reported(model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(
        b'{"text": "first"}\n\n{"text": "   "}\n{"text": null}\n{"other": 1}\n'
        b'{"text": "\xff\xfe"}\n{"text": "\\ud800"}\n{"text": "last"}\n'
    )
    out = tmp_path / "out"
    printed = run("extract", *Work(model, corpus).flags(out)).out
    assert "left out: 1 empty, 2 not UTF-8, 2 null, 1 white space only" in printed
    status = run("status", out, "--json").json
    assert status["skipped"] == {
        "empty": 1, "white space only": 1, "not UTF-8": 2, "null": 2
    }  # fmt: skip
    assert (status["documents"], status["documents_total"]) == (2, 8)
    assert "2 not UTF-8" in run("status", out).out
    dataset = spile.open(str(out))
    assert sorted(set(dataset.index(0, dataset.num_tokens)["doc"])) == [0, 7]
    check_sound(out)
