"""The command: parse, call one function, print.

Flags are made from the declarations in `config.py`. Everything heavy is imported by the verb that
needs it, so that `status`, `verify` and `--help` start at once and run where jax is absent.
"""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spile import __version__
from spile.config import STORE_DTYPES, Recipe, Runtime, build, flag_of, load_toml
from spile.errors import ConfigError, InputError, Interrupted, SpileError

_EXTRACT_HELP = """\
Run a model over a corpus and keep the activations of the tapped places as a dataset.
The same command resumes after any interruption, and --out alone is enough to resume.

  spile extract --model demo --corpus demo --taps resid_post:20 --max-docs 50 --out acts/demo
  spile extract --model ./Qwen2.5-0.5B --corpus 'texts/*.parquet' \\
                --taps resid_post:all,mlp_out:12 --out acts/qwen
"""
_TAPS_HELP = """\
taps:   site:layers, comma separated (`spile taps --model M` lists those of a model)
sites:  resid_pre  resid_mid  resid_post  attn_in  attn_out  mlp_in  mlp_hidden  mlp_out
        q  k  v  q_rot  k_rot  z  attn_pattern  router_logits  expert_weights  expert_ids
        and, without layers: embed  final_norm  logits  logprob  entropy
layers: 20   20-27   0-27/4   all   -1   3+7+11      (counted from 0)
        TransformerLens, HF and vLLM names work too: blocks.20.hook_resid_post,
        hidden_states[21], aux_hidden_states[21]

exit codes: 0 done; 2 bad input or configuration; 3 data or store fault; 130 interrupted;
            134 a process of the world was lost: start all of them again
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `spile`."""
    code = run(sys.argv[1:] if argv is None else argv)
    if os.environ.get("SPILE_WORLD_CHILD"):
        # At its exit jax would wait for processes that have failed, too.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    stop = threading.Event()

    def interrupted(number: int, frame: object) -> NoReturn:
        # Noted as well as raised: what is raised here may land where a library swallows it.
        stop.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    try:
        arguments = _parser().parse_args(argv, argparse.Namespace(stop=stop, argv=list(argv)))
        logging.basicConfig(
            level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO,
            format="spile: %(message)s",
            handlers=[_handler()],
        )
        logging.getLogger("jax").setLevel(logging.WARNING)
        return arguments.verb(arguments)
    except SpileError as error:
        print(f"spile: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"spile: {Interrupted()}", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.addFilter(logging.Filter("spile"))
    return handler


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spile",
        description="Taps a language model while it reads a corpus, and keeps the activations.",
    )
    parser.add_argument("--version", action="version", version=f"spile {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(
        name: str, handle: Callable[[argparse.Namespace], int], help: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"description": help, **more},
        )  # fmt: skip
        sub.set_defaults(verb=handle)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    for name, handle, help, description in (
        ("extract", _extract, "make a dataset, or continue it", _EXTRACT_HELP),
        ("plan", _plan, "what extract would cost: documents, tokens, bytes, memory", None),
    ):
        sub = verb(name, handle, help, epilog=_TAPS_HELP, description=description or help)
        sub.add_argument("--out", metavar="DIR", help="where the dataset goes")
        sub.add_argument("--config", metavar="FILE", help="TOML file of options; flags win")
        sub.add_argument("--quiet", action="store_true", help="only errors")
        _add_options(sub.add_argument_group("recipe: what the dataset is"), Recipe)
        _add_options(sub.add_argument_group("runtime: how it is made"), Runtime)

    sub = verb("taps", _taps, "the places a model can be tapped at: shapes, bytes, other names")
    sub.add_argument("--model", metavar="X", required=True, help="'demo', or a model's directory")
    sub.add_argument("--seq-len", metavar="N", help="for attn_pattern [2048, or the maximum]")
    sub.add_argument("--store-dtype", choices=STORE_DTYPES, default="bfloat16")
    sub.add_argument("--all", action="store_true", help="every layer, not one line per site")
    sub = verb("compile", _compile, "compile the step for devices that need not be here: "
               "memory, collectives, speed, cost", epilog=_TAPS_HELP)  # fmt: skip
    sub.add_argument("--model", metavar="X", required=True, help="directory with config.json")
    sub.add_argument("--taps", metavar="X", required=True, help="as for extract")
    sub.add_argument("--topology", metavar="X", help="e.g. v5e-64, v4-8, h200 [this machine]")
    sub.add_argument("--mesh", metavar="X", default="auto", help="as for extract [auto]")
    sub.add_argument("--fsdp", metavar="N", help="as for extract")
    sub.add_argument("--search", action="store_true", help="try every mesh that may do")
    sub.add_argument("--on", metavar="libtpu|cpu|here", help="whose compiler [libtpu, else cpu]")
    for name in ("seq-len", "batch-tokens", "compute-dtype", "store-dtype"):
        sub.add_argument(f"--{name}", metavar="X", help="as for extract")
    sub = verb("convert", _convert, "make a model directory from a GGUF file")
    sub.add_argument("source", metavar="SRC.gguf")
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument(
        "--tokenizer", metavar="DIR", help="take tokenizer.json from here instead of the file"
    )
    sub = verb("check", _check, "recompute samples with HF transformers and compare")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--samples", metavar="N", type=int, default=4, help="documents [4]")
    for name in ("model", "lora", "corpus"):
        sub.add_argument(f"--{name}", metavar="X", help="where it is now, if it has moved")
    sub = verb("export", _export, "write a dataset in another tool's format")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--to", metavar="FORMAT", required=True, help="saelens, parquet, npy, zarr, "
                     "activault, openmoss, saev or legacy")  # fmt: skip
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument("--taps", metavar="T", help="some of the dataset's [all]")
    sub.add_argument("--context-size", metavar="N", type=int, help="rows of a sequence [seq-len]")
    sub.add_argument("--dtype", metavar="X", help="[as stored if the format has it, else float32]")
    sub = verb("status", _status, "where a dataset stands")
    sub.add_argument("out", metavar="OUT")
    sub = verb("verify", _verify, "audit every byte of a dataset")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--partial", action="store_true", help="units not done yet are no fault")
    sub = verb("gc", _gc, "remove what no finished unit needs; safe beside running workers")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument(
        "--abandoned", action="store_true",
        help="also attempts at unfinished units: only if nothing is running",
    )  # fmt: skip
    return parser


def _add_options(group: Any, options: type[Recipe] | type[Runtime]) -> None:
    for f in dataclasses.fields(options):
        meta = f.metadata
        if meta["kind"] == "switch":
            group.add_argument(
                flag_of(f.name), action="store_true", default=None, help=meta["help"]
            )
        else:
            hint = "|".join(meta["choices"]) or {"count": "N", "size": "SIZE"}.get(
                meta["kind"], "X"
            )
            group.add_argument(flag_of(f.name), metavar=hint, help=meta["help"])


def _options(arguments: argparse.Namespace) -> tuple[Recipe, Runtime, str | None]:
    options = load_toml(Path(arguments.config)) if arguments.config else {}
    names = (*Recipe.names(), *Runtime.names(), "out")
    flags = {name: getattr(arguments, name) for name in names}
    options |= {name: value for name, value in flags.items() if value is not None}
    out = options.pop("out", None)
    if out is not None and (not isinstance(out, str) or not out):
        raise ConfigError(f"--out must be a non-empty text, got {out!r}")
    return *build(options), out


def _extract(arguments: argparse.Namespace) -> int:
    from spile.engine.parent import is_child, supervise
    from spile.engine.place import find_place

    recipe, runtime, out = _options(arguments)
    if out is None:
        raise ConfigError("--out is missing: where should the dataset go?")
    place = find_place(runtime, os.environ)
    if place:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter(f"spile [{place}]: %(message)s"))
        if not is_child():
            from spile.objects import open_objects

            return supervise(arguments.argv, place, open_objects(out))
        arguments.quiet |= not place.leads

    from spile.engine.local import extract
    from spile.metrics import Counters
    from spile.terminal import extract_summary, progress

    counters = Counters()
    with progress(counters, quiet=arguments.quiet or arguments.json) as on_start:
        outcome = extract(
            recipe, out, runtime, counters=counters, on_start=on_start, stop=arguments.stop
        )
    if place and not place.leads:
        return 0
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    elif not arguments.quiet:
        print(extract_summary(out, outcome, counters))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from spile.engine.estimate import estimate, planned_cuts, refuse_if_too_large
    from spile.engine.resolve import resolve
    from spile.layout import devices_of
    from spile.objects import open_objects
    from spile.store.ledger import Ledger
    from spile.terminal import plan_table

    recipe, runtime, out = _options(arguments)
    ledger = Ledger(open_objects(out or "."))
    platform, present = _platform()
    job = resolve(recipe, ledger, platform)
    devices = devices_of(runtime.mesh) or present
    processes = runtime.num_processes or 1
    cuts = planned_cuts(job, runtime, platform, devices, None, processes)
    objects = ledger.objects
    done = ledger.done_units()
    cost = estimate(
        job, runtime, platform, done=done, free_bytes=objects.free_bytes(), cuts=cuts,
        processes=processes,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(cost), "total_bytes": cost.total_bytes}))
    else:
        plan_table(job.recipe.to_json(), cost)
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)
    return 0


def _platform() -> tuple[str, int]:
    """The kind of devices a run here would use, and how many."""
    try:
        import jax
    except ImportError:
        return "cpu", 1
    return jax.default_backend(), jax.device_count()


def _taps(arguments: argparse.Namespace) -> int:
    from spile.models.checkpoint import read_arch
    from spile.models.taps import describe_taps
    from spile.terminal import taps_table

    arch = read_arch(arguments.model)
    given = Recipe(seq_len=arguments.seq_len).seq_len
    seq_len = given or min(2048, arch.max_positions)
    entries = describe_taps(
        arch, seq_len, arguments.store_dtype, each_layer=arguments.all or arguments.json
    )
    if arguments.json:
        print(json.dumps(entries))
    else:
        taps_table(entries)
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    from spile.engine.compile import Question, compile_step, search
    from spile.engine.targets import find_target
    from spile.models.checkpoint import read_arch
    from spile.terminal import compile_text

    names = ("model", "taps", "seq_len", "compute_dtype", "store_dtype")
    recipe = Recipe(**{name: getattr(arguments, name) for name in names})
    names = ("batch_tokens", "mesh", "fsdp")
    runtime = Runtime(**{name: getattr(arguments, name) for name in names})
    arch = read_arch(arguments.model)
    question = Question(arch, recipe, runtime, find_target(arguments.topology, arguments.on))
    found = search(question) if arguments.search else [compile_step(question, question.layout())]
    if not arguments.json:
        print(compile_text(found))
    elif arguments.search:
        print(json.dumps({"meshes": [each.to_json() for each in found]}))
    else:
        print(json.dumps(found[0].to_json()))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from spile.models.gguf import convert

    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    try:
        convert(Path(arguments.source), Path(arguments.dest), tokenizer=tokenizer)
    except OSError as error:
        where = error.filename or arguments.dest
        raise InputError(f"{where}: {error.strerror or error}") from error
    print(json.dumps({"model": arguments.dest}) if arguments.json else f"made {arguments.dest}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from spile.engine.recheck import check
    from spile.terminal import check_text

    if arguments.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {arguments.samples}")
    moved = Recipe(model=arguments.model, lora=arguments.lora, corpus=arguments.corpus)
    report = check(arguments.out, samples=arguments.samples, recipe=moved)
    print(json.dumps(report.to_json()) if arguments.json else check_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def _export(arguments: argparse.Namespace) -> int:
    from spile.interop.export import export
    from spile.terminal import export_text

    names = ("to", "taps", "context_size", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    made = export(arguments.out, arguments.dest, **options)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else export_text(made))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from spile.monitor.status import read_status
    from spile.objects import open_objects
    from spile.terminal import status_text

    status = read_status(open_objects(arguments.out))
    print(json.dumps(status.to_json()) if arguments.json else status_text(arguments.out, status))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.store.verify import verify
    from spile.terminal import verify_text

    report = verify(open_objects(arguments.out), partial=arguments.partial)
    if arguments.json:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}))
    else:
        print(verify_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def _gc(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.store.gc import collect_garbage

    removed = collect_garbage(open_objects(arguments.out), abandoned=arguments.abandoned)
    if arguments.json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"{len(removed)} orphans removed")
    return 0


if __name__ == "__main__":
    main()
