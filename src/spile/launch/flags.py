"""The targets of `spile launch`, one row each, and the flags that they share.

A new target is a module with its flags and construction, and its row here.
"""

import argparse

from spile.core.flags import Flags
from spile.launch import gcloud, kubernetes, local, sky, slurm, ssh
from spile.launch.target import TargetFlags, TargetRow

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
        flags = Flags(sub)
        _add_ways(flags)
        _add_job(flags, row)
        row.add_flags(TargetFlags(sub.add_argument_group(row.about)))
        flags.place("extract", "arguments of extract", nargs="*", metavar="-- EXTRACT")
    for action, help in ACTIONS.items():
        sub = group.add_parser(action, help=help)
        targets = sub.add_subparsers(title="targets", metavar="TARGET", required=True)
        for name, row in TARGETS.items():
            each = targets.add_parser(name, help=row.about, description=f"{help}: {row.about}")
            each.set_defaults(target=name, action=action)
            flags = Flags(each)
            _add_ways(flags)
            flags.add("--name", "as it was launched [spile]", default="spile")
            if action == "logs":
                flags.add("--lines", f"[{_LINES}]", type=int, default=_LINES)
            if row.contained:
                _add_engine(flags, row)
            row.add_flags(TargetFlags(each.add_argument_group(row.about)))


def _add_ways(flags: Flags) -> None:
    flags.switch("--dry-run", "print the exact commands, and run nothing")
    flags.switch("--json", "print a list of answers", default=argparse.SUPPRESS)


def _add_job(flags: Flags, row: TargetRow) -> None:
    job = flags.group("what runs on every host")
    job.add("--name", "name of this run, for status, logs and stop [spile]", default="spile")
    job.many("--env", "NAME[=VALUE]", "set this variable on the hosts; without a value, as it is "
             "set here")  # fmt: skip
    job.many("--secret", "NAME", "the same, with the value from here, which is never shown")
    job.number("--max-restarts", "restarts by spile supervise; 0: start it once, unwatched")
    if row.on_hosts:
        job.add("--spile", "the program on the hosts [spile]", "PROGRAM", default="spile")
        job.add("--setup", "shell lines to run first, each time", "LINES", default="")
        job.add("--folder", "working directory on the hosts", "DIR")
        job.add("--credentials", "absolute path of a Google key on the hosts; it is mounted "
                "read-only in a container", "FILE")  # fmt: skip
    if row.contained:
        _add_engine(flags, row)


def _add_engine(flags: Flags, row: TargetRow) -> None:
    engine = flags.group("in a container")
    engine.add("--container", "run it in this image, on every host", "IMAGE@sha256:DIGEST")
    engine.add("--device", f"devices of the container [{row.device}]",
               choices=("cpu", "gpu", "tpu"))  # fmt: skip
    engine.add("--engine", None, choices=("docker", "podman"), default="docker")
    engine.switch("--sudo", "the engine needs root there")
    engine.many("--mount", "/HOST:/THERE[:ro]")
