"""Verbs that look at a dataset and at who makes it: once, again and again, file by file."""

import argparse
import contextlib
import json

from spile.core.errors import ConfigError


def status(arguments: argparse.Namespace) -> int:
    from spile.cli.look_text import status_text
    from spile.objects import open_objects
    from spile.status.status import read_status

    status = read_status(open_objects(arguments.out))
    print(json.dumps(status.to_json()) if arguments.json else status_text(arguments.out, status))
    return 0


def watch(arguments: argparse.Namespace) -> int:
    from spile.cli.watch import watched
    from spile.objects import open_objects
    from spile.status.status import read_status
    from spile.status.workers import Observer

    for name in ("interval", "stale_after"):
        if not 0 < getattr(arguments, name) < 86400:
            raise ConfigError(f"--{name.replace('_', '-')} must be seconds, more than none")
    objects = open_objects(arguments.out)
    observer = Observer(arguments.stale_after)
    with contextlib.suppress(KeyboardInterrupt):  # looking is over; nothing was interrupted
        watched(
            arguments.out,
            lambda: read_status(objects, observer),
            interval=arguments.interval,
            as_json=arguments.json,
        )
    return 0


def ls(arguments: argparse.Namespace) -> int:
    from spile.cli.look_text import listing_lines
    from spile.objects import open_objects
    from spile.status.listing import list_files, to_json

    files = list_files(open_objects(arguments.out), arguments.unit, arguments.tap)
    if arguments.json:
        print(json.dumps(to_json(files)))
    else:
        for line in listing_lines(arguments.out, files):
            print(line)
    return 0
