"""A real Slurm on this machine: a controller and several nodes, each with a daemon of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
_ALL = frozenset(("idle", "mixed", "allocated"))


class Cluster:
    """Nodes n1, n2, …: names of this machine that only the daemons know."""

    def __init__(self, folder: Path, nodes: int, ports: list[int]) -> None:
        self.folder, self.nodes = folder, nodes
        self._ports = ports
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(
            ["scancel", "--me"], env=self._env(), check=False, capture_output=True, timeout=20
        )
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Steps are not their daemon's children.
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                mine = f"SLURM_CONF={self.folder}/".encode() in path.read_bytes()
            except OSError:
                continue
            if mine and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)

    def call(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self._env(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.said()}"
        return done.stdout

    def said(self) -> str:
        return "\n".join(
            f"-- {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log")
        )

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def _make(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munge trusts no other
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = [f"n{number}" for number in range(1, self.nodes + 1)]
        here = Path("/etc/hosts").read_text()
        (folder / "hosts").write_text(here + "".join(f"127.0.0.1 {name}\n" for name in names))
        controller, *ports = self._ports
        lines = "".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000 State=UNKNOWN\n"
            for name, port in zip(names, ports, strict=True)
        )
        (folder / "slurm.conf").write_text(f"""\
ClusterName=spile
SlurmctldHost={socket.gethostname().partition(".")[0]}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=5
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
SlurmdParameters=config_overrides
{lines}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        (folder / "state").mkdir()
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self._until(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for name in names:
            (folder / f"spool.{name}").mkdir()
            mount = f"mount --bind {folder}/hosts /etc/hosts; exec slurmd -D -N {name} -f"
            self._start("unshare", "--mount", "sh", "-c", f"{mount} {folder}/slurm.conf")
        self._until(self._ready)

    def _ready(self) -> bool:
        found = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=self._env(),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        states = found.stdout.split()
        return len(states) == self.nodes and _ALL.issuperset(states)

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{Path(words[0]).name}.out.log").open("ab")
        with log:
            self._daemons.append(subprocess.Popen(words, stdout=log, stderr=log, env=self._env()))

    def _until(self, condition: object) -> None:
        assert callable(condition)
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, self.said()
            time.sleep(0.1)


def need_slurm() -> None:
    """Skip with the reason where Slurm cannot run."""
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if os.geteuid() or missing:
        pytest.skip(f"needs root and slurm-wlm, munge (missing: {', '.join(missing) or 'root'})")
