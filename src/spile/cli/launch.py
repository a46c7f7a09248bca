"""The verb that starts runs elsewhere."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from spile.cli.extract import given as options_of
from spile.cli.flags import Verbs
from spile.core.config import build, flag_of
from spile.core.errors import ConfigError

_LAUNCH_HELP = """\
Start the same `spile extract` on many hosts, look at it, and stop it.

  spile launch ssh --hosts FILE --name run1 -- --model M --corpus C --taps T --out gs://B/acts
  spile launch status ssh --hosts FILE --name run1
"""


def add_launch(verbs: Verbs) -> None:
    help = "start extract elsewhere: ssh, clusters, clouds"
    verbs.add("launch", launch, help, description=_LAUNCH_HELP)
    parser = verbs.parser_of("launch")
    parser.set_defaults(parse_extract=verbs.parser_of("extract").parse_args)
    if verbs.may_be("launch"):
        from spile.launch.flags import add_launch

        add_launch(parser)


def launch(arguments: argparse.Namespace) -> None:
    from spile.launch.command import shown
    from spile.launch.flags import TARGETS
    from spile.launch.run import act, build_job, check, check_out, told

    action, target = arguments.action, TARGETS[arguments.target].build(arguments)
    lines = getattr(arguments, "lines", 0)
    if action == "submit":
        if arguments.extract[:1] == ["extract"]:
            del arguments.extract[0]
        given = arguments.parse_extract(arguments.extract)
        check_out(arguments, given.out)
        check_out(arguments, _check_recipe(given))  # it may come from --config
    job = build_job(arguments, os.environ)
    if arguments.dry_run:
        print(shown(target.commands(action, job.masked(), lines)))
        return
    results = act(action, target, job, lines)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        print(told(action, results), end="")
    check(action, results)


def _check_recipe(given: argparse.Namespace) -> str | None:
    """Refuse an invalid recipe here, before it is sent to thirty hosts. Return its `--out`.

    Model, corpus and taps may be left out if `--out` is a local folder that has a dataset (buckets
    are not checked: the hosts may have access and this machine not), and all of them if `--config`
    names a file that only the hosts have.
    """
    from spile.dataset.format import UNITS

    there_only = given.config is not None and not Path(given.config).is_file()
    if there_only:
        given = argparse.Namespace(**{**vars(given), "config": None})
    options = options_of(given)
    build(options)
    if there_only:
        return None
    if "out" not in options:
        raise ConfigError("--out is missing: after -- come the arguments of spile extract")
    missing = [name for name in ("model", "corpus", "taps") if name not in options]
    if missing and not Path(options["out"], UNITS).is_file():
        raise ConfigError(
            f"{flag_of(missing[0])} is missing: give the whole recipe after --; nothing was started"
        )
    return options["out"]
