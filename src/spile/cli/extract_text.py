"""What a run will cost, and what it made."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from spile.cli.style import compared, lasting, program, size, skipped
from spile.metrics import Counters

if TYPE_CHECKING:
    from spile.cli.duration import Duration
    from spile.dataset.prediction import Prediction
    from spile.plan.estimate import Estimate
    from spile.run.extract import Outcome


def extract_summary(out: str, outcome: "Outcome", counters: Counters) -> str:
    """What was made, and how to look at it, verify it and read it."""
    # The script beside the interpreter: argv[0] is no program under `python -m spile.cli`.
    spile = program("spile", str(Path(sys.executable).with_name("spile")))
    python = program("python", sys.executable)
    quoted = shlex.quote(out)
    part = "" if outcome.complete else ", partial=True"
    read = (
        f"import spile; ds = spile.open({out!r}{part}); print(ds.taps, ds.read(ds.taps[0], 0, 4))"
    )
    lines = [
        f"{out}: {outcome.documents:,} documents, {outcome.rows:,} rows per tap"
        + (f" (of {outcome.tokens:,} tokens)" if outcome.rows < outcome.tokens else "")
        + ", "
        f"{size(outcome.bytes)} in {outcome.units} units"
    ]
    if not outcome.complete:
        lines.append(
            f"ended by --max-bytes with {outcome.units} of {outcome.units_total} units; the same "
            "command with more of them goes on"
        )
    if outcome.skipped:
        lines.append(f"left out: {skipped(outcome.skipped)}")
    for tap, rows in outcome.truncated.items():
        lines.append(
            f"{tap}: of {rows:,} rows more latents were active than were kept; --latents keeps more"
        )
    if outcome.prediction:
        lines.append(f"predicted: {_outcome_of(outcome, outcome.prediction, counters)}")
    rates = counters.rates()
    if rates["device_seconds"]:
        lines.append(
            f"the device computed for {rates['computed_share']:.1%} of "
            f"{rates['device_seconds']:.1f} s and waited for text for "
            f"{rates['waited_for_text_share']:.1%}; text came at {rates['text_rate']:,.0f} tok/s"
        )
    lines += [
        f"  look    {spile} status {quoted}",
        f"  verify  {spile} verify {quoted}{'' if outcome.complete else ' --partial'}",
        f"  read    {python} -c {shlex.quote(read)}",
    ]
    return "\n".join(lines)


def _outcome_of(outcome: "Outcome", predicted: "Prediction", counters: Counters) -> str:
    """Each prediction, what came instead, and by how much it was off."""
    told: list[str] = []
    if outcome.complete:
        told.append(
            f"{predicted.tokens:,} tokens ({compared(predicted.tokens, outcome.tokens)} came)"
        )
        told.append(f"{size(predicted.bytes)} ({compared(predicted.bytes, outcome.bytes)})")
    spent, done = counters["unit_seconds"], counters["tokens"]
    if predicted.seconds and spent and predicted.tokens:
        # Of what this very run did: others may have done the rest.
        expected = predicted.seconds * done / predicted.tokens
        told.append(
            f"{lasting(expected)} for this run's units ({compared(expected, spent)}: "
            f"{lasting(spent)})"
        )
    return ", ".join(told) or "nothing of what was done here"


def plan_table(
    recipe: Mapping[str, Any],
    cost: "Estimate",
    time: "Duration",
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the plan as a table."""
    chosen = recipe["store_dtype"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("documents", f"{cost.documents:,}"),
        ("tokens", _tokens(cost)),
        ("rows to keep", f"{cost.rows:,}"),
        ("units", f"{cost.units:,} ({cost.units_done:,} done)"),
        ("contexts of", f"{recipe['seq_len']:,} tokens, {cost.batch_rows} rows a step"),
        *([("  of their places filled", f"{cost.packing:.1%}")] if cost.packing else []),
        ("arithmetic", f"{cost.flops / 1e12:,.2f} TFLOP"),
        *((f"  {tap}", size(b)) for tap, b in cost.bytes_per_tap.items()),
        ("  index", size(cost.index_bytes)),
        ("  headers, statistics, documents", size(cost.overhead_bytes)),
        ("to store", _stored(cost, recipe["store_dtype"])),
        *((f"  as {d}", size(b)) for d, b in cost.bytes_by_dtype.items() if d != chosen),
        *_compressed(cost, chosen),
        *_priced(cost),
        ("mesh", cost.mesh if cost.mesh != "1" else "one device"),
        ("weights per device", f"{size(cost.weights_bytes)} in {recipe['compute_dtype']}"),
        ("memory per device", size(cost.device_bytes)),
        ("memory on the host", size(cost.host_bytes)),
        *_timed(time),
        *more,
    ]
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
    for warning in cost.warnings:
        Console().print(f"note: {warning}", style="yellow", highlight=False)


def _tokens(cost: "Estimate") -> str:
    if cost.tokens_error == 0:
        return f"{cost.tokens:,} (all counted)"
    if cost.tokens_error is None:
        return f"{cost.tokens:,} (estimated)"
    share = cost.tokens_error / max(1, cost.tokens)
    return f"{cost.tokens:,} ± {share:.1%} (95%, of a sample)"


def _stored(cost: "Estimate", dtype: str) -> str:
    exactly = f" = {cost.total_bytes:,} bytes" if cost.exact else ""
    return f"{size(cost.total_bytes)} as {dtype}{exactly}"


def _timed(time: "Duration") -> list[tuple[str, str]]:
    """How long it takes where it was measured, or computed for."""
    if time.rate is None or time.seconds is None:
        return [(f"time {_on(time.on)}", time.why or "unknown")]
    how = "measured" if time.measured else "computed: at the chips' limit"
    told = [
        (f"time {_on(time.on)}", f"{lasting(time.seconds)} at {time.rate:,.0f} tok/s ({how})"),
    ]
    if time.starting is not None and time.compiling is not None:
        start = f"{lasting(time.starting)} (compiling, in all: {lasting(time.compiling)})"
        told.append(("  until the first step", start))
    if time.dollars is not None:
        told.append(("  on demand", f"${time.dollars:,.2f}"))
    return told


def _on(name: str) -> str:
    return name if name == "here" else f"on {name}"


def _priced(cost: "Estimate") -> list[tuple[str, str]]:
    """Room on a disk, or rent in a cloud."""
    if cost.monthly_dollars is not None:
        return [
            ("to keep it", f"${cost.monthly_dollars:,.2f} a month"),
            ("  as", str(cost.priced_as)),
        ]
    free = "unknown" if cost.free_bytes is None else size(cost.free_bytes)
    return [("free there", free)]


def _compressed(cost: "Estimate", dtype: str) -> list[tuple[str, str]]:
    """What --compress makes of normal noise; of real rows more or less."""
    shares = {"bfloat16": 0.70, "float16": 0.88, "float32": 0.85, "float8_e4m3": 0.90, "int8": 0.86}
    return [("  with --compress, about", size(int(cost.total_bytes * shares[dtype])))]
