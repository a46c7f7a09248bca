"""The work of `spile launch`.

It builds a job and a target from the flags, runs the target's commands, and reports the results.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from spile.core.errors import ConfigError, printable
from spile.launch.command import Result, check_all
from spile.launch.flags import TARGETS
from spile.launch.job import Container, LaunchJob
from spile.launch.script import states
from spile.launch.target import LaunchTarget


def build_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> LaunchJob:
    """Raises:
    ConfigError: if the flags do not make a job.
    """
    container, row = _container(arguments), TARGETS[arguments.target]
    if arguments.action != "submit":
        return LaunchJob(name=arguments.name, container=container)
    folder = getattr(arguments, "folder", None)
    if folder is None and row.starts_here:
        folder = os.getcwd()
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts must be at least 0, got {arguments.max_restarts}")
    if container is not None and folder is not None and not row.folder_with_container:
        raise ConfigError("--folder is for hosts: in a container, the image sets the folder")
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
    row = TARGETS[arguments.target]
    contained = getattr(arguments, "container", None) is not None
    if not out.startswith("/") and (contained or not row.shares_folder):
        raise ConfigError(
            f"--out {out}: give the absolute path of a folder that all hosts share, or a bucket: "
            "a relative one differs on each host"
        )
    if not contained:
        return
    given = getattr(arguments, row.mount_flag.removeprefix("--"))
    seen = [mount.split(":")[1] for mount in given if ":" in mount and not mount.endswith(":ro")]
    if not any(Path(out).is_relative_to(folder) for folder in seen):
        raise ConfigError(
            f"--out {out} would be lost with its container: give a bucket, or a folder that is "
            f"mounted there by {row.mount_flag}"
        )


def act(action: str, target: LaunchTarget, job: LaunchJob, lines: int) -> list[Result]:
    """Run an action on all hosts; for `status`, return a result for each host that answered."""
    results = target.act(action, job, lines)
    return _by_host(results) if action == "status" else results


def check(action: str, results: Sequence[Result]) -> None:
    """Raises:
    LaunchError: if it failed on some hosts; names them.
    """
    again = "what already runs is left alone" if action == "submit" else "the others answered"
    check_all(results, f"fix that and run the same command again: {again}")


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
    row = TARGETS[arguments.target]
    return Container(
        image=image, engine=arguments.engine, mounts=tuple(arguments.mount),
        device=arguments.device or row.device, sudo=arguments.sudo or row.sudo,
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
