"""The command: its verbs and flags, its exit codes. What each verb does is in `verbs.py`.

Flags are made from the declarations in `config.py`.
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

from spile import __version__, verbs
from spile.config import STORE_DTYPES, Recipe, Runtime, flag_of
from spile.errors import ConfigError, Interrupted, SpileError, printable

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
        print(f"spile: {printable(str(error))}", file=sys.stderr)
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
        ("extract", verbs.extract, "make a dataset, or continue it", _EXTRACT_HELP),
        ("plan", verbs.plan, "what extract would cost: documents, tokens, bytes, memory", None),
    ):
        sub = verb(name, handle, help, epilog=_TAPS_HELP, description=description or help)
        sub.add_argument("--out", metavar="DIR", help="where the dataset goes")
        sub.add_argument("--config", metavar="FILE", help="TOML file of options; flags win")
        sub.add_argument("--quiet", action="store_true", help="only errors")
        _add_options(sub.add_argument_group("recipe: what the dataset is"), Recipe)
        _add_options(sub.add_argument_group("runtime: how it is made"), Runtime)

    sub = verb(
        "taps", verbs.taps, "the places a model can be tapped at: shapes, bytes, other names"
    )
    sub.add_argument("--model", metavar="X", required=True, help="as for extract")
    sub.add_argument("--seq-len", metavar="N", help="for attn_pattern [2048, or the maximum]")
    sub.add_argument("--store-dtype", choices=STORE_DTYPES, default="bfloat16")
    sub.add_argument("--all", action="store_true", help="every layer, not one line per site")
    sub = verb("compile", verbs.compile, "compile the step for devices that need not be here: "
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
    sub = verb("convert", verbs.convert, "make a model directory from a GGUF file")
    sub.add_argument("source", metavar="SRC.gguf")
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument(
        "--tokenizer", metavar="DIR", help="take tokenizer.json from here instead of the file"
    )
    sub = verb("check", verbs.check, "recompute samples with HF transformers and compare")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--samples", metavar="N", type=int, default=4, help="documents [4]")
    for name in ("model", "lora", "corpus"):
        sub.add_argument(f"--{name}", metavar="X", help="where it is now, if it has moved")
    sub = verb("export", verbs.export, "write a dataset in another tool's format")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--to", metavar="FORMAT", required=True, help="saelens, parquet, npy, zarr, "
                     "activault, openmoss, saev or legacy")  # fmt: skip
    sub.add_argument("dest", metavar="DEST", help="the directory to make")
    sub.add_argument("--taps", metavar="T", help="some of the dataset's [all]")
    sub.add_argument("--context-size", metavar="N", type=int, help="rows of a sequence [seq-len]")
    sub.add_argument("--dtype", metavar="X", help="[as stored if the format has it, else float32]")
    sub = verb("compact", verbs.compact, "write a dataset anew in few large shards")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("dest", metavar="DEST", help="the directory or URL of the new one")
    sub.add_argument("--unit-bytes", metavar="SIZE", default="64GiB", help="merge units [64GiB]")
    sub.add_argument("--shard-bytes", metavar="SIZE", default="1GiB", help="as for extract [1GiB]")
    sub.add_argument("--compress", action="store_true", help="as for extract")
    sub = verb("push", verbs.push, "upload a dataset to the Hugging Face Hub, with a card")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("repo", metavar="REPO", help="owner/name of a dataset repository")
    sub.add_argument("--private", action="store_true", help="a public one is refused")
    sub.add_argument("--revision", metavar="BRANCH", help="made if it is not there [main]")
    sub = verb("fetch", verbs.fetch, "download a model and a corpus ahead of a run")
    sub.add_argument("--model", metavar="X", help="as for extract")
    sub.add_argument("--corpus", metavar="X", help="as for extract")
    sub.add_argument("--to", metavar="DIR", help="make DIR/model and DIR/corpus [the Hub's cache]")
    sub = verb("status", verbs.status, "where a dataset stands")
    sub.add_argument("out", metavar="OUT")
    sub = verb("verify", verbs.verify, "audit every byte of a dataset")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--partial", action="store_true", help="units not done yet are no fault")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="sizes and the store's own checksums, by "
                     "listing; no rows are read")  # fmt: skip
    how.add_argument("--resume", action="store_true", help="continue an interrupted audit: what it "
                     "found sound on this machine is not read again")  # fmt: skip
    sub = verb("gc", verbs.gc, "remove what no finished unit needs; safe beside running workers")
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


if __name__ == "__main__":
    main()
