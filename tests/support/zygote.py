"""Python processes that need not import jax again: forked from one that has done so.

Importing jax, numpy and Arrow costs more than most commands under test do themselves. `Popen` here
starts `python -m MODULE`, `python FILE` and `python -c CODE` as a fork of a process that has the
libraries and Spile's modules imported, and nothing else: no backend, no threads. What is started
is a process like any other: it has its own pid, files, environment and end, and it can be killed.
Whatever a fork cannot do (other settings of jax, which are read on import) is started in the
ordinary way.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import spile
from support import faults

_PRELOADED = ("jax", "jax.numpy", "ml_dtypes", "numpy", "pyarrow", "pyarrow.parquet", "tokenizers",
              "xxhash", "rich.console", "obstore", "argparse", "logging")  # fmt: skip
_LATE = ("spile.check.reference",)  # it imports torch
# Read when jax is imported, or when the interpreter starts.
_SETTLED = ("JAX_", "PYTHON")
environment: dict[str, str] = {}  # what processes run in: set before the first test
_server: "_Server | None" = None
_lock = threading.Lock()


def _settled(environment: dict[str, str]) -> dict[str, str]:
    return {name: v for name, v in environment.items() if name.startswith(_SETTLED)}


class _Server:
    """The process that forks, and the socket to reach it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.settled = _settled(environment)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if library := faults.library():  # a child may set it, and not pass it on
            environment = {**environment, "LD_PRELOAD": library}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.zygote", str(theirs.fileno())],
            cwd=Path(__file__).parents[1], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        theirs.close()
        self._socket = ours

    def close(self) -> None:
        """End it, and with it every process that a test left running."""
        self._socket.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        data = json.dumps(request).encode()
        head = struct.pack("<I", len(data))
        socket.send_fds(self._socket, [head], fds)
        self._socket.sendall(data)
        return struct.unpack("<i", _exactly(self._socket, 4))[0]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, quicker where it starts Python."""

    _ended: int | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        names = ("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo",
                 "creationflags", "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread",
                 "errwrite", "restore_signals", "gid", "gids", "uid", "umask",
                 "start_new_session", "process_group")  # fmt: skip
        given = dict(zip(names, rest, strict=True))
        words = [os.fspath(word) for word in args] if not isinstance(args, str) else []
        server, asked = None, dict[str, str]()
        if words[:1] == [sys.executable] and len(words) > 1 and not given["preexec_fn"]:
            asked = dict(given["env"] or {**os.environ, **_settled(environment)})
            server = _server_for(asked)
        if server is None or words[1] not in ("-m", "-c") and words[1].startswith("-"):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        read, write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        fds = [fd if fd != -1 else (null if number == 0 else number)
               for number, fd in enumerate(streams)]  # fmt: skip
        request = {
            "words": words[1:], "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "env": asked, "session": bool(given["start_new_session"]),
        }  # fmt: skip
        with _lock:
            self.pid = server.fork(request, [*fds, write])
        os.close(write)
        os.close(null)
        self._child_created, self._ended = True, read
        ends = [
            given[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    def _read_end(self, timeout: float | None) -> bool:
        """Return whether it has ended; its status comes through a pipe."""
        assert self._ended is not None
        waiting = select.poll()  # select() knows no descriptors above 1,023
        waiting.register(self._ended, select.POLLIN | select.POLLHUP)
        if not waiting.poll(None if timeout is None else max(0, timeout) * 1000):
            return False
        status = os.read(self._ended, 4)
        os.close(self._ended)
        self.returncode = struct.unpack("<i", status)[0] if status else -signal.SIGKILL
        return True

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._ended is None:
            return super()._internal_poll(*given, **more)  # type: ignore[misc]
        if self.returncode is None:
            self._read_end(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._ended is None:
            return super()._wait(timeout)  # type: ignore[misc]
        if self.returncode is None and not self._read_end(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def run(arguments: Any, *, input: str | None = None, timeout: float | None = None,
        check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`subprocess.run`, with the output captured."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with Popen(arguments, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, out, err)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _server_for(asked: dict[str, str]) -> _Server | None:
    global _server
    with _lock:
        if _server is None:  # whoever comes first may want another environment than all others
            _server = _Server(environment)
            atexit.register(_server.close)
    return _server if _settled(asked) == _server.settled else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _serve(connection: socket.socket) -> None:
    """Fork for each request; tell the end of each child through the pipe that came with it."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for found in pkgutil.walk_packages(spile.__path__, "spile."):
        if found.name not in _LATE and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    importlib.import_module("spile.cli").make_parser()
    gc.collect()
    gc.freeze()  # so that a collection in a child does not touch, and copy, shared memory
    ends: dict[int, int] = {}
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([connection, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 512)
        _reap(ends)
        if connection in ready:
            head, fds, _, _ = socket.recv_fds(connection, 4, 4)
            if not head:
                break
            request = json.loads(_exactly(connection, struct.unpack("<I", head)[0]))
            pid = os.fork()
            if pid == 0:
                _become(request, fds, [connection.fileno(), wake, woken, *ends.values()])
            ends[pid] = fds[3]
            for fd in fds[:3]:
                os.close(fd)
            connection.sendall(struct.pack("<i", pid))
    for pid in ends:  # whoever asked is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(ends: dict[int, int]) -> None:
    for pid in list(ends):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            end = ends.pop(pid)
            with contextlib.suppress(OSError):
                os.write(end, struct.pack("<i", os.waitstatus_to_exitcode(status)))
            os.close(end)


def _become(request: dict[str, Any], fds: list[int], inherited: list[int]) -> None:
    """In the child: take over streams, folder and environment, and run. Does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in range(3):
            os.dup2(fds[number], number)
        for fd in {*fds, *inherited} - {0, 1, 2}:
            os.close(fd)
        if request["session"]:
            os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1, errors="backslashreplace"),
        )  # fmt: skip
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        code = _run(request["words"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    """Run a command line as the interpreter would; return the exit code."""
    from threading import _shutdown  # type: ignore[attr-defined]  # noqa: PLC0415

    code = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = ["-m", *words[2:]], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent.absolute())
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            code = leaving.code or 0
        else:
            print(leaving.code, file=sys.stderr)  # noqa: T201
            code = 1
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _shutdown()
    atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
