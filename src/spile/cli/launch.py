"""Starting runs elsewhere."""

import argparse
import dataclasses
import json
import os

from spile.cli.flags import Verbs
from spile.core.config import Recipe, Runtime, build
from spile.core.errors import ConfigError
from spile.launch import flags

_LAUNCH_HELP = """\
Start the same `spile extract` on many hosts, look at it, and stop it.

  spile launch ssh --hosts FILE --name run1 -- --model M --corpus C --taps T --out gs://B/acts
  spile launch status ssh --hosts FILE --name run1
"""


def add_launch(verbs: Verbs) -> None:
    help = "start extract elsewhere: ssh, clusters, clouds"
    sub = verbs.add("launch", launch, help, description=_LAUNCH_HELP)
    sub.set_defaults(parse_extract=verbs.parser_of("extract").parse_args)
    flags.add_launch(sub)


def launch(arguments: argparse.Namespace) -> int:
    from spile.launch.command import shown
    from spile.launch.run import act, build_job, build_target, check, check_out, commands, told

    action, target = arguments.action, build_target(arguments)
    lines = getattr(arguments, "lines", 0)
    if action == "submit":
        if arguments.extract[:1] == ["extract"]:
            del arguments.extract[0]
        given = arguments.parse_extract(arguments.extract)
        check_out(arguments, given.out)
        if given.out is None and given.config is None:
            raise ConfigError("--out is missing: after -- come the arguments of spile extract")
        _check_options(given)
    job = build_job(arguments, os.environ)
    if arguments.dry_run:
        print(shown(commands(action, target, job.masked(), lines)))
        return 0
    results = act(action, target, job, lines)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        print(told(action, results), end="")
    check(action, results)
    return 0


def _check_options(given: argparse.Namespace) -> None:
    """What can be known wrong here is not sent to thirty hosts. A file of options may be there."""
    values = {name: getattr(given, name) for name in (*Recipe.names(), *Runtime.names())}
    build({name: value for name, value in values.items() if value is not None})
