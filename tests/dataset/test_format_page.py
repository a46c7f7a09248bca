"""docs/format.md is enough: a reader written from that page alone reads what Spile writes.

It uses json, struct, base64, hashlib, numpy and xxhash, for compressed shards a zstd decoder, and
nothing of Spile's.
"""

import base64
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

import spile
from spile.core.index import FLAGS
from spile.dataset import format as fmt
from spile.dataset.codec.quantization import scales_to_json
from spile.dataset.format import FORMAT
from support import stored

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
PLAIN = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "F8_E4M3": "u1",
}  # fmt: skip
Tensors = Mapping[str, tuple[str, np.ndarray]]


class PageReader:
    """A dataset in a directory, read as the page says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = self.record("units.json", "units")
        recipe = self.table["recipe"]
        identity = {k: v for k, v in recipe.items() if not k.endswith("_source")}
        plain = json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()
        assert hashlib.sha256(plain).hexdigest() == self.table["fingerprint"]
        counts = [self.table["units"]["count"]]  # of the units that there are at each generation
        tables, folders = [self.table["units"]], [""]
        while (path / f"generations/{len(folders):08d}.json").exists():
            folders.append(f"generations/{len(folders):08d}/")
            more = self.record(f"{folders[-1][:-1]}.json", "generation")
            assert (more["fingerprint"], more["before"]) == (self.table["fingerprint"], counts[-1])
            assert more["units"]["key"].startswith(f"{folders[-1]}units/")
            counts.append(counts[-1] + more["units"]["count"])
            tables.append(more["units"])
        docs = 0
        for told in tables:
            columns = {name: array for name, (_, array) in self.tensors(told).items()}
            assert len(columns["first_doc"]) == len(columns["num_docs"]) == told["count"]
            for first, number in zip(columns["first_doc"], columns["num_docs"], strict=True):
                assert first == docs
                docs += number
        folder = path / "passes"
        self.passes = [
            PagePass(each, self.table)
            for each in sorted(folder.iterdir() if folder.exists() else ())
            if (each / "pass.json").exists() and not (each / "dropped.json").exists()
        ]
        whole = [
            n
            for n, folder in enumerate(folders)
            if (path / f"{folder}manifest.json").exists()
            and not any(each.lacks(folders, n) for each in self.passes)
        ]
        if whole:
            self.read_units(f"{folders[whole[-1]]}manifest.json", counts[whole[-1]])
        else:
            keys = [f"done/{unit // 256:06d}/{unit:08d}.json" for unit in range(counts[0])]
            self.units = [self.record(key, "done") for key in keys if (path / key).exists()]
        assert all(u["fingerprint"] == self.table["fingerprint"] for u in self.units)
        self.passes = [each for each in self.passes if whole and each.opened(folders, whole[-1])]
        for each in self.passes:
            each.read_units(f"{folders[whole[-1]]}manifest.json", counts[whole[-1]])
            same = ("unit", "rows", "tokens", "documents", "contexts", "text_digest")
            for mine, theirs in zip(self.units, each.units, strict=True):
                assert theirs["fingerprint"] == each.table["fingerprint"]
                assert [mine[name] for name in same] == [theirs[name] for name in same]
                assert mine["index"]["digest"] == theirs["index"]["digest"]

    def read_units(self, key: str, count: int) -> None:
        """The units that a manifest lists."""
        manifest = self.record(key, "manifest")
        self.units = [u for file in manifest["segments"] for u in self.segment(file)]
        self.merged = {n: array for n, (_, array) in self.tensors(manifest["columns"]).items()}
        assert manifest["units"] == count
        assert [unit["unit"] for unit in self.units] == [*range(count)]
        assert [unit["rows"] for unit in self.units] == self.merged["rows"].tolist()
        for name in ("rows", "tokens", "documents"):
            assert manifest[name] == sum(unit[name] for unit in self.units)

    def all_rows(self) -> dict[str, np.ndarray]:
        """Every tap that is read; of two passes with one tap, the pass first by name wins."""
        found: dict[str, np.ndarray] = {}
        for part in (self, *self.passes):
            for tap in part.table["taps"]:
                found.setdefault(tap, part.rows(tap))
        return found

    def segment(self, file: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records that a segment holds."""
        columns = {name: array for name, (_, array) in self.tensors(file).items()}

        def runs(name: str) -> list[slice]:
            ends = [0, *columns[f"ends/{name}"].tolist()]
            return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]

        def texts(name: str) -> list[str]:
            return [columns[name][run].tobytes().decode() for run in runs(name)]

        parts = zip(
            *(texts(f"file/{name}") for name in ("tap", "name", "digest", "etag")),
            *(columns[f"file/{name}"].tolist() for name in ("first", "count", "bytes")),
            strict=True,
        )
        names = ("tap", "name", "digest", "etag", "first", "count", "bytes")
        files: list[dict[str, Any]] = [dict(zip(names, part, strict=True)) for part in parts]
        reasons = list(zip(texts("skipped/reason"), columns["skipped/count"].tolist(), strict=True))
        units: list[dict[str, Any]] = []
        counts = ("unit", "rows", "tokens", "documents", "contexts")
        for at, (of_files, of_reasons) in enumerate(
            zip(runs("files"), runs("skipped"), strict=True)
        ):
            unit: dict[str, Any] = {name: int(columns[name][at]) for name in counts}
            unit |= {name: texts(name)[at] for name in ("attempt", "made_from", "text_digest")}
            unit["fingerprint"] = texts("fingerprint")[0]
            folder = f"attempts/{unit['unit'] // 256:06d}/{unit['unit']:08d}/{unit['attempt']}/"
            for each in files[of_files]:
                each["key"] = folder + each.pop("name")
            *unit["shards"], unit["index"], unit["statistics"], unit["documents_table"] = files[
                of_files
            ]
            units.append({**unit, "skipped": dict(reasons[of_reasons])})
        return units

    def record(self, key: str, kind: str) -> dict[str, Any]:
        data = (self.path / key).read_bytes()
        record = json.loads(data)
        assert spelled(record) == data
        checksum = record.pop("checksum")
        assert xxhash.xxh3_128_hexdigest(spelled(record)) == checksum
        assert (record.pop("format"), record.pop("kind")) == (8, kind)
        return record

    def tensors(self, file: Mapping[str, Any]) -> Tensors:
        data = (self.path / file["key"]).read_bytes()
        assert len(data) == file["bytes"]
        assert xxhash.xxh3_128_hexdigest(data) == file["digest"]
        if file["key"].endswith(".zst"):
            return from_planes(data)
        (length,) = struct.unpack("<Q", data[:8])
        assert (8 + length) % 4096 == 0
        return parsed(json.loads(data[8 : 8 + length]), lambda a, b, _: data[8 + length :][a:b])

    def tokenizer(self) -> dict[str, bytes]:
        files = {}
        for name, file in self.table["tokenizer"].items():
            data = (self.path / file["key"]).read_bytes()
            assert len(data) == file["bytes"]
            assert xxhash.xxh3_128_hexdigest(data) == file["digest"]
            assert file["key"] == f"tokenizer/{file['digest']}/{name}"
            files[name] = data
        return files

    def index(self) -> dict[str, np.ndarray]:
        files = [self.tensors(unit["index"]) for unit in self.units]
        return {name: np.concatenate([file[name][1] for file in files]) for name in files[0]}

    def rows(self, tap: str) -> np.ndarray:
        pieces = [np.zeros((0, *self.table["taps"][tap]["shape"]), np.float32)]
        for unit in self.units:
            reached = 0
            for file in (file for file in unit["shards"] if file["tap"] == tap):
                assert file["first"] == reached
                reached += file["count"]
                pieces.append(self.values(tap, self.tensors(file)))
            assert reached == unit["rows"]
        return np.concatenate(pieces)

    def values(self, tap: str, tensors: Tensors) -> np.ndarray:
        kind, codes = tensors[tap]
        if kind == "BF16":
            return (codes.astype(np.uint32) << 16).view(np.float32)
        if kind == "F8_E4M3":
            scale = tensors[f"{tap}/scale"][1]
            return float8(codes) * scale.reshape(-1, *[1] * (codes.ndim - 1))
        if self.table["taps"][tap]["dtype"] == "int8":
            assert np.abs(codes.astype(np.int32)).max(initial=0) <= 127
            return codes.astype(np.float32) * self.scales()[tap]
        return codes

    def scales(self) -> dict[str, np.ndarray]:
        taps, record = self.table["taps"], self.record("scales.json", "scales")
        assert {*record} == {name for name, tap in taps.items() if tap["dtype"] == "int8"}
        return {name: scales_of(text, taps[name]["shape"]) for name, text in record.items()}

    def statistics(self, tap: str) -> tuple[int, np.ndarray, np.ndarray]:
        count, mean, m2 = 0, np.zeros(1), np.zeros(1)
        for unit in self.units:
            told = {name: array for name, (_, array) in self.tensors(unit["statistics"]).items()}
            more = int(told[f"{tap}/count"][0])
            if more:
                apart = told[f"{tap}/mean"] - mean
                mean = mean + apart * (more / (count + more))
                m2 = m2 + told[f"{tap}/m2"] + apart**2 * (count * more / (count + more))
                count += more
        if hasattr(self, "merged"):  # (of one segment: merged unit by unit)
            assert self.merged[f"{tap}/mean"].tobytes() == mean.tobytes()
            assert self.merged[f"{tap}/m2"].tobytes() == m2.tobytes()
            assert self.merged[f"{tap}/count"].tolist() == [count]
        return count, mean, m2

    def documents(self, name: str) -> Iterator[Any]:
        for unit in self.units:
            told = {n: array for n, (_, array) in self.tensors(unit["documents_table"]).items()}
            valid = told.get(f"valid/{name}", np.ones(len(told["doc"])))
            values = told[name].tolist()
            if f"ends/{name}" in told:
                ends = [0, *told[f"ends/{name}"].tolist()]
                text = told[name].tobytes()
                values = [text[a:b].decode() for a, b in zip(ends[:-1], ends[1:], strict=True)]
            yield from (v if ok else None for v, ok in zip(values, valid, strict=True))


class PagePass(PageReader):
    """A pass: keys in its records are relative to its folder."""

    def __init__(self, path: Path, table: Mapping[str, Any]) -> None:
        self.path, self.passes = path, []
        self.table = self.record("pass.json", "pass")
        assert self.table["rows"] == table["fingerprint"]
        own = {"taps", "encode", "latents", "compute_dtype", "store_dtype"}
        mine, theirs = self.table["recipe"], table["recipe"]
        differ = {key for key in mine if mine[key] != theirs[key] and not key.endswith("_source")}
        assert differ <= own

    def opened(self, folders: list[str], generation: int) -> bool:
        return (self.path / f"{folders[generation]}manifest.json").exists()

    def lacks(self, folders: list[str], generation: int) -> bool:
        """Return whether it has an earlier generation but not this one."""
        earlier = any(self.opened(folders, n) for n in range(generation))
        return earlier and not self.opened(folders, generation)


def scales_of(text: str, shape: list[int]) -> np.ndarray:
    found = np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(shape)
    assert (np.isfinite(found) & (found > 0)).all()
    return found


def spelled(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return (text + "\n").encode()


def parsed(header: Mapping[str, Any], at: Callable[[int, int, int], bytes]) -> Tensors:
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name, entry in header.items():
        dtype = np.dtype(PLAIN[entry["dtype"]])
        start, stop = entry["data_offsets"]
        data = at(start, stop, dtype.itemsize)
        found[name] = entry["dtype"], np.frombuffer(data, dtype).reshape(entry["shape"])
    return found


def from_planes(data: bytes) -> Tensors:
    frames, kind, magic = struct.unpack("<IBI", data[-9:])
    assert (kind, magic) == (0x80, 0x8F92EAB1)
    at = len(data) - 9 - 12 * frames
    assert struct.unpack("<II", data[at - 8 : at]) == (0x184D2A5E, 12 * frames + 9)
    table = [struct.unpack("<III", data[at + 12 * n : at + 12 * n + 12]) for n in range(frames)]
    blocks: list[tuple[int, bytes]] = []  # where each begins, decompressed
    packed = plain = 0
    for size, length, checksum in table:
        block = zstandard.decompress(data[packed : packed + size], max_output_size=length)
        assert len(block) == length
        assert xxhash.xxh64_intdigest(block) & 0xFFFFFFFF == checksum
        blocks.append((plain, block))
        packed, plain = packed + size, plain + length

    def part(start: int, stop: int, itemsize: int) -> bytes:
        inside = [block for begin, block in blocks if start <= begin < stop]
        planes = (np.frombuffer(block, np.uint8).reshape(itemsize, -1) for block in inside)
        return b"".join(plane.T.tobytes() for plane in planes)

    (length,) = struct.unpack("<Q", blocks[0][1][:8])
    base = 8 + length
    header = json.loads(part(0, base, 1)[8:])
    return parsed(header, lambda a, b, itemsize: part(base + a, base + b, itemsize))


def float8(codes: np.ndarray) -> np.ndarray:
    wide = codes.astype(np.int32)
    exponent, mantissa = (wide >> 3) & 15, (wide & 7) / 8
    size = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size[(wide & 0x7F) == 0x7F] = np.nan
    return np.where(wide & 0x80, -size, size).astype(np.float32)


def test_the_page_is_of_this_version_and_has_every_flag() -> None:
    assert PAGE.startswith(f"# The format, version {FORMAT}\n")
    bits = {name: int(bit) for name, bit in re.findall(r"`(\w+)`[a-z ]*\| (\d+) \|", PAGE)}
    assert {name: bit for name, bit in bits.items() if name in FLAGS} == FLAGS


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("taps", "dtype"), [(stored.TAPS, "bfloat16"), (stored.SCALED, "int8")])
def test_a_reader_written_from_the_page_reads_every_bit(
    taps: Any, dtype: str, compress: bool, tmp_path: Path
) -> None:
    made = stored.build(
        tmp_path / "acts", taps=taps, dtype=dtype, compress=compress, keep=("id", "mixed")
    )
    read, ours = PageReader(made.path), spile.open(str(made.path))
    index = read.index()
    assert all((index[name] == made.index[name]).all() for name in made.index.dtype.names or ())
    assert {*read.table["taps"]} == {*taps}
    for tap in read.table["recipe"]["taps"]:
        wanted = made.rows[tap]
        wide = wanted.astype(np.float32) if wanted.dtype.name == "bfloat16" else wanted
        assert read.rows(tap).astype(wide.dtype).tobytes() == wide.tobytes(), tap
        stats = ours.statistics(tap)
        count, mean, m2 = read.statistics(tap)
        assert count == stats.count
        assert mean.tobytes() == stats.mean.tobytes()
        assert m2.tobytes() == stats.m2.tobytes()
    table = ours.documents()
    for name in ("doc", "tokens", "rows", "skipped", "preview"):
        assert [*read.documents(name)] == table.column(name).to_pylist()
    assert [*read.documents("kept/id")] == table.column("id").to_pylist()
    # of another type in each unit: read as text where they are joined
    assert [str(value) for value in read.documents("kept/mixed")] == table.column(
        "mixed"
    ).to_pylist()


@pytest.mark.parametrize(("done", "units"), [(5, 5), (4, 3)])
def test_it_reads_the_newest_generation_that_is_complete(
    done: int, units: int, tmp_path: Path
) -> None:
    dataset = stored.build(tmp_path / "out", grown=(3,), commit=range(done))
    reader = PageReader(dataset.path)
    assert [unit["unit"] for unit in reader.units] == [*range(units)]
    for tap, rows in dataset.rows.items():
        assert np.array_equal(reader.rows(tap), rows[: dataset.starts[units]])


def test_it_reads_the_taps_of_passes(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", shard_bytes=200)
    _, scaled = stored.add_pass(made, {"q.0": stored.TapInfo((2, 3), "int8"), "logprob": 1})
    _, half = stored.add_pass(made, {"z.0": 4}, dtype="bfloat16")
    stored.add_pass(made, {"v.0": 4}, commit=(0, 1))  # not complete
    dropped, _ = stored.add_pass(made, {"k.0": 4})
    dropped.drop()
    read = PageReader(made.path)
    found, wanted = read.all_rows(), {**made.rows, **scaled, **half}
    assert {*found} == {*wanted} == {*spile.open(made.path).taps}
    for tap, rows in found.items():
        np.testing.assert_array_equal(rows, wanted[tap].astype(rows.dtype))
    for part in read.passes:
        for tap in part.table["taps"]:
            assert part.statistics(tap)[0] == len(made.index)


def test_it_reads_a_dataset_as_it_was_where_a_pass_lacks_later_units(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", grown=(3,))
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=range(3))
    base = added.table_over(made.ledger.table().at(0))
    assert base and added.ledger.complete(base)
    read = PageReader(made.path)
    assert [unit["unit"] for unit in read.units] == [0, 1, 2]
    np.testing.assert_array_equal(read.all_rows()["z.0"], rows["z.0"][: made.starts[3]])
    for unit in (3, 4):
        assert added.ledger.commit(stored.write_added(made, added, unit, rows))
    assert added.ledger.complete(added.ledger.table())
    assert np.array_equal(PageReader(made.path).all_rows()["z.0"], rows["z.0"])


def test_it_reads_what_is_done_of_an_unfinished_dataset(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", commit=(0, 1), shard_bytes=200)
    read = PageReader(made.path)
    assert [unit["unit"] for unit in read.units] == [0, 1]
    rows = made.rows["resid_post.0"][: made.starts[2]]
    assert read.rows("resid_post.0").tobytes() == rows.tobytes()


def test_it_reads_what_a_model_gave(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:0,q:0,embed", max_docs=6,
        seq_len=64, store_dtype="float8_e4m3",
    )  # fmt: skip
    spile.extract(recipe, str(out))
    read, ours = PageReader(out), spile.open(str(out))
    for tap in ours.taps:
        wanted = ours.read(tap, 0, ours.num_tokens)
        assert read.rows(tap).tobytes() == wanted.tobytes(), tap
    names = ("tokenizer.json", "tokenizer_config.json")
    assert read.tokenizer() == {name: (model / name).read_bytes() for name in names}


def test_the_scales_of_a_model_are_where_the_page_says(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="q:0,embed", max_docs=6, seq_len=64,
        store_dtype="int8",
    )  # fmt: skip
    spile.extract(recipe, str(out))
    read, ours = PageReader(out), spile.open(str(out))
    found = read.scales()
    assert {name: scale.shape for name, scale in found.items()} == {"q.0": (4, 8), "embed": (32,)}
    for tap, scale in found.items():
        wanted = ours.read(tap, 0, ours.num_tokens)
        assert read.rows(tap).tobytes() == wanted.tobytes(), tap
        # Few enough tokens that all of them were measured: none is clipped.
        assert ours.statistics(tap).clipped == 0
        codes = np.abs(wanted / scale).max(axis=0)
        assert (np.rint(codes) == np.rint(127 / 1.25)).all()


def test_the_example_of_scales_on_the_page_is_right() -> None:
    (text,) = re.findall(r'^"q\.1":"(.+)"$', PAGE, re.M)
    assert scales_of(text, [2, 2]).tolist() == [[0.5, 1.0], [0.25, 2.0]]
    assert fmt.encode_record("scales", {"q.1": text}).count(f'"q.1":"{text}"'.encode()) == 1
    assert scales_to_json({"q.1": np.array([[0.5, 1.0], [0.25, 2.0]])}) == {"q.1": text}


def test_every_float8_code_means_what_the_page_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(stored.DTYPES_BY_NAME["float8_e4m3"]).astype(np.float32)
    np.testing.assert_array_equal(float8(codes), wanted)
