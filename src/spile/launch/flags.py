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
    parser.add_argument(
        "--dry-run", action="store_true", help="print the exact commands, and run nothing"
    )
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print a list of answers"
    )


def _add_job(parser: argparse.ArgumentParser, target: str) -> None:
    group = parser.add_argument_group("what runs on every host")
    add = group.add_argument
    add("--name", default="spile", help="name of this run, for status, logs and stop [spile]")
    add("--env", metavar="NAME[=VALUE]", action="append", default=[],
        help="set this variable on the hosts; without a value, as it is set here")  # fmt: skip
    add("--secret", metavar="NAME", action="append", default=[],
        help="the same, with the value from here, which is never shown")  # fmt: skip
    add(
        "--max-restarts",
        metavar="N",
        type=int,
        help="restarts by spile supervise; 0: start it once, unwatched",
    )
    if target != "kubernetes":
        add("--spile", metavar="PROGRAM", default="spile", help="the program on the hosts [spile]")
        add("--setup", metavar="LINES", default="", help="shell lines to run first, each time")
        add("--folder", metavar="DIR", help="working directory on the hosts")
        add("--credentials", metavar="FILE", help="absolute path of a Google key on the hosts; "
            "it is mounted read-only in a container")  # fmt: skip
    if target in _CONTAINED:
        _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in a container")
    add = group.add_argument
    add("--container", metavar="IMAGE@sha256:DIGEST", help="run it in this image, on every host")
    add("--device", choices=("cpu", "gpu", "tpu"), help="devices of the container "
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
        count("--slices", "number of slices, which work independently [1]")
    if target != "gcloud":
        count("--world-size", "hosts joined in each slice (see docs/worlds.md) [1]")
    if target in ("local", "docker"):
        count("--port", "port where the processes of the first slice meet [8476]", 8476)
        count("--gpus-each", "GPUs that each process sees [all]", None)
    elif target == "ssh":
        add(
            "--hosts", "file with [USER@]HOST [ADDRESS] on each line", metavar="FILE", required=True
        )
        count("--port", "port where the processes of a slice meet [8476]", 8476)
        add("--ssh-config", "configuration file for ssh", metavar="FILE")
    elif target == "gcloud":
        many("--zone", "ZONE", "zone of the TPUs; if given several times, each is tried in turn")
        many("--tpu", "NAME", "name of an existing TPU, or of one to create [from --name]")
        add("--project", "project of the TPUs [gcloud's default]", metavar="ID")
        add(
            "--accelerator-type",
            "create missing TPUs of this type, e.g. v5litepod-64",
            metavar="TYPE",
        )
        add(
            "--runtime-version",
            "runtime of created TPUs, e.g. v2-alpha-tpuv5-lite",
            metavar="VERSION",
        )
        add("--spot", "create preemptible TPUs", action="store_true")
        add("--queued", "create TPUs through the queue of requests", action="store_true")
        add("--keep", "keep running, and replace TPUs that are preempted", action="store_true")
        count("--retries", "give up after this many failed attempts in a row [10]", 10)
        add("--delete", "with stop: also delete the TPUs", action="store_true")
    elif target == "slurm":
        many("--sbatch", "OPTION", "pass an option to sbatch, e.g. --sbatch=--partition=gpu")
        add("--log-folder", "folder for the logs of all nodes [.]", metavar="DIR", default=".")
    elif target == "kubernetes":
        add("--tpu", "TPU of each slice on GKE, e.g. v5e:8x8", metavar="KIND:TOPOLOGY")
        count("--gpus", "GPUs of each host [0]", 0)
        add("--service-account", "service account of the pods", metavar="NAME")
        add("--namespace", "namespace of the pods [kubectl's default]", metavar="NAME")
        add("--context", "context of kubectl [its default]", metavar="NAME")
        many("--claim", "CLAIM:/PATH", "mount this volume claim")
        add(
            "--credentials-secret",
            "secret with a Google key, mounted read-only",
            metavar="SECRET:KEY",
        )
    elif target == "sky":
        add(
            "--accelerators",
            "accelerators of each host, e.g. A100:8 or tpu-v5litepod-64",
            metavar="X",
        )
        add("--infra", "where to run, e.g. gcp/us-central1", metavar="X")
    if target in ("kubernetes", "sky"):
        add("--cpus", "CPU cores of each host", metavar="X")
        add("--memory", "memory of each host", metavar="X")
        add("--spot", "use preemptible machines", action="store_true")
