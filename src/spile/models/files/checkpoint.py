"""A model directory as Hugging Face lays it out: config, tokenizer files, safetensors.

It holds everything that can be known without loading weights: the architecture, the place of each
tensor, whether the set of tensors is exactly the expected one, and the model's identity. No jax.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import Any, cast

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.core.identity import full_digest, sampled_digests
from spile.core.tensors import TensorInfo
from spile.core.threads import mapped
from spile.models.config.arch import Arch
from spile.models.config.family import Family
from spile.models.config.hf_config import read_config
from spile.models.config.specs import ParamSpec, TensorSource, block_specs, outer_specs
from spile.models.files.demo import demo_model
from spile.models.files.lora import Adapter, read_adapter
from spile.models.files.quantized import PackedTensor, Part, Quantization, read_quantization
from spile.models.files.safetensors import open_tensors
from spile.objects.hub.names import pinned
from spile.objects.opened import Opened, OpenedFile, OpenedRemote
from spile.objects.paths import AnyPath, files_below, path_of, read_json

_log = logging.getLogger("spile.models")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_THREADS = 16  # files opened in parallel: a bucket has high latency


@dataclass(frozen=True)
class Checkpoint:
    """A model as found at its directory or URL, perhaps with an adapter to merge into it.

    Its files stay open: whatever their paths name later, identity and weights are of these.
    """

    directory: AnyPath
    family: Family
    arch: Arch
    tensors: dict[str, tuple[Opened, TensorInfo]]
    files: tuple[Opened, ...]
    prefix: str  # of its tensors' names
    adapter: Adapter | None = None
    packed: Mapping[str, PackedTensor] = field(default_factory=dict[str, PackedTensor])

    def identity(self) -> dict[str, str]:
        """Digests of everything that determines the activations; paths are not included."""
        tokenizer = [self.directory / "tokenizer.json", self.directory / "tokenizer_config.json"]
        return {
            "config": full_digest(self.directory / "config.json"),
            "tokenizer": full_digest(*(path for path in tokenizer if path.is_file())),
            "weights": "+".join(sampled_digests(self.files)),
            **({"lora": self.adapter.identity()} if self.adapter else {}),
        }

    def check_files(self, *, loading: bool = False) -> None:
        """Raise DataError if a file has changed since it was opened; see `OpenedFile.check`."""
        files = (*self.files, *([self.adapter.weights] if self.adapter else []))
        for file in files:
            if isinstance(file, OpenedFile):
                file.check(loading=loading)
        remote = [file for file in files if isinstance(file, OpenedRemote)]
        list(mapped(OpenedRemote.check, remote, _THREADS))

    def source(self, name: str) -> TensorSource:
        """The tensor that holds one of our arrays."""
        head = {"head": self.family.head, "head_bias": self.family.head_bias}
        return self.family.weights.get(name) or TensorSource(head[name])

    def names(self, spec: ParamSpec, layer: int | None = None) -> list[str]:
        """Names of the tensors that hold one of our arrays: one, or one for each of its items."""
        source = self.source(spec.name)
        prefix = self.prefix if spec.name in self.family.weights else ""
        items = range(spec.shape[0]) if source.one_by_one else [None]
        return [prefix + source.name.format(layer=layer, expert=i, head=i) for i in items]

    def stored(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors of a tensor: itself, or those it is packed in."""
        packed = self.packed.get(name)
        return tuple(part.name for part in packed.parts) if packed else (name,)

    def stays_packed(self, spec: ParamSpec) -> bool:
        """Whether an array of a block can be copied as it is stored, and decoded on the device."""
        local = all(isinstance(file, OpenedFile) for file in self.files)
        name = self.names(spec, self.layer_with(spec))[0]
        return self.adapter is None and local and name in self.packed

    def layer_with(self, spec: ParamSpec) -> int:
        """The first block that has an array."""
        kinds = {kind: spec in block_specs(self.arch, kind) for kind in set(self.arch.layers)}
        return next(number for number, kind in enumerate(self.arch.layers) if kinds[kind])

    def packed_bytes(self) -> dict[str, int]:
        """Stored bytes of the arrays of a block that stay packed.

        A tensor that holds several arrays counts for the first of them.
        """
        found: dict[str, int] = {}
        seen = set[str]()
        for spec in filter(self.stays_packed, block_specs(self.arch)):
            names = self.names(spec, self.layer_with(spec))
            stored = {part for name in names for part in self.stored(name)} - seen
            seen |= stored
            infos = (self.tensors[part][1] for part in stored)
            found[spec.name] = sum(info.stop - info.start for info in infos)
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The expected shapes of the tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for spec in outer_specs(self.arch):
            shapes |= dict.fromkeys(self.names(spec), spec.shape)
        for number, layer in enumerate(self.arch.layers):
            block = {spec.name: spec for spec in block_specs(self.arch, layer)}
            for spec in block.values():
                shape = self.source(spec.name).shape(spec, block)
                shapes |= dict.fromkeys(self.names(spec, number), shape)
        return shapes


def read_arch(model: str) -> Arch:
    """Read a model's architecture from its config.json alone."""
    return _read_config(model_directory(model))[1]


# Names that people type without the owner, and their owners.
_OWNERS = {
    r"gpt2(-medium|-large|-xl)?": "openai-community",
    r"pythia-.*": "EleutherAI",
    r"gemma-.*": "google",
    r"(meta-)?llama-[23].*": "meta-llama",
    r"(mistral|mixtral)-.*": "mistralai",
    r"smollm.*": "HuggingFaceTB",
    r"qwen.*": "Qwen",
    r"olmo.*": "allenai",
    r"phi-.*": "microsoft",
    r"starcoder2.*": "bigcode",
    r"gpt-oss-.*": "openai",
    r"(gpt-j|gpt-neo)-.*": "EleutherAI",
    r"opt-.*": "facebook",
    r"bloomz?-.*": "bigscience",
    r"falcon-.*": "tiiuae",
    r"stablelm-.*": "stabilityai",
    r"granite-.*": "ibm-granite",
    r"glm-4.*": "zai-org",
    r"(c4ai|aya)-.*": "CohereLabs",
}


# Names of encoders that people type without the owner. (Those of others say so in their config.)
_ENCODERS = (
    r"(distil|al|mobile|modern|camem|sci|fin)?bert-.*|(distil|xlm-)?roberta-.*|electra-.*"
    r"|m?deberta-.*|t5-(small|base|large|3b|11b)"
)


def model_directory(model: str) -> AnyPath:
    """The directory of a model; raises if there is none."""
    directory = _directory(model)
    # (A web server cannot tell whether it has a directory.)
    if (directory / "config.json").is_file() or directory.is_dir():
        return directory
    if re.fullmatch(_ENCODERS, model, re.IGNORECASE):
        raise InputError(
            f"--model {model}: is an encoder, whose tokens see later tokens; give a causal "
            "language model, which predicts the next token, e.g. openai-community/gpt2"
        )
    owners = (owner for name, owner in _OWNERS.items() if re.fullmatch(name, model, re.IGNORECASE))
    owner = next(owners, None)
    meant = f"; did you mean {owner}/{model}, a model of the Hub?" if owner else ""
    raise InputError(
        f"--model {model}: no such directory; give 'demo', a directory with config.json, "
        f"tokenizer.json and *.safetensors, or OWNER/NAME of the Hub{meant}"
    )


def open_checkpoint(model: str, lora: str | None = None) -> Checkpoint:
    """Find a model by its directory, URL or name; read and check its config and headers."""
    directory = model_directory(model)
    if not (directory / "tokenizer.json").is_file():
        raise InputError(f"--model {model}: no tokenizer.json there; save the fast tokenizer too")
    family, arch = _read_config(directory)
    tensors: dict[str, tuple[Opened, TensorInfo]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        opened = pool.map(partial(open_tensors, folder=directory), _weight_files(directory))
        files, headers = zip(*opened, strict=True)
    for file, header in zip(files, headers, strict=True):
        for name, info in header.items():
            if name in tensors:
                raise InputError(f"{file}: tensor {name} is also in {tensors[name][0].name}")
            tensors[name] = (file, info)
    stems = (p for p in family.prefixes if p + family.weights["embed"].name in tensors)
    prefix = next(stems, family.prefixes[0])
    elsewhere = {
        name: source
        for name, source in family.elsewhere.items()
        if prefix + source.name.format(layer=0) in tensors
    }
    family = dataclasses.replace(family, weights={**family.weights, **elsewhere})
    checkpoint = Checkpoint(directory, family, arch, tensors, files, prefix)
    checkpoint = dataclasses.replace(checkpoint, packed=_packed(checkpoint))
    _check_tensors(checkpoint)
    if lora is None:
        return checkpoint
    adapter = read_adapter(lora, checkpoint.shapes())
    _warn_of_tied_head(checkpoint, adapter)
    return dataclasses.replace(checkpoint, adapter=adapter)


def _warn_of_tied_head(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Warn if an adapter of the embedding also changes the head, as PEFT does on merging."""
    embedding = checkpoint.prefix + checkpoint.family.weights["embed"].name
    if checkpoint.arch.tied_head and embedding in adapter.targets:
        _log.warning(
            "%s: changes %s, which is this model's head as well (tie_word_embeddings); merged, it "
            "changes logits, logprob and entropy, too; PEFT without merging leaves the head alone",
            adapter.directory,
            embedding,
        )


def _packed(checkpoint: Checkpoint) -> dict[str, PackedTensor]:
    """The tensors that are stored in fewer bytes."""
    path = checkpoint.directory / "config.json"
    config, nested = read_json(path), checkpoint.family.nested
    inner: Any = config.get(nested) if nested else None
    outside = "quantization_config" in config or not isinstance(inner, dict)
    way = read_quantization(config if outside else cast("Mapping[str, Any]", inner), str(path))
    if way is None and "mxfp4" in checkpoint.family.quantized:  # some copies do not say so
        way = Quantization("mxfp4")
    packed: dict[str, PackedTensor] = {}
    for name, shape in checkpoint.shapes().items() if way else ():
        assert way
        if found := way.packed(name, shape, checkpoint.tensors):
            packed[name] = found
    return packed


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are not exactly the expected ones, naming all faults."""
    found, floats = checkpoint.tensors, ("float32", "float16", "bfloat16")
    expected: dict[str, tuple[int, ...]] = {}
    allowed: dict[str, tuple[str, ...]] = {}
    for name, shape in checkpoint.shapes().items():
        packed = checkpoint.packed.get(name)
        for part in packed.parts if packed else (Part(name, shape, floats),):
            expected[part.name], allowed[part.name] = part.shape, part.dtypes
    family, prefix = checkpoint.family, checkpoint.prefix
    unused = [stem + name for name in family.unused_weights for stem in {prefix, ""}]
    if checkpoint.arch.tied_head:
        unused.append(family.head)
    # Some files hold keys and values of blocks that borrow others'.
    borrowing = [n for n, layer in enumerate(checkpoint.arch.layers) if layer.borrows]
    for name in ("wk", "wv", "bk", "bv", "k_norm"):
        source = family.weights[name].name if borrowing else ""
        unused += [prefix + source.format(layer=number) for number in borrowing]
    extra = [
        name
        for name in sorted(set(found) - set(expected))
        if not any(fnmatchcase(name, pattern) for pattern in unused)
    ]
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in extra]
    faults += [
        f"{name} has shape {list(found[name][1].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name][1].shape != shape
    ]
    faults += [
        f"{name} holds {found[name][1].dtype}, not {' or '.join(allowed[name])}"
        for name in expected
        if name in found and found[name][1].dtype.name not in allowed[name]
    ]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise InputError(f"{checkpoint.directory}: tensors do not fit config.json: {shown}")


def _directory(model: str) -> AnyPath:
    return demo_model() if model == "demo" else path_of(pinned(model, "model"))


def _read_config(directory: AnyPath) -> tuple[Family, Arch]:
    path = directory / "config.json"
    return read_config(read_json(path), str(path))


def _weight_files(directory: AnyPath) -> tuple[AnyPath, ...]:
    index, single = directory / _INDEX, directory / _SINGLE
    if not index.is_file():
        _refuse_pickles(directory, single)
        return (single,)
    listed: Json = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise InputError(f"{index}: has no usable weight_map")
    names = sorted(set(listed.values()))
    if odd := [n for n in names if PurePosixPath(n).name != n or n in ("", "..")]:
        raise InputError(f"{index}: {odd[0]!r} is not a plain file name")
    return tuple(directory / name for name in names)


def _refuse_pickles(directory: AnyPath, wanted: AnyPath) -> None:
    if wanted.is_file():
        return
    if any(path.name.endswith((".bin", ".pt", ".pth")) for path in files_below(directory)):
        raise InputError(
            f"{wanted}: no such file; pickled .bin weights are never read, as reading them can run "
            "any program: convert them once, on a machine you can spare, by transformers' "
            "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIR), and give DIR"
        )
