"""Starting runs elsewhere."""

import argparse
import dataclasses
import json
import os

from spile.core.config import Recipe, Runtime, build
from spile.core.errors import ConfigError


def launch(arguments: argparse.Namespace) -> int:
    from spile.launch.build import build_job, build_target, check_out
    from spile.launch.command import shown
    from spile.launch.run import act, check, commands, told

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
