"""A model's files that change while a run reads them never end up in a unit."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

import spile
from spile.cli import run
from spile.core.config import Recipe, Runtime
from spile.core.errors import DataError, DriftError
from spile.core.tensors import as_bytes, map_tensor, read_header, write_tensors
from spile.dataset.format import Done
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.models.forward.weight_loader import ArrayLoader
from spile.objects import open_objects
from support import tiny
from support.marks import some
from support.remote import upload
from support.stored import unit_files

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Watched:
    """A model whose `file` changes during a run; `other` is another version of that file."""

    model: Path | str
    corpus: Path
    file: Path
    other: Path
    lora: Path | None = None

    def extract(
        self, out: Path, kept: str = "disk", where: str | None = None
    ) -> dict[tuple[int, str], bytes]:
        given = Recipe(
            model=str(self.model),
            lora=str(self.lora) if self.lora else None,
            corpus=str(self.corpus),
            taps="resid_post:1",
            seq_len=64,
            unit_tokens=200,  # a dozen units
            store_dtype="float32",
            where=where,
        )
        spile.extract(given, str(out), Runtime(weights=kept, batch_tokens=128))
        return unit_files(out)

    def put_other_in_place(self, *given: object) -> None:
        """Rename it over the file, as a download or rsync does."""
        os.replace(shutil.copy(self.other, self.file.with_name("arriving")), self.file)

    def write_other_into(self, *given: object, hidden: bool = False) -> None:
        """Write it over the file's bytes; `hidden`: the file's time does not tell."""
        before = self.file.stat()
        assert self.other.stat().st_size == before.st_size
        with self.file.open("r+b") as file:
            file.write(self.other.read_bytes())
        if hidden:
            os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_tensors(model: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = model / WEIGHTS
    tensors = {name: np.array(map_tensor(path, info)) for name, info in read_header(path).items()}
    change(tensors)
    path.unlink()
    write_tensors(path, tensors)


def pack(model: Path) -> None:
    """Store the matrices of the blocks in float8, with scales."""

    def packed(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)

    change_tensors(model, packed)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng, stem = np.random.default_rng(seed), "base_model.model.model.layers.1.self_attn.q_proj.lora"
    shapes = {f"{stem}_A.weight": (2, 32), f"{stem}_B.weight": (32, 2)}
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    write_tensors(folder / ADAPTER, tensors)
    return folder


def watched(kind: str, corpus: Path, folder: Path) -> Watched:
    """A model, and another version of what every sweep reads again."""
    model, other = folder / "model", folder / "other"
    tiny.write_model(model)
    if kind == "adapter":
        first, second = (write_adapter(folder / f"lora{seed}", seed) for seed in (1, 2))
        return Watched(model, corpus, first / ADAPTER, second / ADAPTER, first)
    tiny.write_model(other, seed=0 if kind == "embedding" else 1)
    if kind == "embedding":
        change_tensors(other, lambda tensors: tensors.update({EMBEDDING: -tensors[EMBEDDING]}))
    if kind == "packed":
        pack(model)
        pack(other)
    return Watched(model, corpus, model / WEIGHTS, other / WEIGHTS)


def once(
    patch: pytest.MonkeyPatch, owner: type, name: str, do: Callable[..., object], *, at: int = 1
) -> None:
    """Do something after a method's first call, or a later one."""
    real, calls = getattr(owner, name), list[object]()

    def called(self: object, *given: Any) -> Any:
        found = real(self, *given)
        calls.append(self)
        if len(calls) == at:
            do(*given)
        return found

    patch.setattr(owner, name, called)


KINDS = ("blocks", "embedding", "adapter", "packed")
Undisturbed = Callable[[str], dict[tuple[int, str], bytes]]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The units of each kind, made from files that do not change."""

    @cache
    def made(kind: str) -> dict[tuple[int, str], bytes]:
        folder = tmp_path_factory.mktemp(kind)
        return watched(kind, corpus, folder).extract(folder / "out")

    return made


@pytest.mark.parametrize("kind", some(KINDS, "blocks"))
def test_a_replaced_file_changes_no_row_and_is_reported(
    kind: str,
    corpus: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = watched(kind, corpus, tmp_path)
    with monkeypatch.context() as patch:
        once(patch, Ledger, "commit", model.put_other_in_place)
        assert model.extract(tmp_path / "out") == undisturbed(kind)
    (told,) = [entry.message for entry in caplog.records if "in its place" in entry.message]
    assert told.startswith(f"{model.file}: another file was put in its place")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(DriftError, match="model (weights|lora): stored"):
        model.extract(tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("kind", some(KINDS, "adapter"))
def test_a_file_that_is_written_to_ends_the_run_before_a_wrong_unit(
    kind: str,
    corpus: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, out = watched(kind, corpus, tmp_path), tmp_path / "out"
    whole, before = undisturbed(kind), model.file.read_bytes()
    with monkeypatch.context() as patch:
        once(patch, Ledger, "commit", model.write_other_into)
        with pytest.raises(DataError, match=f"{model.file}: changed while the run read it"):
            model.extract(out)
    check_begun(out, whole)
    model.file.write_bytes(before)
    assert model.extract(out) == whole


def check_begun(out: Path, whole: dict[tuple[int, str], bytes]) -> None:
    """Some units are done, and each is as it should be."""
    report = verify(open_objects(str(out)), partial=True)
    assert not report.faults
    assert 0 < report.units_done < report.units
    stored = unit_files(out)
    assert stored == {key: whole[key] for key in stored}


@pytest.mark.parametrize("kind", some(["blocks", "packed"], "packed"))
def test_a_change_that_no_time_shows_is_found_by_the_hash(
    kind: str,
    corpus: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, out = watched(kind, corpus, tmp_path), tmp_path / "out"
    once(monkeypatch, Ledger, "commit", partial(model.write_other_into, hidden=True))
    with pytest.raises(DataError, match=rf"{model.file}: .* had the hash \w{{32}}, now \w{{32}}"):
        model.extract(out)
    check_begun(out, undisturbed(kind))


def test_the_command_ends_with_3_and_one_line(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = watched("embedding", corpus, tmp_path), tmp_path / "out"
    once(monkeypatch, Ledger, "commit", model.write_other_into)
    given = {"model": model.model, "corpus": corpus, "taps": "resid_post:1", "out": out,
             "weights": "disk", "unit-tokens": 200, "seq-len": 64, "batch-tokens": 128}  # fmt: skip
    flags = [str(each) for name, value in given.items() for each in (f"--{name}", value)]
    assert run(["extract", "--quiet", *flags]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"spile: {model.file}: changed while the run read it (it was written to)"
    )
    assert "run the same command again" in line


def test_an_object_that_is_replaced_ends_the_run(
    corpus: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bucket held before cannot be read any more."""
    model, out = watched("blocks", corpus, tmp_path), tmp_path / "out"
    url, other = upload(Path(model.model), f"memory://{tmp_path.name}"), model.other.read_bytes()
    once(monkeypatch, Ledger, "commit", lambda _: open_objects(url).replace(WEIGHTS, other))
    with pytest.raises(DataError, match=f"{url}/{WEIGHTS}: changed while the run read it"):
        replace(model, model=url).extract(out)
    check_begun(out, undisturbed("blocks"))


# -- while weights are being loaded ----------------------------------------------------------------


@pytest.mark.parametrize("kept", some(["resident", "disk"], "disk"))
@pytest.mark.parametrize("how", ["put_other_in_place", "write_other_into"])
def test_a_model_that_arrives_while_it_is_loaded_is_not_recorded(
    kept: str, how: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files, some may be the old ones and some the new ones."""
    model, other = tmp_path / "model", tmp_path / "other"
    for seed, folder in enumerate((model, other)):
        cut(tiny.write_model(folder, seed=seed))
    second = "model-00002-of-00002.safetensors"
    arriving = Watched(model, corpus, model / second, other / second)
    once(monkeypatch, ArrayLoader, "host_block", getattr(arriving, how), at=2)
    with pytest.raises(DataError, match=f"{arriving.file}: changed while the run read it"):
        arriving.extract(tmp_path / "out", kept)
    assert not (tmp_path / "out" / "model.json").exists()
    assert not unit_files(tmp_path / "out")


def cut(model: Path) -> None:
    """Store a model in two files."""
    whole = model / WEIGHTS
    tensors = {name: np.array(map_tensor(whole, info)) for name, info in read_header(whole).items()}
    whole.unlink()
    places: dict[str, str] = {}
    for number in (0, 1):
        file, names = f"model-{number + 1:05}-of-00002.safetensors", sorted(tensors)[number::2]
        write_tensors(model / file, {name: tensors[name] for name in names})
        places |= dict.fromkeys(names, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("kept", some(["resident", "disk"], "disk"))
def test_hashes_of_all_weights_are_stored_before_the_first_unit(
    kept: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even of a unit that keeps no token, so that no step is run for it."""
    model, out = watched("blocks", corpus, tmp_path), tmp_path / "out"
    real, first = Ledger.commit, list[tuple[int, dict[str, Any] | None]]()

    def commit(self: Ledger, done: Done) -> bool:
        first.append((done.rows, self.read_weights()))
        return real(self, done)

    monkeypatch.setattr(Ledger, "commit", commit)
    model.extract(out, kept, where="doc > 30")
    rows, hashes = first[0]
    assert rows == 0
    unread = ("model.layers.2.", "model.norm.")  # they lie behind the tap
    read = {n: i for n, i in read_header(model.file).items() if not n.startswith(unread)}
    assert hashes == {
        name: xxh3_128_hexdigest(as_bytes(map_tensor(model.file, info)))
        for name, info in read.items()
    }


# -- a model that is called ------------------------------------------------------------------------


def test_a_streamed_model_is_not_called_with_changed_weights(corpus: Path, tmp_path: Path) -> None:
    watching = watched("blocks", corpus, tmp_path)
    model = spile.load_model(str(watching.model), weights="disk")
    before = np.asarray(model("a few words")["logits"])
    watching.put_other_in_place()
    assert np.array_equal(np.asarray(model("a few words")["logits"]), before)
    watching = replace(watching, model=tmp_path / "other", file=watching.other, other=watching.file)
    model = spile.load_model(str(watching.model), weights="disk")
    watching.write_other_into()
    with pytest.raises(DataError, match="changed while"):
        model("a few words")
