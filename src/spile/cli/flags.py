"""What every group of verbs makes its flags with: `Verbs.add`, and flags from declared options."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from spile.core.config import RayOptions, Recipe, Runtime, flag_of
from spile.core.errors import ConfigError
from spile.core.listening import ListenAddress

TAPS_HELP = """\
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


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


class Verbs:
    """The verbs of a parser; each group's file adds its own."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._group = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def add(
        self, name: str, handle: Callable[[argparse.Namespace], int], help: str, **more: Any
    ) -> argparse.ArgumentParser:
        """Add a verb that calls `handle`; returns its parser, which has --json already."""
        told: dict[str, Any] = {"description": help, **more}
        sub = self._group.add_parser(
            name,
            help=help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **told,
        )
        sub.set_defaults(verb=handle)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    def parser_of(self, name: str) -> argparse.ArgumentParser:
        """The parser of a verb that was added before."""
        return self._group.choices[name]


def add_options(
    parser: argparse.ArgumentParser, title: str, options: type[Recipe | Runtime | RayOptions]
) -> None:
    """Add a flag for each option of a declaration, in a group of their own."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(options):
        flag, meta = flag_of(field.name), field.metadata
        if meta["kind"] == "switch":
            group.add_argument(flag, action="store_true", default=None, help=meta["help"])
            continue
        hint = {"count": "N", "size": "SIZE"}.get(meta["kind"], "X")
        group.add_argument(flag, metavar="|".join(meta["choices"]) or hint, help=meta["help"])


def add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the flags of a verb that listens; `port` is its default."""
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="to listen on; any but loopback asks for a token, and needs TLS [127.0.0.1]",
    )
    parser.add_argument("--port", metavar="N", type=int, default=port, help=f"0: any [{port}]")
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="certificate in PEM, with those that signed it"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's key in PEM")
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS: anyone on the way can read the token"
    )


def listen_address(arguments: argparse.Namespace, token: str | None) -> ListenAddress:
    """Where the flags of `add_listening` say to listen."""
    return ListenAddress(
        arguments.host,
        arguments.port,
        token,
        arguments.tls_cert,
        arguments.tls_key,
        arguments.insecure,
    )
