"""What `spile launch` does: run what a target says, and tell what came of it."""

from collections.abc import Sequence

from spile.core.errors import printable
from spile.launch.command import Command, Result, check_all, run_all
from spile.launch.gcloud import Gcloud, Node
from spile.launch.gcloud_run import Keeper
from spile.launch.job import GRACE, Job
from spile.launch.script import states
from spile.launch.target import Target

_TIMEOUT = 3 * GRACE  # seconds for a look, or a stop


def commands(action: str, target: Target, job: Job, lines: int) -> Sequence[Command]:
    """What that action would run."""
    if action == "logs":
        return target.logs(job, lines)
    return {"submit": target.render, "status": target.status, "stop": target.stop}[action](job)


def act(action: str, target: Target, job: Job, lines: int) -> list[Result]:
    """Do it, on all hosts at once; what failed somewhere is among the results."""
    if isinstance(target, Gcloud):
        results = _ask_gcloud(action, target, job, lines)
    else:
        timeout = None if action == "submit" else _TIMEOUT
        results = run_all(commands(action, target, job, lines), timeout)
    return _by_host(results) if action == "status" else results


def check(action: str, results: Sequence[Result]) -> None:
    """Raises:
    LaunchError: naming the hosts where it failed.
    """
    again = "what runs already is left alone" if action == "submit" else "the others answered"
    check_all(results, f"mend that and run the same command again: {again}")


def told(action: str, results: Sequence[Result]) -> str:
    """What each host said, for a person. Errors are told in one line, by `check`."""
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


def _ask_gcloud(action: str, target: Gcloud, job: Job, lines: int) -> list[Result]:
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
    """A line for each host that said how its run is; other programs' answers as they are."""
    found: list[Result] = []
    for result in results:
        hosts = states(result)
        found += [Result(result.where, 0, str(host), "") for host in hosts]
        if result.code or not hosts:
            found.append(result)
    return found
