"""Shell scripts that start a run on a host, look at it, and stop it.

`sh -s` reads them from standard input: no value of the environment is on a command line or a disk.
A run's folder on its host, `~/.spile/NAME/NUMBER`, holds its log and a lock. The run's processes
hold the lock as long as they live, so that none is started twice and no process id is mistaken for
another's. Hosts may share a home: the number is the process's own.
"""

import shlex
from dataclasses import dataclass

from spile.launch.command import Result
from spile.launch.job import GRACE, LaunchJob, Seat, exported

_MARK = "@spile"  # begins the one line with which a host reports its run
_KILLED = 10  # seconds for killed processes to be gone

_TOOLS = """\
for tool in flock setsid; do
  command -v "$tool" >/dev/null && continue
  echo "$tool is not installed (package util-linux)" >&2
  exit 1
done
"""
# The stored id is that of the process; the shell around it stores its exit code.
_WATCHED = (
    'd=$1; shift; echo $$ >"$d/group"; "$@" >>"$d/log" 2>&1 & '
    'echo $! >"$d/pid"; wait $!; echo $? >"$d/code"'
)


@dataclass(frozen=True)
class State:
    """The state of a run on its host: absent, running, ended (with a code), or lost."""

    name: str
    code: int | None
    said: str

    def __str__(self) -> str:
        what = {
            "absent": "never started here",
            "running": "running",
            "ended": f"ended with exit code {self.code}",
            "lost": "gone: it was killed, or its host restarted; start it again",
        }[self.name]
        return f"{what}: {self.said}" if self.said else what


def start(job: LaunchJob, seat: Seat) -> str:
    """A script that starts the run in the background, unless it is running."""
    if job.container is not None:
        return _start_container(job, seat)
    return f"""\
set -e
umask 077
{_TOOLS}{_folder(job, seat)}mkdir -p "$d"
exec 9>>"$d/lock"
if ! flock -n 9; then echo "already running (pid $(cat "$d/pid"))"; exit 0; fi
rm -f "$d/code" "$d/pid"
{exported(job.environment(seat))}{_setup(job)}{_enter(job)}\
command -v {shlex.quote(job.spile)} >/dev/null || {{
  echo "no program {_in_quotes(job.spile)} here: install spile, or name it with --spile" >&2
  exit 127
}}
setsid sh -c {shlex.quote(_WATCHED)} sh "$d" {shlex.join(job.command)} </dev/null >/dev/null 2>&1 &
while [ ! -s "$d/pid" ]; do sleep 0.05; done
echo "started (pid $(cat "$d/pid"))"
"""


def status(job: LaunchJob, seat: Seat) -> str:
    """A script that prints the state of the run, in one line."""
    if job.container is not None:
        name, engine = _container(job, seat), shlex.join(job.engine())
        return f"""\
form='{{{{.State.Status}}}} {{{{.State.ExitCode}}}}'
state=$({engine} inspect --format "$form" {name} 2>/dev/null) || state=absent
said=$({engine} logs --tail 1 {name} 2>&1 | tr '\\t' ' ' | tail -n 1) || said=
case "$state" in
  absent) name=absent code= said= ;;
  running*) name=running code= ;;
  exited*) name=ended code=${{state#exited }} ;;
  *) name=lost code= ;;
esac
printf '{_MARK}\\t%s\\t%s\\t%s\\n' "$name" "$code" "$said"
"""
    return f"""\
{_folder(job, seat)}name=absent code= said=
if [ -e "$d/log" ]; then said=$(tail -n 1 "$d/log" | tr '\\t' ' ') || said=; fi
if [ -e "$d/lock" ]; then
  exec 9<"$d/lock"
  if ! flock -n 9; then name=running
  elif [ ! -s "$d/pid" ]; then :
  elif [ -s "$d/code" ]; then name=ended code=$(cat "$d/code")
  else name=lost
  fi
fi
printf '{_MARK}\\t%s\\t%s\\t%s\\n' "$name" "$code" "$said"
"""


def logs(job: LaunchJob, seat: Seat, lines: int) -> str:
    if job.container is not None:
        name, engine = _container(job, seat), shlex.join(job.engine())
        return f"""\
{engine} inspect {name} >/dev/null 2>&1 || {{ echo "never started here"; exit 0; }}
{engine} logs --tail {lines} {name} 2>&1
"""
    return f"""\
{_folder(job, seat)}if [ ! -s "$d/pid" ]; then
  if [ ! -e "$d/lock" ] || flock -n "$d/lock" true; then echo "never started here"; fi
fi
if [ -e "$d/log" ]; then tail -n {lines} "$d/log"; fi
"""


def stop(job: LaunchJob, seat: Seat) -> str:
    """A script that asks the run to stop, and kills it after a while."""
    if job.container is not None:
        name, engine = _container(job, seat), shlex.join(job.engine())
        return f"""\
{engine} inspect {name} >/dev/null 2>&1 || {{ echo "never started here"; exit 0; }}
{engine} stop -t {GRACE} {name} >/dev/null && echo stopped
"""
    return f"""\
{_folder(job, seat)}[ -e "$d/lock" ] || {{ echo "never started here"; exit 0; }}
exec 9<"$d/lock"
if flock -n 9; then
  if [ -s "$d/pid" ]; then echo "not running"; else echo "never started here"; fi
  exit 0
fi
kill -s TERM "$(cat "$d/pid")" 2>/dev/null || :
if flock -w {GRACE} 9; then echo stopped; exit 0; fi
kill -s KILL -- "-$(cat "$d/group")"
if flock -w {_KILLED} 9; then echo "killed: it did not stop within {GRACE} s"; exit 0; fi
echo "it does not end, even when killed" >&2
exit 1
"""


def states(result: Result) -> list[State]:
    """The states reported by the hosts of one command."""
    found: list[State] = []
    for line in result.out.splitlines():
        mark, *parts = line.split("\t")
        if mark.endswith(_MARK) and len(parts) == 3:
            code = int(parts[1]) if parts[1].isdecimal() else None
            found.append(State(parts[0], code, parts[2]))
    return found


def _start_container(job: LaunchJob, seat: Seat) -> str:
    name, engine = _container(job, seat), shlex.join(job.engine())
    environment = job.environment(seat)
    setup = f"{{\n{job.setup}\n}} >&2 </dev/null\n" if job.setup else ""
    line = job.container_run(tuple(environment), "--detach", f"--name={name}")
    return f"""\
set -e
case "$({engine} inspect --format '{{{{.State.Status}}}}' {name} 2>/dev/null)" in
  running) echo "already running"; exit 0 ;;
  '') ;;
  *) {engine} rm {name} >/dev/null ;;
esac
{exported(environment)}{setup}{shlex.join(line)} >/dev/null
echo "started"
"""


def _folder(job: LaunchJob, seat: Seat) -> str:
    return f'd="$HOME"/.spile/{job.name}/{seat.number}\n'


def _container(job: LaunchJob, seat: Seat) -> str:
    return f"spile-{job.name}-{seat.number}"


def _setup(job: LaunchJob) -> str:
    if not job.setup:
        return ""
    # Redirect its input: it would consume the rest of this script.
    return f"""\
trap '[ $? = 0 ] || echo "setup failed: $(tail -n 1 "$d/log")" >&2' EXIT
{{
{job.setup}
}} >>"$d/log" 2>&1 </dev/null
trap - EXIT
"""


def _enter(job: LaunchJob) -> str:
    return f"cd -- {shlex.quote(job.folder)}\n" if job.folder else ""


def _in_quotes(text: str) -> str:
    """Escape text for use between double quotes."""
    return "".join(f"\\{c}" if c in '"$`\\' else c for c in text)
