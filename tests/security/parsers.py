"""Everything that reads what a stranger wrote: valid files of each kind, and all that is done with
one.

A find of the fuzzers is kept as `finds/PARSER/NAME`, the bytes that did it, which
`test_parsers.py` gives to the parser of that name again.
"""

import gzip
import io
import json
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import pre_tokenizers

from security.hostile import only_our_errors
from spile.core.config import build, load_toml
from spile.core.expressions import DocumentFilter, RowFilter
from spile.core.index import INDEX_DTYPE
from spile.core.limited_process import ProcessLimits
from spile.core.listening import ListenAddress
from spile.core.tensors import write_tensors
from spile.corpus.chats.pool import RenderPool
from spile.corpus.chats.rows import Chats, RowReader
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.formats.token_ids import FlatArray, TokenIds
from spile.corpus.named_columns import settled_columns
from spile.corpus.reader import CorpusReader
from spile.corpus.tokenize import TextTokenizer
from spile.corpus.units import CutOptions, make_units
from spile.dataset import format as fmt
from spile.dataset.codec.columns import columns_in, encode_columns
from spile.dataset.codec.features import LatentCounts
from spile.dataset.maintain.verify import verify
from spile.dataset.read.latents import top_rows
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.features import FeatureOptions, FeatureSet, FeatureSpec
from spile.features.ranked import hashes
from spile.features.tally import Tally
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.tensors import load_arrays
from spile.models.files.gguf import convert
from spile.models.files.lora import read_adapter
from spile.models.taps import parse_taps
from spile.objects import LocalObjects, MemoryObjects
from spile.objects.hub.splits import find_splits
from spile.serve.directions import Directions
from spile.serve.routes import Answers
from spile.serve.server import Server
from spile.status.status import read_status
from support import saes, stored, tiny

ENCODERS = Path(__file__).parents[1] / "fixtures" / "encoders"
FINDS = Path(__file__).with_name("finds")
TEXTS = ["one two", "three", "", "four five six", "\u00e9 \ufeff", "seven"] * 2
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"}]


@dataclass(frozen=True)
class Parser:
    """Attributes:
    seeds: makes valid files, with a folder to work in.
    use: does all that is done with one, in that folder; only a `SpileError` may come out.
    words: that mean something in such a file.
    """

    seeds: Callable[[Path], list[bytes]]
    use: Callable[[bytes, Path], None]
    words: tuple[bytes, ...] = ()


def _words(text: str) -> tuple[bytes, ...]:
    """Return the words between spaces."""
    return tuple(word.strip().encode() for word in text.split("  "))


_JSON_WORDS = _words(
    r'"\ud800"  "\u0000"  1e999  -0  NaN  [[[[[[[[  {"a":  ]]]]  }  ,  null  ""  "../x"  true'
) + (b"[" * 3000, b'{"a":' * 3000, b"9" * 5000)  # fmt: skip
_CSV_WORDS = (b'"', b'""', b',"', b'",', b'"\n', b"\r\n", b"\r", b"\n\n", b"1e999", b"\xff",
              b"," * 3000, b'"' * 3001, b"9" * 5000)  # fmt: skip
_YAML_WORDS = _words(
    "!!int ''  !!float x  !!binary x  !!timestamp x  !!set  !!python/name:os  &a [*a]  <<: *a  "
    "? [1]  2001-99-99  1:99:99  0x  0b  -0x_  ~  |  >  - - -  {[  ---"
) + (b"configs:\n- ", b"data_files:\n  - ", b"data_dir: [", b"9" * 5000)
_EXPRESSION_WORDS = _words(
    "**  //  %  0  ==  !=  <  in  not in  is None  is not None  and  or  not  (  )  (1, 'x')  []  "
    "{}  None  True  1j  1e400  b'x'  f'{a}'  'x'  a  b  c  pos  bos  doc  special  a.b  a[0]  "
    "-  ~  lambda: 1  :=  if  else"
) + (b"(" * 300, b"not " * 300, b"9" * 900)
_TEMPLATE_WORDS = _words(
    "{{ ns.a == ns.b }}  |upper  |list  |sort  |tojson  |join  |reverse  |unique  |map('upper')  "
    "[1:]  [::-1]  * 9999999  ** 99  .split('a')  {% for i in range(99999) %}  {% endfor %}  "
    "{% set ns.a = [ns.a, ns.a] %}  {% macro f(n) %}{{ f(n) }}{% endmacro %}  {{ f(1) }}  {# #}  "
    "|attr('__class__')  .__class__  {% include 'x' %}  {{ messages }}  |replace('a', 'aa')  "
    "{% generation %}  {% endgeneration %}  {% break %}  loop.index  cycler(1)  joiner()  {% if  "
    "namespace()  {% endif %}  {% else %}  |default(x)  is defined  is mapping  in messages  |int  "
    "'a' * 999999  |groupby('role')  |dictsort  |max  |float  {% set x %}  {% endset %}  "
    "{% filter upper %}  {% endfilter %}  {% call f() %}  {% endcall %}  messages[0].content"
)
_HTTP_WORDS = _words(
    "%00  %ff  ../  //  ?  &&  =  tap=  doc=-1  count=1e9  by=direction&direction=1  POST  "
    "Content-Length: -1  Content-Length: 99999999999  Transfer-Encoding: chunked  HEAD  HTTP/9.9  "
    'Expect: 100-continue  Cookie: a="  Authorization: Bearer x  OPTIONS  Connection: keep-alive  '
    "q=%e2%80%8b  method=umap  start=9007199254740992  channel=99999999  /api/  name=%0d%0a"
) + (b"\r\n", b"\r\n\r\n", b"\0", b"A" * 70_000)
_TOML_WORDS = _words(
    "'''  [a]  [[a]]  a.b =  0x  1e400  nan  1979-99-99  seq_len =  holdout =  filter =  {a=1}  "
    "'auto'  true  -1  99999999999999999999  fraction =  keep =  max-docs =  encode =  template ="
) + (b"[" * 3000, b"\nwhere = ", b"\n")


# -- corpora -----------------------------------------------------------------------------------


def read_corpus(
    path: Path, reading: RowReader | None = None, options: ReadOptions | None = None
) -> None:
    """Cut a corpus into units and read all of it: every document is read or counted."""
    options = options or ReadOptions()
    files = find_files(str(path))
    with only_our_errors():
        settled_columns(None, files, options.text_column, reading)
    cut = CutOptions(unit_tokens=64, density=0.25, keep=options.keep)
    with closing(CorpusReader(files, options, reading=reading)) as reader:
        units = make_units(reader, cut)
        reader.sample(0)
        for unit in units:
            found = reader.read(unit.spans, unit.first_doc)
            read = len(found.ids) if isinstance(reading, TokenIds) else len(found.texts)
            assert read + found.skipped.total() == unit.num_docs
            found.digest()


def _written(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def _corpus(name: str, reading: RowReader | None = None, **options: Any) -> Any:
    def use(data: bytes, folder: Path) -> None:
        if data:
            read_corpus(_written(data, folder / name), reading, ReadOptions(**options))

    return use


def _lines(folder: Path) -> list[bytes]:
    rows = [{"text": text, "id": n, "meta": {"n": [n]}} for n, text in enumerate(TEXTS)]
    return ["\n".join(map(json.dumps, rows)).encode(), "\ufeff".encode() + b'{"text": "a"}\r\n"b"']


def _chat_lines(folder: Path) -> list[bytes]:
    rows: list[Any] = [{"chat": CHAT * n, "id": n} for n in range(5)]
    rows.append({"chat": [{"role": "tool", "content": None, "tool_calls": [{"name": "f"}]}]})
    return ["\n".join(map(json.dumps, rows)).encode()]


def _array(folder: Path) -> list[bytes]:
    return [json.dumps([{"text": text, "id": 1} for text in TEXTS], indent=n).encode()
            for n in (None, 1)]  # fmt: skip


def _texts(folder: Path) -> list[bytes]:
    return ["\n".join(TEXTS).encode(), "\r\n".join(TEXTS).encode()]


_CSV_FILTER = DocumentFilter("id >= 1 and score < 9 or id in (0, 'x')")


def _csv(folder: Path) -> list[bytes]:
    rows = [("id", "text", "score"), *((f"{n}", text, f"{n / 7}") for n, text in enumerate(TEXTS))]
    quoted = "\r\n".join(",".join(f'"{value}"' for value in row) for row in rows)
    plain = "\n".join(",".join(row) for row in rows)
    return [quoted.encode(), plain.encode(), b'\xef\xbb\xbfid,text,score\n1,"a ""b""\n,c",2\n']


def _zipped(folder: Path) -> list[bytes]:
    return [gzip.compress(data) for data in _lines(folder)]


def _zstd(folder: Path) -> list[bytes]:
    return [zstandard.compress(data) for data in _lines(folder)]


def _cells() -> pa.Table:
    """A kept column of every type."""
    count = len(TEXTS)
    return pa.table(
        {
            "text": TEXTS,
            "id": pa.array(range(count), pa.int64()),
            "score": pa.array([n / 7 for n in range(count)], pa.float32()),
            "when": pa.array(range(count), pa.timestamp("us", "UTC")),
            "price": pa.array([None, *range(1, count)], pa.decimal128(9, 2)),
            "tags": [["a"] * (n % 3) for n in range(count)],
            "meta": [{"a": n, "b": str(n)} for n in range(count)],
            "blob": [bytes([n, 255 - n]) for n in range(count)],
            "ids": pa.array([[n, 1, 2] for n in range(count)], pa.list_(pa.int32())),
            "chat": [CHAT] * count,
        }
    )


def _parquet(folder: Path) -> list[bytes]:
    found: list[bytes] = []
    for options in (
        {"compression": "none", "use_dictionary": False, "row_group_size": 5},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_index": True},
        {"compression": "snappy", "row_group_size": 4},
    ):
        sink = io.BytesIO()
        pq.write_table(_cells(), sink, **options)
        found.append(sink.getvalue())
    return found


def _arrow(folder: Path) -> list[bytes]:
    found: list[bytes] = []
    for write in (pa.ipc.new_file, pa.ipc.new_stream):
        for codec in (None, "zstd"):
            sink = io.BytesIO()
            options = pa.ipc.IpcWriteOptions(compression=codec)
            with write(sink, _cells().schema, options=options) as writer:
                writer.write_table(_cells(), max_chunksize=5)
            found.append(sink.getvalue())
    return found


_KEPT = ("id", "score", "when", "price", "tags", "meta", "blob")
_FILTER = DocumentFilter("id >= 1 and score < 3 and when is not None and text != 'x'")


def _ids(folder: Path) -> list[bytes]:
    ids = [1, 2, 3, 0, 4, 5, 0, 6, 7, 8, 9, 0] * 9
    return [np.array(ids, kind).tobytes() for kind in ("<u2", "<u4")]


def _flat(data: bytes, folder: Path) -> None:
    path = _written(data, folder / "c.bin")
    for kind, separator, leads in (("<u2", 0, False), ("<u4", 0, True), ("<u2", None, False)):
        with only_our_errors():
            flat = FlatArray(np.dtype(kind), separator, leads, window=8)
            read_corpus(path, TokenIds(300, flat=flat, flag="--tokens-dtype"))


# -- models --------------------------------------------------------------------------------------


def _gguf(folder: Path) -> list[bytes]:
    """A model of one layer that is whole."""
    path = folder / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes = {"block_count": 1, "context_length": 64, "feed_forward_length": 4, "vocab_size": 260}
    sizes |= {"embedding_length": 4, "attention.head_count": 2, "rope.dimension_count": 2}
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array("tokenizer.ggml.tokens", [*alphabet, "<s>", "</s>", "<user>", "in"])
    writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3, 3, 4, 1])
    writer.add_array("tokenizer.ggml.merges", ["i n"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 256)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 257)
    writer.add_tensor("token_embd.weight", np.ones((260, 4), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(4, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.read_bytes()]


def _convert(data: bytes, folder: Path) -> None:
    convert(_written(data, folder / "m.gguf"), folder / "converted")


def _model_file(name: str) -> Parser:
    def seeds(folder: Path) -> list[bytes]:
        return [(tiny.write_model(folder / "seed") / name).read_bytes()]

    def use(data: bytes, folder: Path) -> None:
        model = folder / "model"
        if not model.exists():
            tiny.write_model(model)
        before = (model / name).read_bytes()
        try:
            _written(data, model / name)
            checkpoint = open_checkpoint(str(model))
            parse_taps("resid_post:all,q:0", checkpoint.arch)
            checkpoint.shapes()
            TextTokenizer(model, "tokenizer").count(["some words"])
        finally:
            _written(before, model / name)

    return Parser(seeds, use, _JSON_WORDS)


_MODULE = "model.layers.0.self_attn.q_proj"


def _adapter(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False,
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"^model\.layers\.0\..*": 3.0},
        "init_lora_weights": True, "fan_in_fan_out": False, "target_modules": ["q_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A": np.ones((2, 32), np.float32), "lora_B": np.ones((32, 2), np.float32)}
    named = {f"base_model.model.{_MODULE}.{n}.weight": a for n, a in factors.items()}
    write_tensors(folder / "adapter_model.safetensors", named)
    return folder


def _lora_file(name: str) -> Parser:
    def use(data: bytes, folder: Path) -> None:
        path = folder / "adapter"
        if path.exists():
            (path / "adapter_model.safetensors").unlink()
        _written(data, _adapter(path) / name)
        found = read_adapter(path, [f"{_MODULE}.weight"])
        found.merge(f"{_MODULE}.weight", np.ones((32, 32), np.float32))

    return Parser(
        lambda folder: [(_adapter(folder / "seed") / name).read_bytes()], use, _JSON_WORDS
    )


def _sae_file(name: str) -> Parser:
    def written(folder: Path) -> Path:
        for each in (*folder.glob("*"),):
            each.unlink()
        if name == "params.npz":
            folder.mkdir(exist_ok=True)
            tensors: dict[str, Any] = {**saes.random_tensors("jumprelu", 8, 12)}
            np.savez(folder / name, **tensors)
            return folder
        return saes.write_sae(folder, "topk", width=8, latents=12)

    def use(data: bytes, folder: Path) -> None:
        _written(data, written(folder / "sae") / name)
        sae = open_sae(str(folder / "sae"))
        sae.identity()
        arrays, _ = load_arrays(sae)
        assert sum(array.nbytes for array in arrays.values()) < 1 << 28

    return Parser(lambda folder: [(written(folder / "seed") / name).read_bytes()], use, _JSON_WORDS)


def _encoder(kind: str, name: str) -> Parser:
    """A file of an encoder that its own project made; the files beside it are whole."""

    def use(data: bytes, folder: Path) -> None:
        shutil.copytree(ENCODERS / kind, folder / "encoder", dirs_exist_ok=True)
        _written(data, folder / "encoder" / name)
        sae = open_sae(str(folder / "encoder"), layer=1, decodes=True)
        arrays, _ = load_arrays(sae)
        assert sum(array.nbytes for array in arrays.values()) < 1 << 28

    return Parser(lambda _: [(ENCODERS / kind / name).read_bytes()], use, _JSON_WORDS)


_TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "{% set ns = namespace(a=[1], t='x' * 100) %}{% for i in range(9) %}{% set ns.a = [ns.a, ns.a] "
    "%}{% set ns.t = ns.t ~ ns.t[1:]|upper %}{% endfor %}{{ ns.a == [ns.a] }}{{ ns.t|length }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{{ messages|map(attribute='content')|list|join(', ') }}{{ {'a': 2 ** 9}|tojson(indent=2) }}"
    "{{ messages|selectattr('role', 'eq', 'user')|list|length }}{{ 'a b'.split() | sort }}",
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ bos_token }}"
    "{% generation %}{{ messages[-1].content[::2].replace('o', 'oo') }}{% endgeneration %}",
]  # fmt: skip


def _render(data: bytes, folder: Path) -> None:
    template = ChatTemplate(data.decode("utf-8", "replace"), "m/chat_template.jinja")
    limits = ProcessLimits(seconds=0.5, memory=128 << 20)
    with closing(RenderPool(template, limits=limits)) as pool:
        (document,) = pool.documents([CorpusDocument(chat=CHAT, where="f line 1")])
        assert document.skipped or all(a < b for a, b, _ in document.roles)


# -- datasets --------------------------------------------------------------------------------


_datasets: dict[Path, stored.Stored] = {}


def _dataset(folder: Path, **options: Any) -> stored.Stored:
    """Make a dataset once for each folder; callers undo their changes."""
    if folder not in _datasets:
        _datasets[folder] = stored.copied(folder / "dataset", ((3, 2), (4,)), **options)
    return _datasets[folder]


RECORDS = {fmt.UNITS: "units", fmt.CURRENT.done_key(0): "done", fmt.MANIFEST: "manifest",
           fmt.SCALES: "scales"}  # fmt: skip


def read_dataset(path: Path) -> None:
    """Run everything that reads a dataset."""
    with only_our_errors():
        ds = open_dataset(str(path), partial=True)
        for tap in ds.taps:
            with only_our_errors():
                assert len(ds.read(tap, 0, ds.num_tokens)) == ds.num_tokens
            with only_our_errors():
                ds.statistics(tap)
        with only_our_errors():
            assert len(ds.index(0, ds.num_tokens)) == ds.num_tokens
        with only_our_errors():
            ds.documents().to_pylist()
        with only_our_errors():
            ds.document(0)
    with only_our_errors():
        verify(LocalObjects(path))
    with only_our_errors():
        json.dumps(read_status(LocalObjects(path)).to_json(), allow_nan=False)


def _record(key: str, resealed: bool) -> Parser:
    """With `resealed`, compute its checksum again, if it is JSON."""

    def seeds(folder: Path) -> list[bytes]:
        return [(_dataset(folder / "seed", taps=stored.SCALED).path / key).read_bytes()]

    def use(data: bytes, folder: Path) -> None:
        made = _dataset(folder, taps=stored.SCALED)
        if resealed:
            try:
                body: Any = json.loads(data)
                told = ("format", "kind", "checksum")
                body = {name: value for name, value in body.items() if name not in told}
                data = fmt.encode_record(RECORDS[key], body)
            except (ValueError, AttributeError, RecursionError):
                return
        with stored.changed(made, key, fmt.MANIFEST) as paths:
            if key == fmt.CURRENT.done_key(0):
                paths[fmt.MANIFEST].unlink()
            paths[key].write_bytes(data)
            read_dataset(made.path)

    return Parser(seeds, use, _JSON_WORDS)


def _shard(kind: str, compress: bool = False) -> Parser:
    """A file of a unit: the rows of a tap, its index, its statistics or its documents."""

    def key_of(made: stored.Stored) -> str:
        done = made.done(0)
        return {
            "rows": done.shards[0],
            "index": done.index,
            "statistics": done.statistics,
            "documents": done.documents_table,
        }[kind].key

    def seeds(folder: Path) -> list[bytes]:
        made = _dataset(folder / "seed", compress=compress)
        return [(made.path / key_of(made)).read_bytes()]

    def use(data: bytes, folder: Path) -> None:
        made = _dataset(folder, compress=compress)
        with stored.changed(made, key_of(made)) as paths:
            paths[key_of(made)].write_bytes(data)
            read_dataset(made.path)

    return Parser(seeds, use)


def _latents(which: str) -> Parser:
    options: dict[str, Any] = {"taps": stored.LATENTS, **stored.ENCODED}

    def keys(made: stored.Stored) -> list[str]:
        return [shard.key for shard in made.done(0).shards if shard.tap == f"mlp_out_{which}.1"]

    def seeds(folder: Path) -> list[bytes]:
        made = _dataset(folder / "seed", **options)
        return [(made.path / key).read_bytes() for key in keys(made)]

    def use(data: bytes, folder: Path) -> None:
        made = _dataset(folder, **options)
        key = keys(made)[0]
        with stored.changed(made, key) as paths:
            paths[key].write_bytes(data)
            with only_our_errors():
                ds = open_dataset(str(made.path))
                found = ds.latents("mlp_out.1", 0, ds.num_tokens)
                assert found.dense().shape == (ds.num_tokens, 40)
            with only_our_errors():
                top_rows(open_dataset(str(made.path)), "mlp_out.1", 3, 5)
            with only_our_errors():
                verify(made.objects)

    return Parser(seeds, use)


# -- what users and visitors say -----------------------------------------------------------------

_TOML = b"""
model = "demo"
taps = "resid_post:all"
where = '''not bos and
  pos >= 1'''
filter = "score > 1"
seq-len = "4k"
unit_tokens = 64_000
shard-bytes = "1GiB"
compress = true
holdout = 0.01
"""


def _settle(data: bytes, folder: Path) -> None:
    recipe, _ = build(load_toml(_written(data, folder / "c.toml")))
    RowFilter(recipe.where, recipe.every)
    if recipe.filter:
        DocumentFilter(recipe.filter)


def _where(data: bytes, folder: Path) -> None:
    mask = RowFilter(data.decode("utf-8", "replace"), None).mask(np.zeros(3, INDEX_DTYPE))
    assert mask.shape == (3,) and mask.dtype == bool


_ROWS: list[Mapping[str, Any]] = [
    {}, {"a": 1, "b": "x", "c": None}, {"a": "1", "b": 2.5, "c": [1]}, {"a": True, "b": np.nan},
    {"a": 1 << 70, "b": b"x", "c": {"d": 1}}, {"a": {"b": 3}, "c": "\ud800"},
]  # fmt: skip


def _filter(data: bytes, folder: Path) -> None:
    found = DocumentFilter(data.decode("utf-8", "replace"))
    for row in _ROWS:
        assert found.matches(row) in (True, False)
    for bounds in ({}, {"a": (1, 5), "b": ("a", "z")}, {"a": ("1", "2"), "b": (0.5, 2)}):
        assert found.may_match(bounds) in (True, False)


def _taps(data: bytes, folder: Path) -> None:
    arch = read_config(tiny.CONFIG, "c")[1]
    taps = parse_taps(data.decode("utf-8", "replace"), arch)
    assert all(tap.layer is None or 0 <= tap.layer < 3 for tap in taps)


def _card(data: bytes, folder: Path) -> None:
    objects: Any = MemoryObjects("memory://card")
    objects.create("README.md", data)
    objects.create("data/train-00000.parquet", b"x")
    found = find_splits(objects)
    for splits in found.table.values():
        with only_our_errors():
            splits()


def _direction(data: bytes, folder: Path) -> None:
    Directions().add("x", data, {4})


def _npy(folder: Path) -> list[bytes]:
    found: list[bytes] = [b"[1, 2, 3.5, -1e3]"]
    for version in ((1, 0), (2, 0)):
        sink = io.BytesIO()
        np.lib.format.write_array(sink, np.arange(4.0), version)
        found.append(sink.getvalue())
    return found


_REQUESTS = [
    "GET /api/documents?count=5&q=the&after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /api/document?doc=0&tap=logprob&by=channel&channel=0&start=0&count=9 HTTP/1.0\r\n"
    "Host: localhost\r\n\r\n",
    "GET /api/top?tap=embed&channel=1&end=low HTTP/1.0\r\nHost: 127.0.0.1:80\r\n\r\n",
    "GET /api/token?doc=0&token=1&tap=logprob HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "GET /api/latents?by=fires&tap=embed HTTP/1.0\r\nHost: localhost\r\n\r\n",
    "GET /api/projection?method=pca&first=without HTTP/1.0\r\nHost: [::1]\r\n\r\n",
    "GET /api/channels?by=kurtosis HTTP/1.0\r\nHost: localhost\r\nCookie: a=b\r\n\r\n",
    "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "POST /api/directions?name=x HTTP/1.0\r\nHost: localhost\r\nContent-Length: 9\r\n"
    "Content-Type: application/octet-stream\r\n\r\n[1,2,3,4]",
]  # fmt: skip


_servers: dict[Path, Server] = {}


def _server(folder: Path) -> Server:
    """Make one server for each folder; it ends with the process."""
    if folder not in _servers:
        path = _dataset(folder).path
        answers = Answers(
            LocalObjects(path), lambda: open_dataset(str(path), partial=True), tokenizer=None,
            most_bytes=1 << 20,
        )  # fmt: skip
        _servers[folder] = Server(ListenAddress(), answers)
        threading.Thread(target=_servers[folder].serve_forever, daemon=True).start()
    return _servers[folder]


def _answer(server: Server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=60) as found:
        try:
            found.sendall(request)
            found.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: found.recv(1 << 16), b""))
        except OSError:  # it hung up
            return b""


def _request(data: bytes, folder: Path) -> None:
    """Check that no request fails inside the server, and that the next one is answered."""
    server = _server(folder)
    answer = _answer(server, data)
    assert answer.split(None, 2)[1:2] != [b"500"], answer[:2000]
    asked = b"GET /api/layers HTTP/1.0\r\nHost: localhost\r\n\r\n"
    assert b" 200 " in _answer(server, asked)[:20]


def _given(*seeds: str | bytes) -> Callable[[Path], list[bytes]]:
    return lambda folder: [seed if isinstance(seed, bytes) else seed.encode() for seed in seeds]


_CHATS = Chats(("chat",), ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "m"))


def _counted() -> dict[str, np.ndarray]:
    """The columns of a range of three latents in two rows."""
    tally = Tally(0, 3, FeatureOptions(examples=2, drawn=3), signed=False)
    places = np.arange(2)
    values = np.array([1.5, 0.25, 4], np.float32)
    latents, rows = np.array([0, 2, 2]), np.array([0, 0, 1])
    tally.add(latents, values, rows, places, hashes(places), np.array([7, 8], np.int32))
    return tally.columns()


def _features(data: bytes, folder: Path) -> None:
    """Read a range of features whose record vouches for whatever it holds."""
    found = LatentCounts("columns", columns_in("columns", data), 3)
    found.check_places(1)
    for latent in range(3):
        assert found["top/value"][found.run("top", latent)].ndim == 1


def _feature_record(data: bytes, folder: Path) -> None:
    """Read a record of features, sealed again."""
    features = FeatureSet(LocalObjects(folder), "resid_post.0-1")
    try:
        body: Any = json.loads(data)
        sealed = fmt.encode_record("features", body)
    except (ValueError, TypeError, RecursionError):
        return
    features.objects.replace(fmt.FEATURE_SET, sealed)
    features.spec().parts([4])


_SPEC = FeatureSpec(
    tap="resid_post.0", of="", latents=3, names=(), bounds=(0, 3), stride=2,
    options=FeatureOptions(),
)  # fmt: skip

PARSERS: dict[str, Parser] = {
    "features": Parser(lambda _: [encode_columns(_counted())], _features),
    "features.json": Parser(
        lambda _: [json.dumps(_SPEC.to_json()).encode()], _feature_record, _JSON_WORDS
    ),
    "jsonl": Parser(_lines, _corpus("c.jsonl", keep=("id", "meta"), preview=5), _JSON_WORDS),
    "chats": Parser(_chat_lines, _corpus("c.jsonl", _CHATS, keep=("id",)), _JSON_WORDS),
    "json": Parser(_array, _corpus("c.json", keep=("id",)), _JSON_WORDS),
    "csv": Parser(_csv, _corpus("c.csv", keep=("id", "score"), filter=_CSV_FILTER), _CSV_WORDS),
    "txt": Parser(_texts, _corpus("c.txt")),
    "jsonl.gz": Parser(_zipped, _corpus("c.jsonl.gz")),
    "jsonl.zst": Parser(_zstd, _corpus("c.jsonl.zst")),
    "parquet": Parser(_parquet, _corpus("c.parquet")),
    "parquet cells": Parser(
        _parquet, _corpus("c.parquet", keep=_KEPT, filter=_FILTER, preview=9)
    ),
    "parquet ids": Parser(_parquet, _corpus("c.parquet", TokenIds(50, "ids"))),
    "arrow": Parser(_arrow, _corpus("c.arrow", keep=_KEPT, filter=_FILTER)),
    "arrow ids": Parser(_arrow, _corpus("c.arrow", TokenIds(50, "ids"))),
    "token ids": Parser(_ids, _flat),
    "gguf": Parser(_gguf, _convert),
    "config.json": _model_file("config.json"),
    "tokenizer.json": _model_file("tokenizer.json"),
    "model.safetensors": _model_file("model.safetensors"),
    "adapter_config.json": _lora_file("adapter_config.json"),
    "adapter_model.safetensors": _lora_file("adapter_model.safetensors"),
    "cfg.json": _sae_file("cfg.json"),
    "sae_weights.safetensors": _sae_file("sae_weights.safetensors"),
    "params.npz": _sae_file("params.npz"),
    "ae.pt": _encoder("dictionary_learning_topk", "ae.pt"),
    "dictionary config": _encoder("dictionary_learning_topk", "config.json"),
    "transcoder config": _encoder("circuit_tracer_skip", "config.yaml"),
    "chat template": Parser(_given(*_TEMPLATES), _render, _TEMPLATE_WORDS),
    **{f"{kind} record": _record(key, resealed=False) for key, kind in RECORDS.items()},
    **{f"{kind} record, sealed": _record(key, resealed=True) for key, kind in RECORDS.items()},
    "rows": _shard("rows"),
    "rows, compressed": _shard("rows", compress=True),
    "index": _shard("index"),
    "statistics": _shard("statistics"),
    "documents": _shard("documents"),
    "latents": _latents("latents"),
    "latent ids": _latents("latent_ids"),
    "settings": Parser(_given(_TOML), _settle, _TOML_WORDS),
    "where": Parser(
        _given("not bos and (pos - 1) % 4 in (1, 2) or doc // 3 > -5"), _where, _EXPRESSION_WORDS
    ),
    "filter": Parser(
        _given("a == 'en' and b >= 3 or not c in (1, 'x')", "a is not None", "1 < a <= 2.5"),
        _filter,
        _EXPRESSION_WORDS,
    ),
    "taps": Parser(
        _given("resid_post:0-2/2+-1,blocks.1.hook_resid_post,embed", "hidden_states[3]"), _taps
    ),
    "dataset card": Parser(
        _given(
            "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: data/*\n"
            "  default: true\n- config_name: b\n  data_dir: x\nwhen: 2001-12-14\n---\nText",
            "---\nconfigs: [{config_name: 'a', data_files: {train: '**/*.parquet'}}]\nn: 0x1F\n---",
        ),
        _card,
        _YAML_WORDS,
    ),
    "direction": Parser(_npy, _direction, _JSON_WORDS),
    "web request": Parser(_given(*_REQUESTS), _request, _HTTP_WORDS),
}  # fmt: skip
