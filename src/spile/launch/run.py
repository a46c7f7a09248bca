"""The work of `spile launch`.

It builds a job and a target from the flags, runs the target's commands, and reports the results.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from spile.core.errors import ConfigError, printable
from spile.launch.command import Command, Result, check_all, run_all
from spile.launch.gcloud import Gcloud, Keeper, Node
from spile.launch.job import GRACE, Container, LaunchJob
from spile.launch.kubernetes import Kubernetes, parse_tpu
from spile.launch.local import Local
from spile.launch.script import states
from spile.launch.sky import Sky
from spile.launch.slurm import Slurm
from spile.launch.ssh import Ssh, parse_hosts
from spile.launch.target import LaunchTarget

_TIMEOUT = 3 * GRACE  # seconds for a status or a stop
# Targets on which every host sees the folder where the command is given.
_SHARED = ("local", "slurm")
_OUT_OF_SIGHT = "give a bucket, or a folder that is mounted there by"


def build_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> LaunchJob:
    """Raises:
    ConfigError: if the flags do not make a job.
    """
    container = _container(arguments)
    if arguments.action != "submit":
        return LaunchJob(name=arguments.name, container=container)
    folder = getattr(arguments, "folder", None)
    if folder is None and arguments.target == "local":
        folder = os.getcwd()
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts must be at least 0, got {arguments.max_restarts}")
    if container is not None and folder is not None and arguments.target != "slurm":
        raise ConfigError("--folder is of hosts: in a container the image says where it is run")
    return LaunchJob(
        name=arguments.name,
        extract=tuple(arguments.extract),
        env=dict(_setting(given, environ) for given in arguments.env),
        secrets={name: _here("--secret", name, environ) for name in arguments.secret},
        container=container,
        credentials=getattr(arguments, "credentials", None),
        restarts=arguments.max_restarts,
        spile=getattr(arguments, "spile", "spile"),
        setup=getattr(arguments, "setup", ""),
        folder=folder,
    )


def check_out(arguments: argparse.Namespace, out: str | None) -> None:
    """Refuse an output that nobody would find again.

    Raises:
        ConfigError: with the remedy.
    """
    if out is None or "://" in out:
        return
    contained = getattr(arguments, "container", None) is not None
    if not out.startswith("/") and (contained or arguments.target not in _SHARED):
        raise ConfigError(
            f"--out {out}: give the absolute path of a folder that all hosts share, or a bucket: "
            "on each host a relative one is another"
        )
    if not contained:
        return
    flag = "--claim" if arguments.target == "kubernetes" else "--mount"
    given = arguments.claim if arguments.target == "kubernetes" else arguments.mount
    seen = [mount.split(":")[1] for mount in given if ":" in mount and not mount.endswith(":ro")]
    if not any(Path(out).is_relative_to(folder) for folder in seen):
        raise ConfigError(f"--out {out} would be lost with its container: {_OUT_OF_SIGHT} {flag}")


def build_target(arguments: argparse.Namespace) -> LaunchTarget:
    """Raises:
    ConfigError: if the flags do not make a target.
    """
    a = arguments
    if a.target in ("local", "docker"):
        if a.target == "docker" and not a.container:
            raise ConfigError("--container IMAGE@sha256:DIGEST is missing")
        return Local(slices=a.slices, world_size=a.world_size, port=a.port, gpus_each=a.gpus_each)
    if a.target == "ssh":
        lines = parse_hosts(_text(a.hosts), a.hosts)
        return Ssh(lines=lines, world_size=a.world_size, port=a.port, config=a.ssh_config)
    if a.target == "gcloud":
        if a.tpu and a.slices not in (1, len(a.tpu)):
            raise ConfigError(f"--slices {a.slices}, but --tpu names {len(a.tpu)}")
        return Gcloud(
            zones=tuple(a.zone), tpus=tuple(a.tpu), slices=a.slices, project=a.project,
            accelerator_type=a.accelerator_type, runtime_version=a.runtime_version, spot=a.spot,
            queued=a.queued, keep=a.keep, retries=a.retries, delete=a.delete,
        )  # fmt: skip
    if a.target == "slurm":
        return Slurm(
            slices=a.slices, world_size=a.world_size, options=tuple(a.sbatch), folder=a.log_folder
        )
    if a.target == "kubernetes":
        return Kubernetes(
            slices=a.slices, world_size=a.world_size, tpu=parse_tpu(a.tpu) if a.tpu else None,
            gpus=a.gpus, cpus=a.cpus, memory=a.memory, spot=a.spot, namespace=a.namespace,
            context=a.context, service_account=a.service_account, claims=tuple(a.claim),
            key=a.credentials_secret,
        )  # fmt: skip
    return Sky(
        slices=a.slices, world_size=a.world_size, accelerators=a.accelerators, infra=a.infra,
        cpus=a.cpus, memory=a.memory, spot=a.spot,
    )  # fmt: skip


def commands(action: str, target: LaunchTarget, job: LaunchJob, lines: int) -> Sequence[Command]:
    """The commands of an action."""
    if action == "logs":
        return target.logs(job, lines)
    return {"submit": target.render, "status": target.status, "stop": target.stop}[action](job)


def act(action: str, target: LaunchTarget, job: LaunchJob, lines: int) -> list[Result]:
    """Run an action on all hosts at once; the results include failures."""
    if isinstance(target, Gcloud):
        results = _ask_gcloud(action, target, job, lines)
    else:
        timeout = None if action == "submit" else _TIMEOUT
        results = run_all(commands(action, target, job, lines), timeout)
    return _by_host(results) if action == "status" else results


def check(action: str, results: Sequence[Result]) -> None:
    """Raises:
    LaunchError: if it failed on some hosts; names them.
    """
    again = "what runs already is left alone" if action == "submit" else "the others answered"
    check_all(results, f"mend that and run the same command again: {again}")


def told(action: str, results: Sequence[Result]) -> str:
    """The output of each host, for people. `check` reports errors, in one line."""
    texts: list[str] = []
    for result in results:
        said = printable(result.out.rstrip("\n"))
        if result.code and not said:
            continue
        if action == "logs" and result.where:
            texts.append(f"== {result.where}\n{said}\n")
        else:
            texts.append(f"{result.where}: {said}\n" if result.where else f"{said}\n")
    return "".join(texts)


def _ask_gcloud(action: str, target: Gcloud, job: LaunchJob, lines: int) -> list[Result]:
    keeper = Keeper(target, job)
    if action == "submit":
        return keeper.submit()

    def wanted(node: Node) -> Sequence[Command]:
        if action == "status":
            return [target.state(job, node)]
        if action == "logs":
            return [target.log(job, node, lines)]
        ended = [target.end(job, node)]
        return [*ended, target.delete_node(node)] if target.delete else ended

    return keeper.ask(wanted)


def _by_host(results: Sequence[Result]) -> list[Result]:
    """A line for each host that reported the state of its run; other results are unchanged."""
    found: list[Result] = []
    for result in results:
        hosts = states(result)
        found += [Result(result.where, 0, str(host), "") for host in hosts]
        if result.code or not hosts:
            found.append(result)
    return found


def _container(arguments: argparse.Namespace) -> Container | None:
    image = getattr(arguments, "container", None)
    if image is None:
        return None
    cloud = arguments.target == "gcloud"
    return Container(
        image=image, engine=arguments.engine, mounts=tuple(arguments.mount),
        device=arguments.device or ("tpu" if cloud else "cpu"),
        sudo=arguments.sudo or cloud,  # on TPU VMs only root may use Docker
    )  # fmt: skip


def _setting(given: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    return name, value if equals else _here("--env", name, environ)


def _here(flag: str, name: str, environ: Mapping[str, str]) -> str:
    if "=" in name:
        raise ConfigError(f"{flag} takes a name: its value is taken from here, never typed")
    if name not in environ:
        raise ConfigError(f"{flag} {name}: it is not set here")
    return environ[name]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: {getattr(error, 'strerror', '') or error}") from None
