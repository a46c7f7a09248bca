"""TPU VMs of Google Cloud: created directly or through the queue, and started.

Every slice is one TPU with its own name; all its hosts get each command at once (`--worker=all`)
and find each other. `Gcloud` returns the commands; `Keeper` runs them: it creates, starts and
watches TPUs, and creates them again when they are preempted.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from spile.core.errors import ConfigError, Interrupted, LaunchError, printable
from spile.core.retry import backoff
from spile.launch import script
from spile.launch.command import FILE, NOT_FOUND, Command, Result, run
from spile.launch.job import LaunchJob, Seat, check_name
from spile.launch.target import LaunchTarget, TargetFlags, TargetRow, check_counts, from_flags

_log = logging.getLogger("spile.launch")

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_POLL = 30.0  # seconds between checks of a run, or of the queue
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0
_PERMANENT = 2  # the exit code of an error that a restart cannot fix
_READY = "READY"
_COMING = ("CREATING", "STARTING", "RESTARTING", "REPAIRING")
_QUEUED = ("ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES")
# Messages of gcloud, and what to do about them.
_SIGN_IN = ("reauthentication", "invalid_grant", "gcloud auth login", "unauthenticated")
_REFUSED = ("permission_denied", "permission denied", "quota", "invalid_argument", "not enabled")
_FULL = ("no more capacity", "resource_exhausted", "stockout", "insufficient capacity")


@dataclass(frozen=True)
class Node:
    """One TPU: the number of its slice, its name and its zone."""

    slice: int
    name: str
    zone: str

    def __str__(self) -> str:
        return f"{self.name} ({self.zone})"


@dataclass(frozen=True, kw_only=True)
class Gcloud(LaunchTarget):
    zones: tuple[str, ...]  # tried in order
    tpus: tuple[str, ...] = ()  # their names [the job's name, numbered]
    slices: int = 1
    project: str | None = None
    accelerator_type: str | None = None  # with the version: create missing TPUs
    runtime_version: str | None = None
    spot: bool = False
    queued: bool = False
    keep: bool = False  # stay, and restore preempted TPUs
    retries: int = 10
    delete: bool = False  # when stopped

    def __post_init__(self) -> None:
        check_counts(slices=self.slices)
        if not self.zones:
            raise ConfigError("--zone is missing: where are the TPUs, or may be created?")
        if (self.accelerator_type is None) != (self.runtime_version is None):
            raise ConfigError(
                "--accelerator-type and --runtime-version belong together: they say what to create"
            )
        if (self.spot or self.queued) and not self.makes:
            raise ConfigError("--spot and --queued are for TPUs to create: add --accelerator-type")
        words = (*self.zones, self.project, self.accelerator_type, self.runtime_version)
        for word in words:
            if word is not None and not _WORD.fullmatch(word):
                raise ConfigError(f"gcloud has no zone, project, type or version {word!r}")
        if self.tpus and self.slices not in (1, len(self.tpus)):
            raise ConfigError(f"--slices {self.slices}, but --tpu names {len(self.tpus)}")
        for tpu in self.tpus:
            check_name("--tpu", tpu)
        if self.retries < 0:
            raise ConfigError(f"--retries must be at least 0, got {self.retries}")

    @property
    def makes(self) -> bool:
        return self.accelerator_type is not None

    def nodes(self, job: LaunchJob) -> list[Node]:
        """The TPUs, as if in the first zone; `Keeper` finds where they really are."""
        names = self.tpus or tuple(f"{job.name}-{number}" for number in range(self.slices))
        return [Node(number, name, self.zones[0]) for number, name in enumerate(names)]

    def everywhere(self, node: Node) -> list[Node]:
        return [replace(node, zone=zone) for zone in self.zones]

    # -- the TPUs ----------------------------------------------------------------------------

    def create(self, node: Node) -> Command:
        assert self.accelerator_type and self.runtime_version
        what = (f"--accelerator-type={self.accelerator_type}",
                f"--runtime-version={self.runtime_version}")  # fmt: skip
        spot = ("--spot",) if self.spot else ()
        if self.queued:
            what = (f"--node-id={node.name}", *what)
        kind = "queued-resources" if self.queued else "tpu-vm"
        return self._gcloud(node, kind, "create", *what, *spot)

    def describe(self, node: Node) -> Command:
        return self._gcloud(node, "tpu-vm", "describe", "--format=value(state)")

    def describe_queued(self, node: Node) -> Command:
        return self._gcloud(node, "queued-resources", "describe", "--format=value(state.state)")

    def delete_node(self, node: Node) -> Command:
        if self.queued:
            return self._gcloud(node, "queued-resources", "delete", "--force")
        return self._gcloud(node, "tpu-vm", "delete")

    def list_all(self) -> list[Command]:
        return [
            Command(argv=self._words("tpu-vm", "list", zone), where=zone) for zone in self.zones
        ]

    # -- the run on them ---------------------------------------------------------------------

    def send(self, job: LaunchJob, node: Node) -> Command:
        """Copy the script as a file: its values must not be on a command line."""
        text = f'rm -f -- "$0"\n{script.start(job, self._seat(job, node))}'
        words = self._words("tpu-vm", "scp", node.zone)
        argv = (*words, "--worker=all", FILE, f"{node.name}:{_sent(job)}")
        return Command(argv=argv, where=str(node), file=text, suffix=".sh")

    def start(self, job: LaunchJob, node: Node) -> Command:
        return self._ssh(node, f"sh {_sent(job)}")

    def state(self, job: LaunchJob, node: Node) -> Command:
        return self._ssh(node, script.status(job, self._seat(job, node)))

    def _on(self, node: Node, action: str, job: LaunchJob, lines: int) -> list[Command]:
        """The commands of an action other than submit, on one TPU."""
        if action == "status":
            return [self.state(job, node)]
        if action == "logs":
            return [self._ssh(node, script.logs(job, self._seat(job, node), lines))]
        end = self._ssh(node, script.stop(job, self._seat(job, node)))
        return [end, self.delete_node(node)] if self.delete else [end]

    # -- as in every target ------------------------------------------------------------------

    def render(self, job: LaunchJob) -> Sequence[Command]:
        """The commands if nothing goes wrong, in the first zone."""
        found: list[Command] = []
        for node in self.nodes(job):
            found += [self.describe(node)]
            if self.makes:
                found += [self.create(node)]
            if self.queued:
                found += [self.describe_queued(node)]
            found += [self.send(job, node), self.start(job, node)]
        return found

    def status(self, job: LaunchJob) -> Sequence[Command]:
        return [*self.list_all(), *(self.state(job, node) for node in self.nodes(job))]

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        return [
            command for node in self.nodes(job) for command in self._on(node, "logs", job, lines)
        ]

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        return [command for node in self.nodes(job) for command in self._on(node, "stop", job, 0)]

    def act(self, action: str, job: LaunchJob, lines: int) -> list[Result]:
        keeper = Keeper(self, job)
        if action == "submit":
            return keeper.submit()
        return keeper.ask(lambda node: self._on(node, action, job, lines))

    def _seat(self, job: LaunchJob, node: Node) -> Seat:
        return Seat(slice=node.slice, slices=len(self.nodes(job)))

    def _words(self, kind: str, verb: str, zone: str) -> tuple[str, ...]:
        project = () if self.project is None else (f"--project={self.project}",)
        return ("gcloud", "compute", "tpus", kind, verb, f"--zone={zone}", *project, "--quiet")

    def _gcloud(self, node: Node, kind: str, verb: str, *how: str) -> Command:
        argv = (*self._words(kind, verb, node.zone), *how, node.name)
        return Command(argv=argv, where=str(node))

    def _ssh(self, node: Node, line: str) -> Command:
        return self._gcloud(node, "tpu-vm", "ssh", "--worker=all", f"--command={line}")


def _sent(job: LaunchJob) -> str:
    return f".spile-{job.name}.sh"


# -- keeping them alive ----------------------------------------------------------------------------


class Retry(Exception):
    """A failure that may be temporary.

    Attributes:
        ran: whether the run was seen running before.
    """

    def __init__(self, why: str, *, ran: bool = False) -> None:
        self.ran = ran
        super().__init__(why)


class Keeper:
    """Runs and watches the TPUs of one launch."""

    def __init__(
        self,
        target: Gcloud,
        job: LaunchJob,
        *,
        sleep: Callable[[float], object] | None = None,
        call: Callable[[Command], Result] = run,
    ) -> None:
        self._target, self._job = target, job
        self._stopped = threading.Event()
        self._wait_for, self._call = sleep or self._stopped.wait, call

    def submit(self) -> list[Result]:
        """Start every slice; with `keep`, stay until each has ended."""
        return self._each(self._run)

    def ask(self, commands: Callable[[Node], Sequence[Command]]) -> list[Result]:
        """Run each node's commands in order, all nodes at once; return each node's last result."""

        def one(node: Node) -> Result:
            found = self._find(node)
            if found is None:
                raise self._absent_error(node)
            return [self._answer(command) for command in commands(found[0])][-1]

        return self._each(one)

    def _each(self, work: Callable[[Node], Result]) -> list[Result]:
        nodes = self._target.nodes(self._job)

        def guarded(node: Node) -> Result:
            try:
                return work(node)
            except (LaunchError, Retry) as error:
                return Result(node.name, 1, "", str(error))

        pool = ThreadPoolExecutor(len(nodes))
        try:
            return list(pool.map(guarded, nodes))
        finally:
            self._stopped.set()  # so that a signal also ends the threads, which do not receive it
            pool.shutdown()

    def _sleep(self, seconds: float) -> None:
        self._wait_for(seconds)
        if self._stopped.is_set():
            raise Interrupted

    # -- one slice ---------------------------------------------------------------------------

    def _run(self, node: Node) -> Result:
        """Start the run; with `keep`, restart it until all its hosts have ended well."""
        failures = 0
        while True:
            try:
                started = self._start(node)
                return self._watch(node) if self._target.keep else started
            except Retry as error:
                failures = self._wait(node, 0 if error.ran else failures, str(error))

    def _start(self, node: Node) -> Result:
        """Bring up the TPU and start the run on all its hosts, except where it already runs."""
        up = self._bring_up(node)
        for command in (self._target.send(self._job, up), self._target.start(self._job, up)):
            result = self._answer(command)
            if result.code:
                raise Retry(f"not every host was reached ({_error(result)})")
        return result

    def _watch(self, node: Node) -> Result:
        ran = False
        while True:
            self._sleep(_POLL)
            found = self._find(node)
            if found is None or found[1] != _READY:
                raise Retry(f"the TPU is {found[1] if found else 'gone'}", ran=ran)
            result = self._call(self._target.state(self._job, found[0]))
            hosts = script.states(result)
            for host in hosts:
                if host.name == "ended" and host.code == _PERMANENT:
                    raise LaunchError(f"{host}; a restart would not help")
            if not result.code and hosts and all(host.code == 0 for host in hosts):
                return Result(str(found[0]), 0, "finished", "")
            ended = [str(host) for host in hosts if host.name != "running" and host.code != 0]
            if ended:
                raise Retry("; ".join(ended), ran=ran)
            if result.code and not any(host.name == "running" for host in hosts):
                raise Retry(f"its hosts do not answer ({_error(result)})", ran=ran)
            ran = ran or bool(hosts)

    def _bring_up(self, node: Node) -> Node:
        """Return a ready TPU: an existing one, or one created in the first zone with room."""
        found = self._find(node)
        if found is not None:
            there, state = found
            if state == _READY:
                return there
            if state in _COMING:
                raise Retry(f"the TPU is {state}")
            if not self._target.makes:
                raise LaunchError(f"the TPU {there} is {state}: start it, or create it again")
            _log.info("%s: is %s; creating it again", there, state)
            self._must(self._target.delete_node(there))
        if not self._target.makes:
            raise self._absent_error(node)
        return self._make(node)

    def _make(self, node: Node) -> Node:
        said = ""
        for place in self._target.everywhere(node):
            made = self._answer(self._target.create(place))
            if not made.code or _says(made, "already exists", "already_exists"):
                return self._queue(place) if self._target.queued else place
            said = _error(made)
            if not _says(made, *_FULL):
                break
            _log.info("%s: %s", place, said)
        raise Retry(said)

    def _queue(self, node: Node) -> Node:
        """Wait until the queue has granted the request."""
        while True:
            result = self._answer(self._target.describe_queued(node))
            state = result.out.strip()
            if state == "ACTIVE":
                return node
            if result.code:
                raise Retry(_error(result))
            if state not in _QUEUED:
                self._must(self._target.delete_node(node))
                raise Retry(f"the request is {state}")
            self._sleep(_POLL)

    # -- gcloud's answers ---------------------------------------------------------------------

    def _find(self, node: Node) -> tuple[Node, str] | None:
        """The TPU with its zone, and its state; None if there is none of that name."""
        for place in self._target.everywhere(node):
            result = self._call(command := self._target.describe(place))
            if not result.code:
                return place, result.out.strip()
            if not _says(result, "not_found", "not found"):
                self._refuse(command, result)
                raise Retry(_error(result))
        return None

    def _absent_error(self, node: Node) -> LaunchError:
        return LaunchError(
            f"there is no TPU {node.name} in {', '.join(self._target.zones)}: name one with --tpu, "
            "or give --accelerator-type and --runtime-version to create it"
        )

    def _must(self, command: Command) -> None:
        result = self._answer(command)
        if result.code:
            raise Retry(_error(result))

    def _answer(self, command: Command) -> Result:
        """Run a command; raise if it fails in a way that a retry cannot fix."""
        result = self._call(command)
        self._refuse(command, result)
        return result

    def _refuse(self, command: Command, result: Result) -> None:
        """Raise if the command failed in a way that a retry cannot fix.

        Raises:
            LaunchError: with the remedy.
        """
        if not result.code:
            return
        verb = " ".join(command.argv[3:5])
        if result.code == NOT_FOUND and _says(result, "not installed"):
            raise LaunchError("gcloud is not installed here")
        if _says(result, *_SIGN_IN):
            raise LaunchError(f"gcloud {verb}: {_error(result)}; sign in again: gcloud auth login")
        if verb.endswith(("create", "describe", "delete")) and _says(result, *_REFUSED):
            raise LaunchError(f"gcloud {verb}: {_error(result)}")

    def _wait(self, node: Node, failures: int, why: str) -> int:
        if failures >= self._target.retries:
            raise LaunchError(f"{why}; given up after {failures + 1} attempts")
        seconds = backoff(failures + 1, _FIRST_WAIT, _LONGEST_WAIT)
        _log.warning("%s: %s; again in %.0f s", node.name, why, seconds)
        self._sleep(seconds)
        return failures + 1


def _says(result: Result, *words: str) -> bool:
    said = result.err.lower()
    return any(word in said for word in words)


def _error(result: Result) -> str:
    """gcloud's error line, without the advice that may follow it."""
    lines = [line for line in result.err.splitlines() if line.startswith("ERROR:")]
    return printable(lines[0].strip()) if lines else result.said


def _add_flags(flags: TargetFlags) -> None:
    flags.slices()
    flags.many("--zone", "ZONE", "zone of the TPUs; several are tried in turn", "zones")
    flags.many(
        "--tpu", "NAME", "name of an existing TPU, or of one to create [from --name]", "tpus"
    )
    flags.add("--project", "project of the TPUs [gcloud's default]", "ID")
    flags.add("--accelerator-type", "create missing TPUs of this type, e.g. v5litepod-64", "TYPE")
    flags.add("--runtime-version", "runtime of created TPUs, e.g. v2-alpha-tpuv5-lite", "VERSION")
    flags.switch("--spot", "create preemptible TPUs")
    flags.switch("--queued", "create TPUs through the queue of requests")
    flags.switch("--keep", "keep running, and replace TPUs that are preempted")
    flags.number("--retries", "give up after this many failed attempts in a row [10]", 10)
    flags.switch("--delete", "with stop: also delete the TPUs")


# (On TPU VMs only root may use Docker.)
GCLOUD = TargetRow(
    "gcloud", "TPU VMs of Google Cloud", _add_flags, partial(from_flags, Gcloud),
    contained=True, device="tpu", sudo=True,
)  # fmt: skip
