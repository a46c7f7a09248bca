"""Hosts for tests: network namespaces on a bridge, each with a name, a home and an sshd."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

_SSHD = "/usr/sbin/sshd"


class Hosts:
    """Hosts h1, h2, … at 10.79.0.1, …; the launcher has its own namespace beside them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self._mark = f"spile_{os.getpid()}"
        self._switch, self._launcher = f"{self._mark}_s", f"{self._mark}_l"
        self._sshds: list[subprocess.Popen[bytes]] = []
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self.config = folder / "ssh_config"
        self.file = folder / "hosts"

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in [*self.names, "launcher", "switch"]:
            space = self.space(name)
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in pids.stdout.split():
                subprocess.run(["kill", "-KILL", pid], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        for sshd in self._sshds:
            sshd.wait()

    def space(self, name: str) -> str:
        if name in ("switch", "launcher"):
            return self._switch if name == "switch" else self._launcher
        return f"{self._mark}_{name}"

    def inside(self, name: str = "launcher") -> list[str]:
        """Return the words that make a command run there."""
        return ["ip", "netns", "exec", self.space(name)]

    def home(self, name: str) -> Path:
        return self.folder / "home" / name

    def cut(self, name: str) -> None:
        _ip("-n", self.space(name), "link", "set", "eth0", "down")
        # Without an ARP entry, a connection to a host that is cut off fails at once.
        _ip("-n", self._launcher, "neigh", "flush", "all")

    def mend(self, name: str) -> None:
        _ip("-n", self.space(name), "link", "set", "eth0", "up")

    def _make(self) -> None:
        keys = self.folder / "keys"
        keys.mkdir(parents=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "host"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key)]
            subprocess.run(keygen, check=True)
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        self._plug("launcher", 250)
        for number, name in enumerate(self.names, 1):
            self._plug(name, number)
            self._serve(name, keys)
        self.file.write_text("".join(f"{name}\n" for name in self.names))
        hosts = "".join(f"Host h{n}\n  HostName 10.79.0.{n}\n" for n in range(1, self.count + 1))
        self.config.write_text(
            f"{hosts}Host *\n  User root\n  IdentityFile {keys / 'id'}\n  LogLevel ERROR\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        )
        for name in self.names:
            self._wait_for(name)

    def _plug(self, name: str, number: int) -> None:
        space = self.space(name)
        _ip("netns", "add", space)
        port = f"p{number}"
        cable = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, *cable)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", space, "link", "set", link, "up")
        # Gloo listens on the address of the host's name; `ip netns exec` shows this as /etc/hosts.
        names = "".join(f"10.79.0.{n} h{n}\n" for n in range(1, self.count + 1))
        folder = Path("/etc/netns") / space
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _serve(self, name: str, keys: Path) -> None:
        self.home(name).mkdir(parents=True)
        config = self.folder / f"sshd_config.{name}"
        config.write_text(
            f"HostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'id.pub'}\nStrictModes no\n"
            f"UsePAM no\nPidFile none\nPermitRootLogin prohibit-password\n"
            f"SetEnv HOME={self.home(name)}\n"
        )
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        sshd = [_SSHD, "-D", "-f", str(config), "-E", str(self.folder / f"sshd.{name}.log")]
        self._sshds.append(subprocess.Popen([*self.inside(name), *named, *sshd]))

    def _wait_for(self, name: str) -> None:
        command = [*self.inside(), "ssh", "-F", str(self.config), name, "true"]
        for _ in range(50):
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / f"sshd.{name}.log").read_text())


def need_hosts() -> None:
    """Skip with the reason where namespaces cannot be made."""
    if os.geteuid() or not shutil.which("ip") or not Path(_SSHD).exists():
        pytest.skip("needs root, iproute2 and openssh-server")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
