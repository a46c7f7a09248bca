"""The targets of `spile launch`, one row each, and the flags that they share.

A new target is a module with its flags and construction, and its row here.
"""

import argparse

from spile.launch import gcloud, kubernetes, local, sky, slurm, ssh
from spile.launch.target import Flags, TargetRow

_ROWS = (
    local.LOCAL, local.DOCKER, ssh.SSH, gcloud.GCLOUD, slurm.SLURM, kubernetes.KUBERNETES, sky.SKY
)  # fmt: skip
TARGETS = {row.name: row for row in _ROWS}
ACTIONS = {
    "status": "how a launched run is, host by host",
    "logs": "the last lines each host wrote",
    "stop": "stop it; what is committed stays",
}
_LINES = 20


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add every target as a verb, and every other action with every target."""
    group = parser.add_subparsers(title="targets and actions", metavar="TARGET", required=True)
    for name, row in TARGETS.items():
        sub = group.add_parser(name, help=row.about, description=f"start extract on {row.about}")
        sub.set_defaults(target=name, action="submit")
        _add_ways(sub)
        _add_job(sub, row)
        row.add_flags(Flags(sub, row.about))
        sub.add_argument("extract", nargs="*", metavar="-- EXTRACT", help="arguments of extract")
    for action, help in ACTIONS.items():
        sub = group.add_parser(action, help=help)
        targets = sub.add_subparsers(title="targets", metavar="TARGET", required=True)
        for name, row in TARGETS.items():
            each = targets.add_parser(name, help=row.about, description=f"{help}: {row.about}")
            each.set_defaults(target=name, action=action)
            _add_ways(each)
            each.add_argument("--name", default="spile", help="as it was launched [spile]")
            if action == "logs":
                each.add_argument("--lines", type=int, default=_LINES, help=f"[{_LINES}]")
            if row.contained:
                _add_engine(each, row)
            row.add_flags(Flags(each, row.about))


def _add_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the exact commands, and run nothing"
    )
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print a list of answers"
    )


def _add_job(parser: argparse.ArgumentParser, row: TargetRow) -> None:
    group = parser.add_argument_group("what runs on every host")
    add = group.add_argument
    add("--name", default="spile", help="name of this run, for status, logs and stop [spile]")
    add("--env", metavar="NAME[=VALUE]", action="append", default=[],
        help="set this variable on the hosts; without a value, as it is set here")  # fmt: skip
    add("--secret", metavar="NAME", action="append", default=[],
        help="the same, with the value from here, which is never shown")  # fmt: skip
    add("--max-restarts", metavar="N", type=int,
        help="restarts by spile supervise; 0: start it once, unwatched")  # fmt: skip
    if row.on_hosts:
        add("--spile", metavar="PROGRAM", default="spile", help="the program on the hosts [spile]")
        add("--setup", metavar="LINES", default="", help="shell lines to run first, each time")
        add("--folder", metavar="DIR", help="working directory on the hosts")
        add("--credentials", metavar="FILE", help="absolute path of a Google key on the hosts; "
            "it is mounted read-only in a container")  # fmt: skip
    if row.contained:
        _add_engine(parser, row)


def _add_engine(parser: argparse.ArgumentParser, row: TargetRow) -> None:
    group = parser.add_argument_group("in a container")
    add = group.add_argument
    add("--container", metavar="IMAGE@sha256:DIGEST", help="run it in this image, on every host")
    add("--device", choices=("cpu", "gpu", "tpu"),
        help=f"devices of the container [{row.device}]")  # fmt: skip
    add("--engine", choices=("docker", "podman"), default="docker")
    add("--sudo", action="store_true", help="the engine needs root there")
    add("--mount", metavar="/HOST:/THERE[:ro]", action="append", default=[])
