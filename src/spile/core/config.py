"""The user's options: `Recipe` (what the dataset is), `Runtime` and `RayOptions` (how it is made).

A `Recipe` field of None means "not given". When a run resumes, its value comes from the store;
otherwise `plan/resolve.py` chooses it.
"""

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.core.disagreement import BOUND
from spile.core.errors import ConfigError
from spile.core.options import (
    Options,
    count,
    explained,
    flag_of,
    option,
    parse_count,
    shown,
    switch,
)

__all__ = [
    "RayOptions",
    "Recipe",
    "Runtime",
    "activation_dtype",
    "build",
    "canonical_json",
    "flag_of",
    "load_toml",
    "parse_count",
]

STORE_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3", "int8")
COMPUTE_DTYPES = ("bfloat16", "float32", "float16", "float8_e4m3")
HAS_BFLOAT16 = 8.0  # the compute capability of the first NVIDIA GPUs that multiply it
MAX_DOC_BYTES = 64 << 20
PREVIEW = 200
ALL_LATENTS = 0  # what `--latents all` stores in place of a number


# The options of a recipe that say what prompts are, to `spile rollouts`.
PROMPT_OPTIONS = (
    "model", "corpus", "text_column", "messages", "prompt_column", "prompt_prefix",
    "prompt_suffix", "system", "template", "text_documents", "filter", "shuffle_docs", "fraction",
    "holdout", "part", "dedupe", "max_doc_bytes", "keep", "max_docs",
)  # fmt: skip
# Those that change the program of a step, which `spile compile` takes, too.
STEP_OPTIONS = (
    "taps", "encode", "latents", "encode_error", "attn_top", "top_logits", "objective", "baseline",
    "writers", "steps", "lens", "splice", "pool", "reduce", "seq_len", "compute_dtype",
    "store_dtype",
)  # fmt: skip


def activation_dtype(compute_dtype: str) -> str:
    """Return the dtype of activations: float8 and float16 apply to matrix products only."""
    beside = {"float8_e4m3": "bfloat16", "float16": "float32"}
    return beside.get(compute_dtype, compute_dtype)


@explained
@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Options):
    """Options that define the dataset. Two runs of one recipe make the same dataset.

    Defaults are in brackets; None stands for them.
    """

    model: str | None = option(
        "'demo'; a directory or URL with config.json, tokenizer.json and *.safetensors; or a model "
        "of the Hugging Face Hub, OWNER/NAME[@REVISION]",
        topic="model",
        common=True,
    )
    lora: str | None = option("directory, URL or Hub name of a PEFT LoRA adapter, merged at load")
    corpus: str | None = option(
        "'demo'; a file, directory or glob of Parquet, Arrow, JSONL, JSON, CSV, TSV or text "
        "(.gz and .zst too), of token ids in Parquet, Arrow or .bin, or its URL; a dataset of the "
        "Hub, OWNER/NAME[:CONFIG[:SPLIT]], or of any kind of files, datasets:OWNER/NAME…; a "
        "program, FILE.py:FUNCTION; ARC tasks, arc:PATH",
        topic="corpus",
        common=True,
    )
    like: str | None = option(
        "make the rows of this dataset again, with another --model, --lora, --taps, --encode, "
        "--splice or dtype; every other option comes from that dataset",
        topic="datasets that exist",
    )
    more: bool | None = switch(
        "add the documents that the corpus has gained: new files, new shards on the Hub, or more "
        "of it up to a larger --max-docs or --max-tokens; existing rows do not change"
    )
    add_corpus: str | None = option(
        "like --more, but add the documents of another corpus, read by the same recipe; files that "
        "the dataset has already, known by their content, are left out"
    )
    taps: str | None = option(
        "where to tap: site:layers, comma separated, e.g. resid_post:20-27,mlp_out:12,z:all,embed; "
        "`spile taps --model X` lists what a model has",
        kind="list",
        topic="taps",
        common=True,
    )
    add_taps: str | None = option(
        "add taps to the dataset in --out, spelled as in --taps; --encode, --store-dtype and "
        "--compute-dtype then apply to the new taps, every other option is the dataset's",
        kind="list",
        topic="datasets that exist",
    )
    encode: str | None = option(
        "store sparse latents instead of a tap's rows: directory or URL of a sparse autoencoder or "
        "transcoder (SAELens, Gemma Scope, Qwen-Scope, Llama Scope, sparsify, "
        "dictionary_learning, circuit-tracer), or of a folder with one per tap or layer; or "
        "TAP=DIR, comma separated",
        kind="list",
        topic="taps",
        common=True,
    )
    latents: int | None = count(
        "how many latents to store per row, largest first; with --pool mean or max also all, as a "
        "dense row [the encoder's own k, or 64]",
        named={"all": ALL_LATENTS},
    )
    encode_error: bool | None = switch(
        "with --encode, store each row less its reconstruction, too (of a transcoder: the row that "
        "it reconstructs, which --taps must name)"
    )
    attn_top: int | None = count(
        "how many keys to store per row and head, largest weights first, if --taps names attn_top "
        "[8]"
    )
    top_logits: int | None = count(
        "how many of the most likely next tokens to store per row, if --taps names top_logits [64]"
    )
    objective: str | None = option(
        "what SITE_grad and SITE_attr taps are the gradient of: logprob, the sum of the "
        "log-probabilities of a document's next tokens; loss:assistant, less that sum over a "
        "role's tokens alone; logit-diff:COLUMN_A,COLUMN_B, the logit of one token less that of "
        "another after a document's last token; direction:TAP=FILE.npy, the sum of dot products "
        "with a vector; or your own, FILE.py:FUNCTION [logprob]"
    )
    baseline: str | None = option(
        "what SITE_attr taps compare values with: zero; a dataset, row by row, whose documents are "
        "as long as these (such as corrupted prompts); or a dataset of --reduce, by its means: "
        "DATASET:LABEL if it has several [zero]"
    )
    writers: str | None = option(
        "what SITE_edge taps multiply with the gradient, for edge attribution patching: values "
        "that are added to the residual stream, spelled as in --taps, e.g. "
        "embed,attn_out:all,mlp_out:all; or each head, z:all",
        kind="list",
    )
    steps: int | None = count(
        "integrated gradients: SITE_grad and SITE_attr take the mean gradient at N points on the "
        "straight path from the baseline to a site's values, one site at a time"
    )
    lens: str | None = option(
        "directory of a lens (spile lens fit, tuned-lens or jacobian-lens), whose most likely next "
        "tokens --taps lens_top:LAYERS stores; --top-logits says how many"
    )
    splice: str | None = option(
        "change values inside the model: zero:TAP, ablate:TAP=FILE.npy, steer:TAP=FILE.npy*4, "
        "mean:TAP=FILE.npy or a dataset, replace-with-sae:TAP=DIR, or your own, FILE.py:FUNCTION; "
        "comma separated, or given several times; none",
        kind="list",
    )
    where: str | None = option(
        "keep only these rows, e.g. 'not bos and pos >= 1'. Of each row: bos eos special (any "
        "special token); first and last, the ends of a context (a document longer than --seq-len "
        "has several); end, a document's last token (these rows are not in the corpus's order: "
        "ds.pooled joins labels); pos in the context, offset in the document; doc, token_id; in "
        "chats system user assistant tool template; in rollouts also thinking answer",
        topic="rows",
        common=True,
    )
    every: int | None = count("keep every N-th row of a context, after --where")
    pool: str | None = option(
        "store one row for several tokens: mean, max, last or first, of those that --where and "
        "--every keep of each document; or of each turn (mean:turn) or role (mean:assistant) of a "
        "chat, or of spans of characters that a column gives (mean:COLUMN)"
    )
    reduce: str | None = option(
        "store no rows, but for each label the count and mean of all tokens that --where and "
        "--every keep; with var, cov or moments also their variance, covariance or second "
        "moments, with cov:TAP those of each tap and this one together; jacobian:TAP: this tap's "
        "mean Jacobian with respect to each: `ds.reduced` returns them, in float64"
    )
    by: str | None = option(
        "with --reduce, the column whose values are the labels, several joined by commas, or role "
        "for the speakers of a chat [one label for all]"
    )
    seq_len: int | None = count(
        "tokens in a context [2048, or the model's maximum]",
        minimum=8,
        auto=True,
        topic="contexts",
        common=True,
    )
    pack: str | None = option(
        "ffd: pack several documents into a row, isolated; none: one context per row [ffd]",
        choices=("ffd", "none"),
    )
    long_docs: str | None = option(
        "documents longer than --seq-len: split into contexts, or truncate [split]",
        choices=("split", "truncate"),
    )
    special_tokens: str | None = option(
        "special tokens to add: the tokenizer's default, only a leading BOS, or none [tokenizer]",
        choices=("tokenizer", "bos", "none"),
    )
    text_column: str | None = option(
        "column or key that holds the text [text, or the only column of strings]",
        topic="texts",
        common=True,
    )
    messages: str | None = option(
        "column or key that holds chats: lists of messages with role and content, or from and "
        "value; several are joined by +, e.g. system+conversations [known layouts are recognised]",
        topic="chats",
    )
    prompt_column: str | None = option(
        "column or key that holds the user's prompt; needs --response-column"
    )
    response_column: str | None = option("column or key that holds the assistant's response")
    prompt_prefix: str | None = option("text to put before each prompt")
    prompt_suffix: str | None = option("text to put after each prompt")
    system: str | None = option("system message for chats that do not begin with one")
    template: str | None = option(
        "Jinja file of a chat template, or none: prompt and response alone [the model's own]"
    )
    generation_prompt: bool | None = switch("end each chat with the template's generation prompt")
    text_documents: str | None = option(
        "in plain text files, a document is a line or the whole file [line]",
        choices=("line", "file"),
        topic="texts",
    )
    tokens_column: str | None = option(
        "column of token ids, which are used unchanged, or several joined by +, e.g. "
        "prompt_ids+completion_ids: the last is the assistant's [input_ids or tokens, if no column "
        "holds strings]",
        topic="token ids",
    )
    roles_column: str | None = option(
        "column with the speaker of each token id: names of roles, flags of the index, or a loss "
        "mask, whose ones are the assistant's [roles, in rollouts]"
    )
    logprobs_column: str | None = option(
        "column with the engine's log-probability of each token id, or of the last ones; compared "
        "with the model's own, which then runs whole; none: not read [logprobs, in rollouts]"
    )
    tokens_dtype: str | None = option(
        "dtype of .bin files [uint16 if the vocabulary fits]", choices=("uint16", "uint32")
    )
    doc_separator: str | None = option(
        "in .bin files: eos or an id ends a document, bos begins one; none: each document "
        "has --seq-len tokens [eos]"
    )
    filter: str | None = option(
        "only documents that match this expression over their columns, e.g. \"language == 'en' and "
        'score >= 3"',
        topic="documents",
    )
    shuffle_docs: int | None = count(
        "seed: read units of the whole corpus in random order, not in file order, so that "
        "--max-docs and --max-tokens take a sample of it",
        minimum=0,
    )
    fraction: float | None = option(
        "only this share of the documents, chosen by a hash of the text", kind="share"
    )
    holdout: float | None = option(
        "leave out this share of the documents, chosen by another hash", kind="share"
    )
    part: str | None = option(
        "rest: the documents that --holdout keeps; holdout: those it leaves out [rest]",
        choices=("rest", "holdout"),
    )
    dedupe: bool | None = switch(
        "leave out documents whose exact text occurred before; reads the corpus once more, "
        "to cut it into units"
    )
    min_tokens: int | None = count("only documents of at least N tokens")
    max_doc_tokens: int | None = count("only documents of at most N tokens")
    max_doc_bytes: int | None = option(
        "only documents of at most N bytes [64MiB]", kind="size", minimum=1
    )
    keep: str | None = option(
        "columns or keys to keep for each document, comma separated, or none [id, url, and up to "
        "32 columns of numbers, booleans or texts of at most 64 characters; from a program, all]",
        kind="list",
    )
    preview: int | None = count("characters of each document's text to keep [200]", minimum=0)
    max_docs: int | None = count(
        "only the first N documents of the corpus",
        common=True,
    )
    max_tokens: int | None = count(
        "only the first units estimated to hold N tokens",
        common=True,
    )
    unit_tokens: int | None = count(
        "tokens in a unit, which is committed or redone as a whole, or auto [4M on accelerators; "
        "on a CPU about half a minute of work, at most 64k]",
        auto=True,
        topic="units",
    )
    compute_dtype: str | None = option(
        "float8_e4m3 multiplies in 8 bits and keeps the rest in bfloat16: faster on GPUs from "
        "Hopper on, less exact; float16 multiplies in 16 bits and keeps the rest in float32, for "
        "GPUs without bfloat16, such as a T4 [bfloat16 on accelerators that have it, otherwise "
        "float16; float32 on CPU]",
        choices=COMPUTE_DTYPES,
        topic="numbers",
        common=True,
    )
    store_dtype: str | None = option(
        "float8_e4m3 is scaled by row, int8 by channel "
        "[bfloat16; float32 if --compute-dtype float32 is given]",
        choices=STORE_DTYPES,
        common=True,
    )


@explained
@dataclass(frozen=True, kw_only=True, repr=False)
class Runtime(Options):
    """Options for making the dataset. None of them changes its contents.

    Defaults are in brackets.
    """

    batch_tokens: int | None = count(
        "tokens in a device step, or auto [1k on CPU; elsewhere 16k, 32k for small models, "
        "or what fits]",
        auto=True,
        topic="speed and memory",
    )
    shard_bytes: int = option(
        "largest shard file, e.g. 1GiB [1GiB]",
        default=1 << 30,
        kind="size",
        minimum=4096,
        topic="files",
    )
    compress: bool = switch(
        "for cold storage: byte planes and zstd, lossless, about 0.7 of the size in bfloat16; "
        "slower to write and to read",
        default=False,
    )
    threads: int | None = count(
        "threads that tokenize [all cores but one]",
        auto=True,
        topic="speed and memory",
    )
    render_processes: int | None = count(
        "separate processes that render chats, so that no template can stop this one; at least 1 "
        "[1 per 4 cores, at most 8]",
        minimum=0,
        auto=True,
    )
    write_threads: int = count("taps written in parallel [4]", default=4)
    queue_depth: int = count(
        "batches that may wait between two stages; limits memory [2]", default=2
    )
    spool: str | None = option(
        "local directory where files for a bucket wait for their upload, so that a slow network "
        "does not stop the device [memory]",
        topic="files",
    )
    cache: str | None = option(
        "directory for corpora that the `datasets` library has converted to Parquet "
        "[SPILE_CACHE/datasets]"
    )
    max_bytes: int | None = option(
        "stop at the end of a unit, before the whole dataset exceeds this size, e.g. 2TB",
        kind="size",
        minimum=1,
    )
    share: str | None = option(
        "I/N, from 0: this machine does share I of N of the units first, then helps with "
        "unfinished ones [MACHINE_ID/TOTAL_MACHINES]",
        topic="several machines",
    )
    stale_after: int = count(
        "seconds without a heartbeat after which another worker's unit may be redone [30]",
        default=30,
    )
    mesh: str = option(
        "devices by axis: auto, 1 (one device), 1d (all on model), 2d (hosts x chips), 3d, or e.g. "
        "data=16,fsdp=2,model=2 [auto: the fastest that fits]",
        default="auto",
        topic="devices",
    )
    attention: str = option(
        "attention kernel: auto, mosaic, cudnn, triton, wide, splash, or blocked (plain products, "
        "of recurrent layers, too) "
        "[auto: the fastest that supports the model on this device]",
        default="auto",
        choices=("auto", "mosaic", "cudnn", "triton", "wide", "splash", "blocked"),
    )
    weights: str = option(
        "where blocks are kept: resident (on the device), or host (memory) or disk, from which "
        "each is copied when it runs [auto: on the device as far as they fit, then host, then "
        "disk]",
        default="auto",
        choices=("auto", "resident", "host", "disk"),
    )
    fsdp: int | None = count("size of the fsdp axis, for --mesh 3d [2]")
    world: str = option(
        "slice: all joined processes do a unit together; host: each does its own units, if the "
        "model fits [slice]",
        default="slice",
        choices=("slice", "host"),
        topic="joined processes",
    )
    coordinator: str | None = option(
        "HOST:PORT of process 0, which the other processes join [COORDINATOR_ADDRESS]"
    )
    num_processes: int | None = count(
        "number of processes to join [NUM_HOSTS, or the number that the cluster reports]"
    )
    process_id: int | None = count(
        "this process's number, from 0 [HOST_ID, CLOUD_TPU_TASK_ID, TPU_WORKER_ID]", minimum=0
    )
    bind_address: str | None = option(
        "HOST:PORT that process 0 listens on [all addresses, the coordinator's port]"
    )
    start_timeout: int = count("seconds to wait for all processes to join [300]", default=300)
    heartbeat_timeout: int = count(
        "seconds without a heartbeat after which a lost process ends the world [100]", default=100
    )
    ignore_space: bool = switch(
        "run even when the disk looks too small for the estimate",
        default=False,
        topic="what would stop a run",
    )
    allow_nonfinite: bool = switch(
        "keep rows with NaN or infinity instead of stopping", default=False
    )
    max_disagreement: float = option(
        "of rollouts: the mean distance between the engine's log-probabilities and the model's, in "
        "nats, beyond which to warn [0.1, what rounding to bfloat16 explains]",
        default=BOUND,
        kind="share",
    )
    metrics: str | None = option(
        "where to report the run's metrics, comma separated: tensorboard:DIR, wandb[:PROJECT], "
        "prometheus:[HOST:]PORT, or another installed backend",
        kind="list",
        topic="metrics",
    )
    metrics_every: int = count("seconds between metrics [10]", default=10)
    metrics_from: str = option(
        "which joined processes report metrics [leader]",
        default="leader",
        choices=("leader", "all"),
    )
    run_name: str | None = option("name of this run in metrics [the last part of --out]")
    profile: str | None = option(
        "steps=FIRST:END[,dir=DIR][,host=0-3][,device=0-1][,python=0-1]: trace these steps, "
        "from 0, without END, at these levels [dir=spile-profile,host=2,device=1,python=0]"
    )


@explained
@dataclass(frozen=True, kw_only=True, repr=False)
class RayOptions(Options):
    """Options for `--engine ray`: the slices, and where they run.

    Like `Runtime`, none of them changes the contents of a dataset.
    """

    engine: str = option(
        "local: this process and those it is joined to; ray: slices on a Ray cluster [local]",
        default="local",
        choices=("local", "ray"),
        topic="Ray",
    )
    ray_address: str = option(
        "HOST:PORT of the cluster; auto: the one this machine belongs to [auto]", default="auto"
    )
    ray_slices: int | None = count("largest number of slices at a time [as many as fit]")
    ray_hosts: int = count("hosts of a slice, which do units together [1]", default=1)
    ray_resources: str | None = option(
        "resources that a slice takes on each host, e.g. GPU=1 or TPU=4,CPU=8 [all accelerators of "
        "a node, or its CPUs]"
    )
    ray_topology: str | None = option(
        "TPU topology of a slice, reserved as a whole by Ray, e.g. v5e:4x4 or v4:2x2x2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resources()
        version, colon, topology = (self.ray_topology or "v:x").partition(":")
        if not (version and colon and topology):
            raise ConfigError(f"--ray-topology must be e.g. v5e:4x4, got {self.ray_topology!r}")
        if self.ray_topology and self.ray_hosts > 1:
            raise ConfigError("--ray-topology says how many hosts there are: leave out --ray-hosts")

    def resources(self) -> dict[str, float]:
        """Return the resources that a slice takes on each host; empty if it takes them all."""
        found: dict[str, float] = {}
        for part in (self.ray_resources or "").split(",") if self.ray_resources else ():
            name, _, amount = part.partition("=")
            try:
                found[name.strip()] = float(amount)
            except ValueError:
                found[""] = 0
        if "" in found or any(not 0 < amount < 1e6 for amount in found.values()):
            raise ConfigError(
                f"--ray-resources must be e.g. GPU=1 or TPU=4,CPU=8, got {self.ray_resources!r}"
            )
        return found


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value in its canonical form, from which digests are computed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def load_toml(path: Path, more: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a TOML file. Keys are spelled like flags (dashes or underscores)."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number with thousands of digits
        raise ConfigError(f"--config {path}: {error}") from None
    known = {*Recipe.names(), *Runtime.names(), "out", *more}
    options: dict[str, Any] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"--config {path}: unknown key {shown(key)}{hint}")
        options[name] = value
    return options


def build(options: Mapping[str, Any]) -> tuple[Recipe, Runtime]:
    """Split a flat mapping of options (None: not given) into a `Recipe` and a `Runtime`."""
    given = {k: v for k, v in options.items() if v is not None}
    recipe = Recipe(**{k: v for k, v in given.items() if k in Recipe.names()})
    runtime = Runtime(**{k: v for k, v in given.items() if k in Runtime.names()})
    return recipe, runtime
