"""What is said of a dataset while it is made, and of its files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spile.cli.style import compared, lasting, short, size, skipped

if TYPE_CHECKING:
    from spile.status.listing import Listed
    from spile.status.status import Status

_SHOWN_WORKERS = 40  # of a fleet; --json has them all
_ORDER = ("failed", "dead", "stale", "stopped", "starting", "running", "not started", "done")


def status_text(out: str, status: "Status") -> str:
    """Totals, then who is at work: what needs looking after comes first."""
    lines = [
        f"{out}: {status.state}",
        f"  units      {status.units_done:,} of {status.units:,}",
        f"  documents  {status.documents:,} of {status.documents_total:,}"
        + (f" ({skipped(status.skipped)} left out)" if status.skipped else ""),
        f"  tokens     {status.tokens:,} read (of about {status.tokens_estimated:,})",
        f"  rows       {status.rows:,} per tap",
        f"  bytes      {size(status.bytes)}",
        "  taps       " + ", ".join(f"{tap} {shape}" for tap, shape in status.taps.items()),
    ]
    if status.rate is not None:
        left = f", about {lasting(status.eta_seconds)} left" if status.eta_seconds else ""
        lines.append(f"  rate       {status.rate:,.0f} tok/s{left}")
    if status.prediction:
        lines.append(f"  predicted  {_predicted(status, status.prediction)}")
    return "\n".join([*lines, *_workers(status)])


def _predicted(status: "Status", predicted: Mapping[str, Any]) -> str:
    told = [f"{predicted['tokens']:,} tokens", size(predicted["bytes"])]
    if status.state == "complete":
        told[0] += f" ({compared(predicted['tokens'], status.tokens)} came)"
        told[1] += f" ({compared(predicted['bytes'], status.bytes)})"
    if predicted["seconds"] and predicted["tokens"]:
        expected = predicted["seconds"] * status.tokens / predicted["tokens"]
        told.append(f"{lasting(predicted['seconds'])} of one slice")
        if status.seconds:
            off = compared(expected, status.seconds)
            told[-1] += f" ({off} so far)" if status.state != "complete" else f" ({off})"
    return ", ".join(told)


def _workers(status: "Status") -> Iterator[str]:
    order = {state: number for number, state in enumerate(_ORDER)}
    workers = sorted(status.workers, key=lambda w: (order.get(w["state"], 0), w["name"]))
    if not workers:
        return
    counts = {state: sum(w["state"] == state for w in workers) for state in _ORDER}
    yield "  workers    " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    for worker in workers[:_SHOWN_WORKERS]:
        yield f"    {_worker(worker, slowest=worker['name'] == status.slowest)}"
    if len(workers) > _SHOWN_WORKERS:
        yield f"    and {len(workers) - _SHOWN_WORKERS} more (--json has them all)"


def _worker(worker: Mapping[str, Any], *, slowest: bool) -> str:
    if worker["state"] == "not started":
        return f"{worker['name']}  not started"
    progress, world = worker["progress"], worker.get("world")
    who = [f"share {worker['share']}"] if worker.get("share") else []
    who += [f"process {world['process']}"] if world else []
    told = [worker["name"] + (f" ({', '.join(who)})" if who else ""), worker["state"]]
    if worker.get("units_done"):
        told.append(f"{worker['units_done']:,} units")
    if progress.get("tokens"):
        told.append(f"{short(progress['tokens'])} tok")
    if worker["state"] == "running" and "rate" in progress:
        told.append(f"{short(progress['rate'])}/s" + " (slowest)" * slowest)
        if "idle" in progress:
            told.append(f"idle {progress['idle']:.0%}")
    if worker.get("lag"):
        told.append(f"{short(worker['lag'])} tok behind")
    if worker.get("units"):
        told.append(f"holding {', '.join(map(str, worker['units']))}")
    told += _last_seen(worker)
    if worker.get("earlier"):
        told.append(f"started {worker['earlier'] + 1} times")
    if worker.get("error"):
        told.append(worker["error"])
    return "  ".join(told)


def _last_seen(worker: Mapping[str, Any]) -> list[str]:
    """Said of those whose last word is not known to be one."""
    if worker["state"] not in ("running", "starting", "stale"):
        return []
    if "unmoved_seconds" in worker:
        return [f"last beat {lasting(worker['unmoved_seconds'])} ago"]
    if "beat_age_seconds" in worker:
        return [f"last beat about {lasting(worker['beat_age_seconds'])} ago, by its clock"]
    return []


def listing_lines(out: str, files: Sequence["Listed"]) -> Iterator[str]:
    """What there is of each tap, then every file."""
    taps: dict[str, list[Listed]] = {}
    for file in files:
        taps.setdefault(file.tap, []).append(file)
    units = len({file.unit for file in files})
    total = size(sum(file.bytes for file in files))
    yield f"{out}: {units:,} units, {len(files):,} files, {total}"
    width = max((len(tap) for tap in taps), default=0)
    for tap, of_tap in taps.items():
        rows = f"{sum(file.rows for file in of_tap):,}"
        yield (
            f"  {tap:{width}}  {of_tap[0].dtype or '':13} {len(of_tap):>7,} files {rows:>15} rows  "
            f"{size(sum(file.bytes for file in of_tap)):>10}"
        )
    for file in files:
        run = f"{file.first:,}+{file.rows:,}"
        yield f"{file.key}  {file.tap:{width}}  {run:>19}  {file.bytes:>13,}  {file.digest}"
