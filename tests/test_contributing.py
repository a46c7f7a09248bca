"""The recipes of CONTRIBUTING.md work: each toy below is one row of a table and its code."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spile import cli
from spile.cli.launch import launch
from spile.cli.parser import make_parser
from spile.core.errors import InputError
from spile.core.units import Span
from spile.corpus import formats
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.formats.byte_files import ByteFormat
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.reader import CorpusReader
from spile.corpus.units import CutOptions, make_units
from spile.interop import export as exports
from spile.interop.export.export_format import ExportFormat
from spile.interop.export.export_source import ExportSource
from spile.launch import flags as launch_flags
from spile.launch.command import Command
from spile.launch.job import LaunchJob
from spile.launch.target import LaunchTarget, TargetFlags, TargetRow
from spile.models.config import hf_config
from spile.models.config.family import Family
from spile.models.files import encoders
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.encoders import EncoderLayout, open_sae
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward import block, decoder
from spile.models.forward.attention import masked
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.sites import SITES, Site
from spile.models.taps import Tap, parse_taps
from support import saes, stored, tiny

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = (
    "model family", "tap site", "corpus format", "export format", "launcher", "encoder layout"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_parsers() -> Any:
    make_parser.cache_clear()
    yield
    make_parser.cache_clear()


def help_of(*words: str) -> str:
    """Return the help of a verb on one line."""
    parser: argparse.ArgumentParser = cli.make_parser()
    for word in words:
        group = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = group.choices[word]
    return " ".join(parser.format_help().split())


@pytest.mark.parametrize("what", RECIPES)
def test_a_recipe_names_files_and_tables_that_are_there(what: str) -> None:
    (row,) = re.findall(rf"^\| an? {what} \| .*$", GUIDE, re.MULTILINE)
    paths = re.findall(r"`((?:src|tests|docs)/[^`]+)`", row)
    assert any(path.startswith("src") for path in paths)
    assert any(path.startswith("tests") for path in paths)
    texts = ""
    for path in paths:
        assert (ROOT / path).exists(), path
        files = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*.py")
        texts += "".join(file.read_text() for file in files)
    texts += "".join(file.read_text() for file in (ROOT / "src/spile/models/config").glob("*.py"))
    texts += (ROOT / "src/spile/interop/export/export_format.py").read_text()
    for name in re.findall(r"`([A-Z]\w+)`", row):
        assert re.search(rf"^(class {name}\b|{name}(:.*)? = )", texts, re.MULTILINE), name


def test_a_family_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Family(name="toy", architectures=("ToyForCausalLM",), reads=("attention_bias",))
    config = {**tiny.CONFIG, "architectures": ["ToyForCausalLM"]}
    with pytest.raises(InputError, match="'ToyForCausalLM' is not supported"):
        hf_config.read_config(config, "here")
    monkeypatch.setattr(hf_config, "FAMILIES", (*hf_config.FAMILIES, toy))
    folder = tiny.write_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.arch.family == "toy"
    with pytest.raises(InputError, match=r"supported: .*ToyForCausalLM"):
        hf_config.read_config({**config, "architectures": ["Nothing"]}, "here")


class NulFormat(ByteFormat):
    """Texts, each ended by a NUL byte."""

    title = "NUL"
    suffixes = (".nul",)
    has_columns = False

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        def ends(data: bytes, position: int) -> np.ndarray:
            return position + 1 + np.flatnonzero(np.frombuffer(data, np.uint8) == 0)

        self.cut_bytes(builder, self.chunks(), ends, first, byte)

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        return map(CorpusDocument.of_bytes, b"".join(self.bytes_of(span)).split(b"\0")[:-1])

    def sample(self) -> tuple[list[CorpusDocument], int]:
        with self.file.open() as stream:
            data = self.file.read(stream, 1 << 16)
        return [CorpusDocument.of_bytes(text) for text in data.split(b"\0")[:-1]], len(data)


def test_a_corpus_format_is_a_class_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [f"document {n}" for n in range(40)]
    path = tmp_path / "a.nul"
    path.write_bytes(b"".join(text.encode() + b"\0" for text in written))
    for corpus, said in ((path, "does not say what it holds"), (tmp_path, "holds no .parquet")):
        with pytest.raises(InputError, match=said):
            find_files(str(corpus))
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, NulFormat))
    with closing(CorpusReader(find_files(str(tmp_path)))) as reader:
        units = make_units(reader, CutOptions(unit_tokens=50, density=1.0))
        read = [reader.read(unit.spans, unit.first_doc).texts for unit in units]
        assert len(units) > 5 and [text for texts in read for text in texts] == written
        assert reader.sample(0)[0].texts == written


def test_a_site_is_a_row_and_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Site("mlp_size", "length of what the down projection reads", (), requires=("mlp",))
    monkeypatch.setitem(SITES, row.name, row)
    mlp = block._mlp

    def measured(*given: Any) -> Any:
        out, values = mlp(*given)
        return out, values | {"mlp_size": jnp.linalg.norm(values["mlp_hidden"], axis=-1)}

    monkeypatch.setattr(block, "_mlp", measured)
    checkpoint = open_checkpoint(str(tiny.write_model(tmp_path / "model")))
    taps = parse_taps("mlp_hidden:1,mlp_size:all", checkpoint.arch)
    assert Tap("mlp_size", 1) in taps
    assert "mlp_size" in help_of("extract")
    depth = max(tap.layers_needed(checkpoint.arch) for tap in taps)
    schedule = LayerSchedule.of(
        checkpoint.arch, depth, whole=decoder.needs_whole_block(taps, depth)
    )
    params, _ = load_params(checkpoint, schedule, head=False, dtype=jnp.dtype("float32"))
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    inputs = decoder.Inputs(tokens, tokens, jnp.ones_like(tokens))
    model = decoder.Decoder(checkpoint.arch, taps, "float32", masked)
    found = model.forward(params, inputs, schedule=schedule)
    lengths = np.linalg.norm(np.asarray(found["mlp_hidden.1"]), axis=-1)
    assert np.allclose(found["mlp_size.1"], lengths, rtol=1e-5) and lengths.min() > 0


def test_an_export_format_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(source: ExportSource, to: Path) -> int:
        for tap in source.taps:
            source.read(tap, 0, source.rows).tofile(to / tap)
        return source.rows

    def count(source: ExportSource, at: Path) -> Mapping[str, int]:
        return {tap: (at / tap).stat().st_size // source.row_bytes(tap) for tap in source.taps}

    toy = ExportFormat(name="toy", about="bare values", write=write, count=count)
    monkeypatch.setitem(exports.FORMATS, "toy", toy)
    assert ", toy " in help_of("export")
    written = stored.build(tmp_path / "acts")
    made = exports.export(str(tmp_path / "acts"), tmp_path / "out", to="toy", taps="resid_post:0")
    assert made.rows == len(written.index)
    values = np.fromfile(tmp_path / "out" / "resid_post.0", np.float32)
    assert np.array_equal(values, written.rows["resid_post.0"].astype(np.float32).reshape(-1))


@dataclass(frozen=True)
class Pigeons(LaunchTarget):
    loft: str

    def _send(self, what: str) -> Sequence[Command]:
        return [Command(argv=("pigeon", "--loft", self.loft, what))]

    def render(self, job: LaunchJob) -> Sequence[Command]:
        return self._send(" ".join(job.command))

    def status(self, job: LaunchJob) -> Sequence[Command]:
        return self._send("status")

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        return self._send("logs")

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        return self._send("stop")


def test_a_launcher_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_flags(flags: TargetFlags) -> None:
        flags.add("--loft", "where they live", metavar="X", required=True)

    def build(arguments: argparse.Namespace) -> Pigeons:
        return Pigeons(arguments.loft)

    row = TargetRow("pigeons", "carrier pigeons", add_flags, build)
    monkeypatch.setitem(launch_flags.TARGETS, row.name, row)
    assert "carrier pigeons" in help_of("launch")
    assert "--loft X where they live" in help_of("launch", "status", "pigeons")
    recipe = ("--model", "demo", "--corpus", "demo", "--taps", "embed", "--out", "/acts")
    words = ("launch", "pigeons", "--loft", "roof", "--dry-run", "--", *recipe)
    launch(make_parser().parse_args(words))
    assert "pigeon --loft roof 'spile supervise -- extract --model demo" in capsys.readouterr().out


def test_an_encoder_layout_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saes.write_sae(tmp_path / "sae", "jumprelu")
    wanted = open_sae(str(folder))
    (folder / "cfg.json").rename(folder / "toy.json")

    def read(folder: Any) -> Sae:
        width, latents = (
            json.loads((folder / "toy.json").read_text())[n] for n in ("d_in", "d_sae")
        )
        file = folder / "sae_weights.safetensors"
        return Sae(
            directory=folder, file=file, architecture="jumprelu", width=width, latents=latents
        )

    with pytest.raises(InputError, match=r"none of the files .*cfg.json \(SAELens\)"):
        open_sae(str(folder))
    toy = EncoderLayout("Toys", "toy.json", read)
    monkeypatch.setattr(encoders, "LAYOUTS", (*encoders.LAYOUTS, toy))
    assert encoders.find_layout(folder)
    found, _ = load_arrays(open_sae(str(folder)))
    arrays, _ = load_arrays(wanted)
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    with pytest.raises(InputError, match=r"toy.json \(Toys\)"):
        open_sae(str(tmp_path))


def test_encode_names_the_tool_of_every_layout() -> None:
    told = help_of("extract") + help_of("encode")  # that of crosscoders
    assert all(re.sub(r" \d$", "", layout.tool) in told for layout in encoders.LAYOUTS)
