"""Definition of verbs and flags: `Verbs.add`, and flags from declared options."""

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from spile.core.config import RayOptions, Recipe, Runtime, flag_of, parse_count
from spile.core.errors import ConfigError
from spile.core.flags import Flags
from spile.core.listening import ListenAddress
from spile.models.sites import EDGE, GROUPS, READERS, SITES


def taps_help() -> str:
    """Return the syntax of `--taps`, for the end of a verb's help."""
    by_layer = [site.name for site in SITES.values() if site.layered]
    others = [site.name for site in SITES.values() if not site.layered]
    having = ", ".join(site.name for site in SITES.values() if site.heads)
    return f"""\
taps:   site:layers, comma separated (`spile taps --model M` lists those of a model)
sites:  {_wrapped("  ".join(by_layer))}
        and, without layers: {_wrapped("  ".join(others))}
        SITE_grad: the gradient of --objective with respect to a site that can be spliced;
        SITE_attr: that times the site's values (less --baseline), summed for each token (or head)
        {"  ".join(name + EDGE for name in READERS)}: that times the values of each of --writers
{_groups()}
layers: 20   20-27   0-27/4   all   -1   3+7+11      (counted from 0)
heads:  z:5.h0   attn_pattern:0-3.h2+h5
        of {_wrapped(having)}
        TransformerLens, HF and vLLM names work too: blocks.20.hook_resid_post,
        model.layers.20, hidden_states[21], aux_hidden_states[21]

exit codes: 0 done; 2 bad input or configuration; 3 data or store fault; 130 interrupted;
            134 a process of the world was lost: start all of them again
"""


def _groups() -> str:
    told = (f"{group}: stands for {'  '.join(sites)}" for group, sites in GROUPS.items())
    return "\n".join(f"        {_wrapped(each)}" for each in told)


def _wrapped(words: str) -> str:
    return f"\n{' ' * 8}".join(textwrap.wrap(words, 72))


_NOTHING_IS_OVERWRITTEN = (
    "the same command resumes what --out holds; for a new dataset give a new --out (or add "
    "--restart while no row is stored)"
)
# Flags of other tools, by what to use here. They are suggested, not accepted.
_INSTEAD = {
    f"--{flag}": hint
    for hint, flags in {
        "use --batch-tokens N, which counts tokens of all contexts together": "batch-size",
        "use --template FILE": "chat-template",
        "use --seq-len N": "context-size max-length seq-length",
        "use --corpus X": "data dataset dataset-name",
        "set it in the environment: JAX_PLATFORMS=cpu, cuda or tpu": "device",
        "use --store-dtype for stored values, --compute-dtype for the model's arithmetic": "dtype",
        _NOTHING_IS_OVERWRITTEN: "force overwrite resume",
        "use --taps X, e.g. --taps blocks.12.hook_resid_post": "hook-name hook-point",
        "use --taps SITE:LAYERS, e.g. --taps resid_post:12": "hook layer sites",
        "use --taps SITE:LAYERS, e.g. --taps resid_post:8-12": "layers",
        "use --max-docs N or --max-tokens N": "limit",
        "use --max-docs N": "max-samples num-samples",
        "use --model X": "model-name model-name-or-path model-path",
        "use --threads N": "num-workers",
        "use --out DIR": "output output-dir",
        "use --special-tokens bos": "prepend-bos",
        "use --compute-dtype X": "precision",
        "use --shard-bytes SIZE": "shard-size",
        "use --shuffle-docs SEED for the order of units, or `spile shuffle` for rows": "shuffle",
        "use --corpus owner/name:config:split": "split",
        "use --text-column X": "text-field",
        "use --max-tokens N": "tokens",
    }.items()
    for flag in flags.split()
}
# Verbs of other tools, by ours.
_VERBS = {
    other: verb
    for verb, others in {
        "check": "test",
        "extract": "resume run",
        "fetch": "download",
        "gc": "clean prune",
        "ls": "cat list",
        "plan": "cost estimate",
        "push": "upload",
        "rm": "delete remove",
        "serve": "inspect open ui view",
        "status": "info show",
        "verify": "audit validate",
    }.items()
    for other in others.split()
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print the usage and exit.

    Flags cannot be abbreviated: an abbreviation may become another flag in a later version.
    """

    def __init__(self, *given: Any, common: Collection[str] = (), **more: Any) -> None:
        """`common`: names of the flags that `--help` explains, if it does not explain all."""
        super().__init__(*given, **{"allow_abbrev": False, **more})
        self._common = common
        if common:
            self.add_argument("--help-all", action=_HelpAll, help="explain every flag and exit")

    def print_help(self, file: Any = None) -> None:
        """Print what `--help` does: of a verb with many flags, only the common ones in full."""
        told = self.format_brief() if self._common else self.format_help()
        self._print_message(told, file or sys.stdout)

    def format_brief(self) -> str:
        """Format the common flags, and the names of the others by group."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("flags that most runs need")
        by_name = {action.dest: action for action in self._actions}
        formatter.add_arguments([by_name[name] for name in self._common])
        formatter.end_section()
        formatter.add_text("\n".join(self._others()))
        return formatter.format_help()

    def _others(self) -> Iterator[str]:
        """Yield the names of the flags that are not common, a paragraph for each group."""
        yield f"more flags (`{self.prog} --help-all` explains them):"
        others = {
            group.title or "": [
                action.option_strings[-1]
                for action in group._group_actions  # pyright: ignore[reportPrivateUsage]
                if action.option_strings and action.dest not in self._common
            ]
            for group in self._action_groups
        }
        wide = max(map(len, others))
        width = shutil.get_terminal_size().columns - 2
        for title, flags in others.items():
            if flags:
                head, rest = f"  {title:{wide}}  ", " " * (wide + 4)
                yield textwrap.fill(
                    " ".join(flags),
                    max(width, wide + 24),
                    initial_indent=head,
                    subsequent_indent=rest,
                    break_on_hyphens=False,
                )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse like argparse, but let a verb itself report an unknown flag."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error(
                self._hint(flags[0]) if flags else f"{unknown[0]!r} is one argument too many"
            )
        return found, unknown

    def _hint(self, flag: str) -> str:
        """Return a message that there is no such flag, with the one that may be meant."""
        spelled = "--" + flag.lstrip("-").replace("_", "-")
        if spelled in self._option_string_actions:
            return f"there is no flag {flag}: write {spelled}"
        instead = _INSTEAD.get(spelled)
        named = {word for word in (instead or "").split() if word.startswith("--")}
        if (
            instead
            and "--model" in self._option_string_actions
            and named <= {*self._option_string_actions}
        ):
            return f"there is no flag {flag}: {instead}"
        return f"there is no flag {flag}{_did_you_mean(spelled, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check like argparse; for an unknown verb, name only the nearest."""
        verbs = [*action.choices] if action.choices and action.nargs == argparse.PARSER else []
        if len(verbs) > 9 and value not in verbs:
            meant = f": did you mean {_VERBS[value]}?" if value in _VERBS else None
            self.error(f"there is no verb {value!r}{meant or _did_you_mean(value, verbs)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


class _HelpAll(argparse.Action):
    """Prints the help of every flag, and exits."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, nargs=0, **{**more, "dest": argparse.SUPPRESS})

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> NoReturn:
        print(parser.format_help(), end="")
        parser.exit()


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.7)
    return f": did you mean {near[0]}?" if near else ""


class Verbs:
    """The verbs of a parser; each group's file adds its own."""

    def __init__(self, parser: argparse.ArgumentParser, given: str | None = None) -> None:
        """`given`: the verb that will be parsed; None: any."""
        self._given = given
        self._group = parser.add_subparsers(
            metavar="VERB", required=True, prog=parser.prog, help=argparse.SUPPRESS
        )
        self._helps: dict[str, dict[str, str]] = {}  # by title: each verb, and what it does
        self._title = ""

    def begin(self, title: str) -> None:
        """Begin a group of verbs."""
        self._title = title

    def listing(self) -> str:
        """Return every verb with what it does, one line each, in groups."""
        wide = max(len(name) for helps in self._helps.values() for name in helps)
        groups = (
            [title, *(f"  {name:{wide}}  {help}" for name, help in helps.items())]
            for title, helps in self._helps.items()
        )
        return "\n\n".join(map("\n".join, groups))

    def add(
        self, name: str, handle: Callable[[argparse.Namespace], int | None], help: str, **more: Any
    ) -> Flags:
        """Add a verb that calls `handle`; return its flags, of which --json is there already.

        `handle` returns an exit code; None: 0. `more` is as for `Parser`.
        """
        self._helps.setdefault(self._title, {})[name] = help
        told: dict[str, Any] = {"description": help, **more}
        raw = argparse.RawDescriptionHelpFormatter
        parser = self._group.add_parser(name, formatter_class=raw, **told)
        parser.set_defaults(verb=handle)
        sub = Flags(parser)
        sub.switch("--json", "print one JSON object")
        return sub

    def may_be(self, name: str) -> bool:
        """Return whether this verb may be parsed, and so needs all of its flags."""
        return self._given in (None, name)

    def parser_of(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of a verb that was added before."""
        return self._group.choices[name]


def add_options(
    flags: Flags,
    title: str,
    options: type[Recipe | Runtime | RayOptions],
    only: Collection[str] | None = None,
) -> None:
    """Add groups of flags, one flag for each field of a declaration.

    `only`: the names of the fields, if not all of them.
    """
    for topic, every in options.topics().items():
        fields = [field for field in every if only is None or field.name in only]
        group = flags.group(f"{title}: {topic}") if fields else flags
        for field in fields:
            flag, meta = flag_of(field.name), field.metadata
            if meta["kind"] == "switch":
                group.switch(flag, meta["help"], default=None)
                continue
            hint = {"count": "N", "size": "SIZE"}.get(meta["kind"], "X")
            action = _Joined if meta["kind"] == "list" else "store"
            group.add(flag, meta["help"], "|".join(meta["choices"]) or hint, action=action)


def count_of(flag: str, text: str, wanted: str = "a number, or 1GiB or 500MB") -> int:
    """Parse the value of a flag, such as 64k or 1GiB; `wanted` says what it must be."""
    try:
        return parse_count(text)
    except ValueError:
        raise ConfigError(f"{flag} must be {wanted}, got {text!r}") from None


class _Joined(argparse.Action):
    """Joins the values of a repeated flag by commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def add_listening(flags: Flags, port: int) -> None:
    """Add the flags of a verb that listens; `port` is its default."""
    flags.add(
        "--host",
        "address to listen on; all but loopback ask for a token and need TLS [127.0.0.1]",
        "ADDRESS",
        default="127.0.0.1",
    )
    flags.number("--port", f"port to listen on; 0 takes any free one [{port}]", port)
    flags.add("--tls-cert", "certificate chain in PEM", "FILE")
    flags.add("--tls-key", "the certificate's key in PEM", "FILE")
    flags.switch("--insecure", "without TLS: anyone on the network path can read the token")


def listen_address(arguments: argparse.Namespace, token: str | None) -> ListenAddress:
    """Return the address to listen on, from the flags of `add_listening`."""
    return ListenAddress(
        arguments.host,
        arguments.port,
        token,
        arguments.tls_cert,
        arguments.tls_key,
        arguments.insecure,
    )
