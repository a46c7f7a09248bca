"""Translate the command lines of former tools into Spile's: one table, and the code that reads it.

    spile legacy fineweb|arc|multihost|launch|monitor [--dry-run] OLD FLAGS [-- NEW FLAGS]

The table gives, for each old flag, the flag that replaces it, alone or together with others, or the
reason why none does. `docs/fleets.md` shows the table; a test checks that both agree.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spile.cli.flags import Verbs
from spile.core.errors import ConfigError
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.status.listing import Listing
    from spile.status.status import Status

HOSTS_FILE = "spile-hosts.txt"
AGGREGATED, SHARD_LIST = "aggregated_metadata.json", "shard_list.json"
_SEQ_LEN = 2048
_MACHINES = 32
_ENCODER = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"
# Layers that were extracted if none were named.
_LAYERS = {"fineweb": "10-23", "launch": "10-23", "arc": "-14--1", "multihost": "all"}
# Values of flags that were not given.
_DEFAULTS = {
    "fineweb": {"model_path": "KathirKs/qwen-2.5-0.5b", "output_dir": "activations_fineweb"},
    "arc": {
        "model_path": "KathirKs/qwen-2.5-7b",
        "dataset_path": "arc_formatted_challenges.jsonl",
        "grid_encoder": _ENCODER,
        "predictions_per_task": "8",
        "output_dir": "activations_arc_v5e64",
    },
    "multihost": {
        "model_path": "Qwen/Qwen2.5-0.5B",
        "grid_encoder": _ENCODER,
        "predictions_per_task": "8",
        "output_dir": "activations",
    },
    "launch": {"model_path": "KathirKs/qwen-2.5-0.5b"},
    "monitor": {"total_machines": str(_MACHINES)},
}


@dataclass(frozen=True)
class Old:
    """A flag of a former tool."""

    name: str
    new: str  # the new flag; empty if there is none
    how: str = ""  # how values change; if there is no new flag, the reason
    takes: str = "value"  # value | values | nothing
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class LegacyProgram:
    """A former script."""

    script: str
    verb: str  # of Spile
    flags: tuple[Old, ...]


@dataclass(frozen=True)
class Translation:
    """The command to run instead."""

    argv: tuple[str, ...]
    notes: tuple[str, ...]  # flags that are dropped, and why; defaults that are used
    files: Mapping[str, str]  # to write first
    monitor: "Monitor | None" = None  # if set, it runs instead of the command

    def __str__(self) -> str:
        return shlex.join(("spile", *self.argv))


_RAN = (
    Old("model_path", "--model", "[KathirKs/qwen-2.5-0.5b; arc: KathirKs/qwen-2.5-7b; multihost: "
        "Qwen/Qwen2.5-0.5B]"),
    Old("max_seq_length", "--seq-len", "with --long-docs truncate: longer texts were cut"),
    Old("layers_to_extract", "--taps", "resid_post:LAYERS [10-23; arc: the last 14; multihost: "
        "all]", "values"),
    Old("max_samples", "--max-docs", "was per machine: times --total_machines"),
    Old("batch_size", "--batch-tokens", "sequences times their length"),
    Old("coordinator_address", "--coordinator"),
    Old("host_id", "--process-id"),
    Old("num_hosts", "--num-processes"),
    Old("mesh_type", "--mesh", choices=("1d", "2d", "3d", "auto")),
    Old("output_dir", "--out", "unless it went to a bucket [activations_fineweb; arc: "
        "activations_arc_v5e64; multihost: activations]"),
    Old("upload_to_gcs", "--out", "gs://BUCKET/PREFIX: written there directly", "nothing"),
    Old("gcs_bucket", "--out", "gs://BUCKET/PREFIX"),
    Old("gcs_prefix", "--out", "gs://BUCKET/PREFIX [activations_fineweb; arc: "
        "activations_arc_v5e64; multihost: activations/multihost]"),
    Old("shard_size_gb", "--shard-bytes", "GiB; in a bucket at most 64 MiB"),
    Old("compress_shards", "--compress", "zstd, lossless; no pickle", "nothing"),
    Old("no_compress_shards", "", "the default; --compress compresses", "nothing"),
    Old("delete_local_after_upload", "", "rows for a bucket are never stored on the local disk",
        "nothing"),
    Old("multihost", "", "--coordinator joins the hosts", "nothing"),
    Old("verbose", "", "progress is shown unless --quiet is given", "nothing"),
)  # fmt: skip
_SHARED_OUT = (
    Old("machine_id", "--share", "I/N, from 0"),
    Old("total_machines", "--share", f"I/N, from 0 [{_MACHINES} with --machine_id]"),
    Old("no_data_parallel", "--mesh", "1: one device, whatever --mesh_type says", "nothing"),
    Old("use_data_parallel", "", "the default; --no_data_parallel turns it off", "nothing"),
)
_ARC = (
    Old("dataset_path", "--corpus", 'arc:PATH(prompt="chat"), with --messages messages [arc: '
        "arc_formatted_challenges.jsonl]"),
    Old("max_tasks", "--corpus", "arc:PATH(max_tasks=N); was per machine: times --total_machines"),
    Old("grid_encoder", "--corpus", 'arc:PATH(encoder="rows+shape") [rows+shape]'),
    Old("predictions_per_task", "--corpus", "arc:PATH(predictions=N, augment=...) [8]"),
    Old("prompt_version", "", 'prompts are plain, chat or turns: --corpus \'arc:PATH(prompt='
        '"chat")\''),
    Old("random_seed", "--corpus", "arc:PATH(seed=N); the random choices differ"),
)  # fmt: skip
PROGRAMS = {
    "fineweb": LegacyProgram("extract_activations_fineweb[_multihost].py", "extract", (
        Old("dataset_name", "--corpus", "NAME:CONFIG:SPLIT [HuggingFaceFW/fineweb-edu]"),
        Old("dataset_config", "--corpus", "NAME:CONFIG:SPLIT [sample-10BT]"),
        Old("dataset_split", "--corpus", "NAME:CONFIG:SPLIT [train]"),
        *_SHARED_OUT, *_RAN,
    )),
    "arc": LegacyProgram("extract_activations_arc_v5e64.py", "extract", (
        *_ARC, *_SHARED_OUT, *_RAN,
    )),
    "multihost": LegacyProgram("multihost_extract.py", "extract", (
        *_ARC,
        Old("activation_type", "--taps", "resid_post, mlp_out or attn_out",
            choices=("residual", "mlp", "attn")),
        Old("fsdp_size", "--fsdp", "with --mesh 3d"),
        Old("topology", "", "Spile finds the devices; `spile compile --topology` needs none"),
        Old("checkpoint_dir", "", "the same command continues from --out"),
        Old("enable_checkpointing", "", "always on: a run continues from --out", "nothing"),
        Old("no_checkpointing", "", "always on: a run continues from --out", "nothing"),
        Old("enable_barrier_sync", "", "hosts meet through jax, at --coordinator", "nothing"),
        Old("no_barrier_sync", "", "hosts meet through jax, at --coordinator", "nothing"),
        Old("barrier_controller_host", "", "hosts meet through jax, at --coordinator"),
        Old("barrier_port", "", "hosts meet through jax, at --coordinator"),
        Old("is_barrier_server", "", "process 0 is the meeting point", "nothing"),
        *_SHARED_OUT, *_RAN,
    )),
    "launch": LegacyProgram("launch_distributed_extraction.py", "launch", (
        Old("deployment", "launch", "gcloud, ssh or local", choices=("gcp_tpu", "ssh", "local")),
        Old("tpu_names", "--tpu", "one for each", "values"),
        Old("zone", "--zone"),
        Old("hosts", "--hosts", f"a file with their names, {HOSTS_FILE}", "values"),
        Old("total_machines", "--slices", "local; otherwise the number of names"),
        Old("gcs_bucket", "--out", "gs://BUCKET/activations_fineweb"),
        Old("model_path", "--model", "[KathirKs/qwen-2.5-0.5b]"),
        Old("dataset_name", "--corpus", "NAME:CONFIG:SPLIT [HuggingFaceFW/fineweb-edu]"),
        Old("dataset_config", "--corpus", "NAME:CONFIG:SPLIT [sample-10BT]"),
        Old("dataset_split", "--corpus", "NAME:CONFIG:SPLIT [train]"),
        Old("layers_to_extract", "--taps", "resid_post:LAYERS [10-23]", "values"),
        Old("max_seq_length", "--seq-len", "with --long-docs truncate: longer texts were cut"),
        Old("batch_size", "--batch-tokens", "sequences times their length"),
        Old("max_samples", "--max-docs", "was per machine: times their number"),
        Old("shard_size_gb", "--shard-bytes", "GiB; in a bucket at most 64 MiB"),
        Old("working_dir", "--folder"),
        Old("logs_dir", "", "each host keeps its log; `spile launch logs` shows them"),
        Old("monitor", "", "once: `spile launch status`; repeatedly: `spile status OUT --follow`",
            "nothing"),
    )),
    "monitor": LegacyProgram("monitor_extraction.py", "status", (
        Old("gcs_bucket", "OUT", "gs://BUCKET/PREFIX"),
        Old("gcs_prefix", "OUT", "gs://BUCKET/PREFIX"),
        Old("aggregate", "status", f"and {AGGREGATED} and {SHARD_LIST} are written beside the "
            "dataset", "nothing"),
        Old("list_shards", "status", "and every shard is listed, as `spile ls OUT` does",
            "nothing"),
        Old("total_machines", "status", f"with a line for each machine [{_MACHINES}]"),
    )),
}  # fmt: skip

_SITES = {"residual": "resid_post", "mlp": "mlp_out", "attn": "attn_out"}
_ENCODERS = {"Minimal": "plain", "RowNumber": "rows", "GridShape": "shape"}
_TARGETS = {"gcp_tpu": "gcloud", "ssh": "ssh", "local": "local"}
_PREFIXES = {"fineweb": "activations_fineweb", "arc": "activations_arc_v5e64",
             "multihost": "activations/multihost", "launch": "activations_fineweb",
             "monitor": "activations_fineweb"}  # fmt: skip
# A worker's state, in the monitor's words.
_STATES = {
    "not started": "NOT STARTED",
    "starting": "IN PROGRESS",
    "running": "IN PROGRESS",
    "done": "COMPLETE",
    "stopped": "STOPPED",
}

Given = Mapping[str, Any]


def add_legacy(verbs: Verbs) -> None:
    sub = verbs.add(
        "legacy",
        legacy,
        "run a command of the tools before Spile, and print the new one",
        usage="spile legacy PROGRAM [--dry-run] OLD FLAGS [-- NEW FLAGS]",
    )
    sub.switch("--dry-run", "only print it")
    sub.place("program", choices=PROGRAMS, metavar=None)
    sub.place("arguments", "as they were typed", nargs=argparse.REMAINDER, metavar=None)


def legacy(arguments: argparse.Namespace) -> int:
    words = [word for word in arguments.arguments if word != "--dry-run"]
    dry_run = arguments.dry_run or len(words) < len(arguments.arguments)
    made = translate(arguments.program, words)
    told = [f"# {note}" for note in made.notes]
    told += [f"# {name} holds: {' '.join(text.split())}" for name, text in made.files.items()]
    told.append(str(made))
    print("\n".join(told), file=None if dry_run else sys.stderr)
    if dry_run:
        return 0
    if made.monitor is not None:
        return made.monitor.run()
    for name, text in made.files.items():
        path = Path(name)
        if path.exists() and path.read_text("utf-8") != text:
            raise ConfigError(f"{name} exists and holds something else; move it away")
        path.write_text(text, "utf-8")
    given = argparse.Namespace(**{**vars(arguments), "argv": list(made.argv)})
    inner = arguments.parse(made.argv, given)
    return inner.verb(inner)


def translate(program: str, arguments: Sequence[str]) -> Translation:
    """Translate a former command line into one of Spile's.

    Raises:
        ConfigError: if the former tool would have refused it, or nothing here does the same.
    """
    known = PROGRAMS[program]
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    old, today = arguments[:at], arguments[at + 1 :]
    given = vars(_parser(program).parse_args(old))
    notes = [f"--{f.name}: {f.how}" for f in known.flags if not f.new and given[f.name]]
    for name, value in _left_out(program, given, today):
        given[name] = value
        notes.append(f"--{name} is not given: {value}, as before")
    if program == "monitor":
        if not given["gcs_bucket"]:
            raise ConfigError("--gcs_bucket is missing; it names the dataset")
        out = _bucket(program, given)
        machines = _number("total_machines", given["total_machines"])
        asked = Monitor(out, machines, given["list_shards"], given["aggregate"])
        return Translation(
            ("status", out, *today), tuple(notes), {}, monitor=None if today else asked
        )
    if program == "launch":
        where, files = _launch(given)
        words = (*where, "--", *_extract(program, given, today), *today)
        return Translation(("launch", *words), tuple(notes), files)
    return Translation(("extract", *_extract(program, given, today), *today), tuple(notes), {})


def _left_out(program: str, given: Given, today: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return the old defaults of flags that were not given, except those that `today` sets."""
    settled = {word.partition("=")[0] for word in today}
    flags = {flag.name: flag for flag in PROGRAMS[program].flags}
    for name, value in _DEFAULTS[program].items():
        in_bucket = name == "output_dir" and given.get("upload_to_gcs")
        if given[name] is None and flags[name].new not in settled and not in_bucket:
            yield name, value
    shared = program != "monitor" and given.get("machine_id") is not None
    if shared and given["total_machines"] is None and "--share" not in settled:
        yield "total_machines", str(_MACHINES)


def _extract(program: str, given: Given, today: Sequence[str]) -> list[str]:
    """Return the flags of `spile extract`, without those that `today` sets."""
    words: list[str] = []
    settled = {word.partition("=")[0] for word in today}
    for flag, make in _MADE.items():
        value = None if flag in settled else make(program, given)
        if value is True:
            words.append(flag)
        elif value is not None:
            words += [flag, str(value)]
    return words


def _corpus(program: str, given: Given) -> str | None:
    if program in ("fineweb", "launch"):
        name = given.get("dataset_name") or "HuggingFaceFW/fineweb-edu"
        config = given.get("dataset_config") or "sample-10BT"
        return f"{name}:{config}:{given.get('dataset_split') or 'train'}"
    if not given["dataset_path"]:
        return None
    settings = ['prompt="chat"']
    if encoder := given.get("grid_encoder"):
        settings.append(f'encoder="{_encoder(encoder)}"')
    if predictions := given.get("predictions_per_task"):
        count = _number("predictions_per_task", predictions)
        settings.append(f"predictions={count}")
        if count > 1:  # the same transformations as before, but other draws
            settings.append('augment="rotate,flip,colors"')
    if (seed := _count("random_seed", given)) is not None:
        settings.append(f"seed={seed}")
    if (tasks := _count("max_tasks", given)) is not None:
        settings.append(f"max_tasks={tasks * (_count('total_machines', given) or 1)}")
    return f"arc:{given['dataset_path']}({', '.join(settings)})"


def _encoder(text: str) -> str:
    """`GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))` -> `rows+shape`."""
    named = re.findall(r"(\w+?)(?:Grid)?Encoder", text)
    found = [new for name in named for old, new in _ENCODERS.items() if old in name]
    if len(found) != len(named) or not found:
        known = ", ".join(_ENCODERS)
        raise ConfigError(f"--grid_encoder {text!r}: no such encoder; choose from {known}")
    words = [new for new in _ENCODERS.values() if new in found and new != "plain"]
    return "+".join(words) or "plain"


def _taps(program: str, given: Given) -> str:
    site = _SITES[given.get("activation_type") or "residual"]
    layers = " ".join(given.get("layers_to_extract") or ()).split()  # some were one word: "10 11"
    numbers = [_number("layers_to_extract", layer) for layer in layers]
    return f"{site}:{'+'.join(map(str, numbers)) or _LAYERS[program]}"


def _out(program: str, given: Given) -> str | None:
    if program == "launch" or given.get("upload_to_gcs"):
        if not given["gcs_bucket"]:
            raise ConfigError("--gcs_bucket is missing; it says where the dataset goes")
        return _bucket(program, given)
    return given["output_dir"]


def _bucket(program: str, given: Given) -> str:
    bucket = str(given["gcs_bucket"]).removeprefix("gs://").strip("/")
    prefix = str(given.get("gcs_prefix") or _PREFIXES[program]).strip("/")
    return f"gs://{bucket}/{prefix}"


def _share(program: str, given: Given) -> str | None:
    machines = _count("total_machines", given)
    if program == "launch" or machines in (None, 1):
        return None
    machine = given["machine_id"]
    if machine is None:
        raise ConfigError(f"--total_machines {machines} is given, but not --machine_id")
    return f"{machine}/{machines}"


def _docs(program: str, given: Given) -> int | None:
    each = _count("max_samples", given)
    machines = _machines(given) if program == "launch" else _count("total_machines", given) or 1
    return None if each is None else each * machines


def _batch(program: str, given: Given) -> int | None:
    rows = _count("batch_size", given)
    if rows is None:
        return None
    if program == "multihost":  # there it counted all hosts together
        rows = max(1, rows // (_count("num_hosts", given) or 1))
    return rows * (_count("max_seq_length", given) or _SEQ_LEN)


def _mesh(program: str, given: Given) -> str | None:
    if given.get("no_data_parallel"):
        return "1"
    return given.get("mesh_type") or ("3d" if given.get("fsdp_size") else None)


def _messages(program: str, given: Given) -> str | None:
    return "messages" if given.get("dataset_path") else None


def _shard_bytes(program: str, given: Given) -> str | None:
    text = given.get("shard_size_gb")
    if text is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise ConfigError(f"--shard_size_gb must be a number, got {text!r}")
    return None if text is None else f"{text}GiB"


def _as_given(name: str) -> Callable[[str, Given], Any]:
    return lambda program, given: given.get(name) or None


# New flags, in the order in which they are printed.
_MADE: dict[str, Callable[[str, Given], Any]] = {
    "--model": _as_given("model_path"),
    "--corpus": _corpus,
    "--messages": _messages,
    "--taps": _taps,
    "--seq-len": _as_given("max_seq_length"),
    "--long-docs": lambda program, given: "truncate",
    "--max-docs": _docs,
    "--out": _out,
    "--share": _share,
    "--batch-tokens": _batch,
    "--shard-bytes": _shard_bytes,
    "--compress": _as_given("compress_shards"),
    "--mesh": _mesh,
    "--fsdp": _as_given("fsdp_size"),
    "--coordinator": _as_given("coordinator_address"),
    "--num-processes": _as_given("num_hosts"),
    "--process-id": _as_given("host_id"),
}


def _launch(given: Given) -> tuple[list[str], dict[str, str]]:
    """Return the launch target with its flags, and the files that it reads."""
    deployment = given["deployment"]
    if deployment is None:
        raise ConfigError("--deployment is missing; choose gcp_tpu, ssh or local")
    names = {"gcp_tpu": given["tpu_names"], "ssh": given["hosts"]}.get(deployment)
    machines = _machines(given)
    if deployment != "local" and not names:
        raise ConfigError(f"--deployment {deployment} needs --tpu_names or --hosts")
    if names and len(names) != machines:
        raise ConfigError(f"--total_machines is {machines}, but {len(names)} are named")
    words = [_TARGETS[deployment]]
    if given["working_dir"]:
        words += ["--folder", given["working_dir"]]
    if deployment == "local":
        return [*words, "--slices", str(machines)], {}
    if deployment == "ssh":
        hosts = "".join(f"{name}\n" for name in names or ())
        return [*words, "--hosts", HOSTS_FILE], {HOSTS_FILE: hosts}
    for name in names or ():
        words += ["--tpu", name]
    return [*words, *(["--zone", given["zone"]] if given["zone"] else [])], {}


def _machines(given: Given) -> int:
    named = given["tpu_names"] if given["deployment"] == "gcp_tpu" else given["hosts"]
    return _count("total_machines", given) or len(named or ()) or 1


@dataclass(frozen=True)
class Monitor:
    """Prints the output of `monitor_extraction.py` for a dataset of Spile."""

    out: str
    machines: int
    list_shards: bool
    aggregate: bool

    def run(self) -> int:
        from spile.cli.look import listing_lines, status_text
        from spile.dataset.records.ledger import Ledger
        from spile.status.listing import list_files
        from spile.status.status import read_status

        objects = open_objects(self.out)
        begun = Ledger(objects).read_table() is not None
        status = read_status(objects) if begun else None
        states = self.states(status)
        for machine, state in enumerate(states):
            print(f"machine {machine:03d}: {state}")
        print(status_text(self.out, status) if status else f"{self.out}: no dataset yet")
        asked = begun and (self.list_shards or self.aggregate)
        files = list_files(objects) if asked else None
        if self.list_shards and files:
            for line in listing_lines(self.out, files):
                print(line)
        if self.aggregate:
            self._write(files, status, states)
        return 0

    def states(self, status: "Status | None") -> list[str]:
        """Return each machine's state: COMPLETE, IN PROGRESS, STOPPED, NOT STARTED or ERROR."""
        if status is None:
            return ["NOT STARTED"] * self.machines
        by_share = {str(worker.get("share")): worker["state"] for worker in status.workers}
        if self.machines == 1 and status.workers:  # a single machine has no share
            by_share.setdefault("0/1", status.workers[0]["state"])
        shares = [f"{machine}/{self.machines}" for machine in range(self.machines)]
        if status.done:  # every unit is done, whoever did it
            return ["COMPLETE" for _ in shares]
        return [_STATES.get(by_share.get(share, "not started"), "ERROR") for share in shares]

    def _write(
        self, files: "Listing | None", status: "Status | None", states: Sequence[str]
    ) -> None:
        shards = [asdict(file) for file in files or ()]
        total = {
            "dataset": self.out,
            "total_machines": self.machines,
            "machines": {f"machine_{number:03d}": state for number, state in enumerate(states)},
            "total_shards": len(shards),
            "total_samples": status.documents if status else 0,
            "total_bytes": files.bytes if files else 0,
            "status": status.to_json() if status else None,
        }
        beside = open_objects(self.out.rpartition("/")[0])
        for name, value in ((AGGREGATED, total), (SHARD_LIST, shards)):
            beside.replace(name, json.dumps(value, indent=1).encode())
            print(f"written: {beside.url}/{name}")


def _count(name: str, given: Given) -> int | None:
    return None if given.get(name) is None else _number(name, given[name])


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ConfigError(f"--{name} must be a whole number, got {text!r}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def _parser(program: str) -> _Parser:
    parser = _Parser(prog=f"spile legacy {program}", add_help=False)
    for flag in PROGRAMS[program].flags:
        more: dict[str, Any] = {"choices": flag.choices or None}
        if flag.takes == "nothing":
            more = {"action": "store_true"}
        elif flag.takes == "values":
            more = {"nargs": "+"}
        parser.add_argument(f"--{flag.name}", **more)
    return parser
