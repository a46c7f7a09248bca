"""The command: its verbs and flags, its exit codes. What each verb does is in its group's file.

Flags are made from the declarations in `core/config.py`.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from spile import __version__
from spile.cli import dataset, extract, launch, look, model, plan, rows
from spile.cli.legacy import PROGRAMS
from spile.cli.lines import JsonLines, formatter
from spile.cli.serve import serve
from spile.core.config import STORE_DTYPES, Recipe, Runtime, flag_of
from spile.core.errors import ConfigError, Interrupted, SpileError, printable
from spile.core.ray_options import RayOptions
from spile.launch.flags import add_launch

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
_LAUNCH_HELP = """\
Start the same `spile extract` on many hosts, look at it, and stop it.

  spile launch ssh --hosts FILE --name run1 -- --model M --corpus C --taps T --out gs://B/acts
  spile launch status ssh --hosts FILE --name run1
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
        parser = make_parser()
        given = argparse.Namespace(stop=stop, argv=list(argv), parse=parser.parse_args)
        arguments = parser.parse_args(argv, given)
        logging.basicConfig(
            level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO,
            handlers=[_handler(as_json=getattr(arguments, "log_json", False))],
        )
        logging.getLogger("jax").setLevel(logging.WARNING)
        return arguments.verb(arguments)
    except SpileError as error:
        _say(error, argv)
        return error.exit_code
    except KeyboardInterrupt:
        _say(Interrupted(), argv)
        return Interrupted.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(error: SpileError, argv: Sequence[str]) -> None:
    """Why it ended, as the log's lines are."""
    if "--log-json" in argv:
        record = logging.LogRecord("spile", logging.ERROR, "", 0, str(error), (), None)
        print(JsonLines().format(record), file=sys.stderr)
    else:
        print(f"spile: {printable(str(error))}", file=sys.stderr)


def _handler(*, as_json: bool) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(as_json=as_json))
    handler.addFilter(logging.Filter("spile"))
    return handler


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spile",
        description="Taps a language model while it reads a corpus, and keeps the activations.",
    )
    parser.add_argument("--version", action="version", version=f"spile {__version__}")
    group = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(
        name: str, handle: Callable[[argparse.Namespace], int], help: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub = group.add_parser(
            name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"description": help, **more},
        )  # fmt: skip
        sub.set_defaults(verb=handle)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    for name, handle, help, description in (
        ("extract", extract.extract, "make a dataset, or continue it", _EXTRACT_HELP),
        ("plan", plan.plan, "what extract would cost: tokens, bytes, memory, time, dollars", None),
    ):
        sub = verb(name, handle, help, epilog=_TAPS_HELP, description=description or help)
        sub.add_argument("--out", metavar="DIR", help="where the dataset goes")
        sub.add_argument("--config", metavar="FILE", help="TOML file of options; flags win")
        sub.add_argument("--quiet", action="store_true", help="only errors")
        _add_options(sub.add_argument_group("recipe: what the dataset is"), Recipe)
        _add_options(sub.add_argument_group("runtime: how it is made"), Runtime)
        if name == "extract":
            sub.add_argument("--log-json", action="store_true", help="each line of progress and of "
                             "the log is a JSON object on stderr")  # fmt: skip
            _add_options(sub.add_argument_group("engine: where it is made"), RayOptions)
        else:
            sub.add_argument("--calibrate", metavar="SECONDS", help="run so long into a directory "
                             "that is then removed, to measure the time; or off [5]")  # fmt: skip
            sub.add_argument("--exact", action="store_true", help="read the whole corpus: tokens "
                             "and bytes to the last one [5 seconds of it]")  # fmt: skip
            sub.add_argument("--topology", metavar="X", help="time and cost on other chips, e.g. "
                             "v5e-64, h200-8, as `spile compile` estimates them")  # fmt: skip

    sub = verb("supervise", extract.supervise, "run extract, and start it again when it fails",
               epilog="  spile supervise -- extract --out acts/demo --share 3/32",
               usage="spile supervise [options] -- extract ...")  # fmt: skip
    sub.add_argument("--max-restarts", metavar="N", type=int, default=10,
                     help="in a row, without a unit done in between [10]")  # fmt: skip
    sub.add_argument("--backoff", metavar="SECONDS", type=float, default=1.0,
                     help="before the first restart in a row; doubled with each [1]")  # fmt: skip
    sub.add_argument("--max-backoff", metavar="SECONDS", type=float, default=60.0,
                     help="the longest pause [60]")  # fmt: skip
    sub.add_argument("command", nargs=argparse.REMAINDER, help="extract and its flags")
    sub = verb("legacy", extract.legacy, "run a command line of the tools before Spile, and print "
               "the new spelling", usage="spile legacy PROGRAM [--dry-run] FLAGS OF OLD "
               "[-- FLAGS OF TODAY]")  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="only print it")
    sub.add_argument("program", choices=PROGRAMS)
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="as they were typed")
    sub = verb(
        "taps", model.taps, "the places a model can be tapped at: shapes, bytes, other names"
    )
    sub.add_argument("--model", metavar="X", required=True, help="as for extract")
    sub.add_argument("--seq-len", metavar="N", help="for attn_pattern [2048, or the maximum]")
    sub.add_argument("--store-dtype", choices=STORE_DTYPES, default="bfloat16")
    sub.add_argument("--all", action="store_true", help="every layer, not one line per site")
    sub = verb("compile", model.compile, "compile the step for devices that need not be here: "
               "memory, collectives, speed, cost", epilog=_TAPS_HELP)  # fmt: skip
    sub.add_argument("--model", metavar="X", required=True, help="directory with config.json")
    sub.add_argument("--taps", metavar="X", required=True, help="as for extract")
    sub.add_argument("--topology", metavar="X", help="e.g. v5e-64, v4-8, h200 [this machine]")
    sub.add_argument("--mesh", metavar="X", default="auto", help="as for extract [auto]")
    sub.add_argument("--fsdp", metavar="N", help="as for extract")
    sub.add_argument("--search", action="store_true", help="try every mesh that may do")
    sub.add_argument("--on", metavar="libtpu|cpu|here", help="whose compiler [libtpu, else cpu]")
    for name in ("seq-len", "batch-tokens", "compute-dtype", "store-dtype", "encode", "latents"):
        sub.add_argument(f"--{name}", metavar="X", help="as for extract")
    sub = verb("convert", model.convert, "make a model directory from a GGUF file")
    sub.add_argument("source", metavar="SRC.gguf")
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument(
        "--tokenizer", metavar="DIR", help="take tokenizer.json from here instead of the file"
    )
    sub = verb("check", model.check, "recompute samples with HF transformers and compare")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--samples", metavar="N", type=int, default=4, help="documents [4]")
    for name in ("model", "lora", "encode", "corpus"):
        sub.add_argument(f"--{name}", metavar="X", help="where it is now, if it has moved")
    sub = verb("export", dataset.export, "write a dataset in another tool's format")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--to", metavar="FORMAT", required=True, help="saelens, parquet, npy, zarr, "
                     "activault, openmoss, saev, delphi or legacy")  # fmt: skip
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument("--taps", metavar="T", help="some of the dataset's [all]")
    sub.add_argument("--context-size", metavar="N", type=int, help="rows of a sequence [seq-len]")
    sub.add_argument("--dtype", metavar="X", help="[as stored if the format has it, else float32]")
    sub = verb("compact", dataset.compact, "write a dataset anew in few large shards")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("dest", metavar="DEST", help="the directory or URL of the new one")
    sub.add_argument("--unit-bytes", metavar="SIZE", default="64GiB", help="merge units [64GiB]")
    sub.add_argument("--shard-bytes", metavar="SIZE", default="1GiB", help="as for extract [1GiB]")
    sub.add_argument("--compress", action="store_true", help="as for extract")
    sub = verb("shuffle", rows.shuffle, "write a dataset anew with its rows in a drawn order")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("dest", metavar="DEST", help="the directory or URL of the new one")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="of the order [0]")
    sub.add_argument("--memory", metavar="SIZE", default="4GiB", help="for rows [4GiB]")
    sub.add_argument("--scratch", metavar="DIR", help="a directory or URL for as many bytes as the "
                     "dataset has, removed at the end [DEST/scratch]")  # fmt: skip
    sub.add_argument("--shard-bytes", metavar="SIZE", default="1GiB", help="as for extract [1GiB]")
    sub.add_argument("--compress", action="store_true", help="as for extract")
    sub = verb("serve-rows", rows.serve_rows, "read and shuffle once, for many trainers",
               epilog="  a trainer: for batch in spile.connect('grpc://127.0.0.1:8815'): ...\n"
               "  SPILE_TOKEN: what trainers must know; other addresses than this machine's need "
               "one, and make it")  # fmt: skip
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--taps", metavar="T", help="some of the dataset's, comma separated [all]")
    sub.add_argument("--batch-size", metavar="N", type=int, default=4096, help="rows [4096]")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="[0]")
    sub.add_argument("--shuffle", choices=("window", "full", "none"), default="window")
    sub.add_argument("--window", metavar="N", default="65536", help="rows, or bytes of them: "
                     "512MiB [65536]")  # fmt: skip
    sub.add_argument("--epochs", metavar="N", default="1", help="or none: without end [1]")
    sub.add_argument("--where", metavar="X", help="rows to give, as for extract")
    sub.add_argument("--drop-last", action="store_true", help="of an epoch, the short batch")
    sub.add_argument("--trainers", metavar="N", type=int, default=1,
                     help="begin when so many have come [1]")  # fmt: skip
    sub.add_argument("--buffer", metavar="N", type=int, default=8,
                     help="batches that a trainer may be behind another [8]")  # fmt: skip
    sub.add_argument("--patience", metavar="SECONDS", type=float, default=300.0,
                     help="that others wait for one that takes nothing, before it is left "
                     "behind [300]")  # fmt: skip
    sub.add_argument("--host", metavar="X", default="127.0.0.1", help="address [127.0.0.1]")
    sub.add_argument("--port", metavar="N", type=int, default=8815, help="0: any [8815]")
    sub = verb("push", dataset.push, "upload a dataset to the Hugging Face Hub, with a card")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("repo", metavar="REPO", help="owner/name of a dataset repository")
    sub.add_argument("--private", action="store_true", help="a public one is refused")
    sub.add_argument("--revision", metavar="BRANCH", help="made if it is not there [main]")
    sub = verb("fetch", model.fetch, "download a model and a corpus ahead of a run")
    for name in ("model", "lora", "corpus", "cache"):
        sub.add_argument(f"--{name}", metavar="X", help="as for extract")
    sub.add_argument(
        "--to", metavar="DIR", help="make DIR/model, DIR/lora and DIR/corpus [the Hub's cache]"
    )
    sub = verb("status", look.status, "where a dataset stands, and who is at work")
    sub.add_argument("out", metavar="OUT")
    sub = verb("watch", look.watch, "the same, drawn again until it is complete; q leaves")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="[2]")
    sub.add_argument("--stale-after", metavar="SECONDS", type=float, default=30.0,
                     help="without a sign of life, seen from here [30]")  # fmt: skip
    sub = verb("ls", look.ls, "every file of a dataset: tap, rows, bytes, digest")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--unit", metavar="N", type=int, help="of one unit")
    sub.add_argument("--tap", metavar="T", help="of one tap, or index, statistics, documents")
    sub = verb("serve", serve, "show a dataset, finished or not, in a browser")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--host", metavar="ADDRESS", default="127.0.0.1",
                     help="any but loopback asks for the token [127.0.0.1]")  # fmt: skip
    sub.add_argument("--port", metavar="N", type=int, default=8770, help="0: any [8770]")
    sub.add_argument("--token", metavar="X", help="[made, where one is needed]")
    sub.add_argument("--tokenizer", metavar="DIR", help="the model's, if it has moved")
    sub.add_argument("--read", metavar="SIZE", default="16GiB",
                     help="of all rows, at most, for plots of the whole [16GiB]")  # fmt: skip
    sub.add_argument("--cache", metavar="DIR", help="where what is read of a bucket is kept")
    sub = verb("verify", dataset.verify, "audit every byte of a dataset")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--partial", action="store_true", help="units not done yet are no fault")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="sizes and the store's own checksums, by "
                     "listing; no rows are read")  # fmt: skip
    how.add_argument("--resume", action="store_true", help="continue an interrupted audit: what it "
                     "found sound on this machine is not read again")  # fmt: skip
    sub = verb("gc", dataset.gc, "remove what no finished unit needs; safe beside running workers")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument(
        "--abandoned", action="store_true",
        help="also attempts at unfinished units: only if nothing is running",
    )  # fmt: skip
    sub = verb("launch", launch.launch, "start extract elsewhere: ssh, clusters, clouds",
               description=_LAUNCH_HELP)  # fmt: skip
    sub.set_defaults(parse_extract=group.choices["extract"].parse_args)
    add_launch(sub)
    return parser


def _add_options(group: Any, options: type[Recipe | Runtime | RayOptions]) -> None:
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
