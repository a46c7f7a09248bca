"""The flags of `spile launch`, for each target. Imports nothing that would slow the start."""

import argparse
from typing import Any

TARGETS = {
    "local": "processes on this machine",
    "docker": "containers on this machine",
    "ssh": "hosts reached by ssh",
    "gcloud": "TPU VMs of Google Cloud",
    "slurm": "a Slurm cluster",
    "kubernetes": "a Kubernetes cluster, GKE's TPUs included",
    "sky": "SkyPilot, any cloud",
}
ACTIONS = {
    "status": "how a launched run is, host by host",
    "logs": "the last lines each host wrote",
    "stop": "stop it; what is committed stays",
}
_CONTAINED = ("docker", "ssh", "gcloud", "slurm", "kubernetes")
_LINES = 20


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add every target as a verb, and every other action with every target."""
    group = parser.add_subparsers(title="targets and actions", metavar="TARGET", required=True)
    for target, help in TARGETS.items():
        sub = group.add_parser(target, help=help, description=f"start extract on {help}")
        sub.set_defaults(target=target, action="submit")
        _add_ways(sub)
        _add_job(sub, target)
        _add_target(sub, target)
        sub.add_argument("extract", nargs="*", metavar="-- EXTRACT", help="arguments of extract")
    for action, help in ACTIONS.items():
        sub = group.add_parser(action, help=help)
        targets = sub.add_subparsers(title="targets", metavar="TARGET", required=True)
        for target, where in TARGETS.items():
            each = targets.add_parser(target, help=where, description=f"{help}: {where}")
            each.set_defaults(target=target, action=action)
            _add_ways(each)
            each.add_argument("--name", default="spile", help="as it was launched [spile]")
            if action == "logs":
                each.add_argument("--lines", type=int, default=_LINES, help=f"[{_LINES}]")
            if target in _CONTAINED:
                _add_engine(each)
            _add_target(each, target)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, exactly")
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print a list of answers"
    )


def _add_job(parser: argparse.ArgumentParser, target: str) -> None:
    group = parser.add_argument_group("what runs on every host")
    add = group.add_argument
    add("--name", default="spile", help="of this run, to ask for it by [spile]")
    add("--env", metavar="NAME[=VALUE]", action="append", default=[], help="set it there; without "
        "a value, as here")  # fmt: skip
    add("--secret", metavar="NAME", action="append", default=[], help="the same, as here, never "
        "shown and on no command line")  # fmt: skip
    add("--max-restarts", metavar="N", type=int, help="of spile supervise; 0: none watches it")
    if target != "kubernetes":
        add("--spile", metavar="PROGRAM", default="spile", help="where it is installed [spile]")
        add("--setup", metavar="LINES", default="", help="shell lines to run first, each time")
        add("--folder", metavar="DIR", help="where to run it")
        add("--credentials", metavar="FILE", help="a Google key, there: an absolute path; in a "
            "container it is mounted read-only")  # fmt: skip
    if target in _CONTAINED:
        _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in a container")
    add = group.add_argument
    add("--container", metavar="IMAGE@sha256:DIGEST", help="run it in this image, on every host")
    add("--device", choices=("cpu", "gpu", "tpu"), help="what the container is given "
        "[tpu with gcloud, else cpu]")  # fmt: skip
    add("--engine", choices=("docker", "podman"), default="docker")
    add("--sudo", action="store_true", help="the engine needs root there")
    add("--mount", metavar="/HOST:/THERE[:ro]", action="append", default=[])


def _add_target(parser: argparse.ArgumentParser, target: str) -> None:
    group = parser.add_argument_group(TARGETS[target])

    def add(flag: str, help: str, **more: Any) -> None:
        group.add_argument(flag, help=help, **more)

    def many(flag: str, metavar: str, help: str) -> None:
        add(flag, help, metavar=metavar, action="append", default=[])

    def count(flag: str, help: str, default: int | None = 1) -> None:
        add(flag, help, metavar="N", type=int, default=default)

    if target != "ssh":
        count("--slices", "that work beside each other [1]")
    if target != "gcloud":
        count("--world-size", "hosts of each slice, joined (see docs/worlds.md) [1]")
    if target in ("local", "docker"):
        count("--port", "where processes of the first slice meet [8476]", 8476)
        count("--gpus-each", "GPUs that each process sees [all]", None)
    elif target == "ssh":
        add("--hosts", "[USER@]HOST [ADDRESS] on each line", metavar="FILE", required=True)
        count("--port", "where processes of a slice meet [8476]", 8476)
        add("--ssh-config", "ssh's own file", metavar="FILE")
    elif target == "gcloud":
        many("--zone", "ZONE", "where; several are tried in turn")
        many("--tpu", "NAME", "of a TPU that is there, or is to be [by --name]")
        add("--project", "[gcloud's own]", metavar="ID")
        add("--accelerator-type", "make what is missing, e.g. v5litepod-64", metavar="TYPE")
        add("--runtime-version", "of what is made", metavar="VERSION")
        add("--spot", "make it preemptible", action="store_true")
        add("--queued", "make it through the queue", action="store_true")
        add("--keep", "stay, and bring back what is preempted", action="store_true")
        count("--retries", "attempts that may fail in a row [10]", 10)
        add("--delete", "with stop: delete the TPUs, too", action="store_true")
    elif target == "slurm":
        many("--sbatch", "OPTION", "of sbatch, e.g. --sbatch=--partition=gpu")
        add("--log-folder", "of all nodes' logs [.]", metavar="DIR", default=".")
    elif target == "kubernetes":
        add("--tpu", "GKE's, e.g. v5e:8x8, a slice each", metavar="KIND:TOPOLOGY")
        count("--gpus", "of each host", 0)
        add("--service-account", "of the pods", metavar="NAME")
        add("--namespace", "[kubectl's own]", metavar="NAME")
        add("--context", "[kubectl's own]", metavar="NAME")
        many("--claim", "CLAIM:/PATH", "a volume to mount")
        add("--credentials-secret", "a Google key, mounted read-only", metavar="SECRET:KEY")
    elif target == "sky":
        add("--accelerators", "e.g. A100:8 or tpu-v5litepod-64", metavar="X")
        add("--infra", "e.g. gcp/us-central1", metavar="X")
    if target in ("kubernetes", "sky"):
        add("--cpus", "of each host", metavar="X")
        add("--memory", "of each host", metavar="X")
        add("--spot", "preemptible machines", action="store_true")
