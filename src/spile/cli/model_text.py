"""What is said of models: their taps, compiled steps, checks, downloads."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from spile.cli.style import size

if TYPE_CHECKING:
    from spile.check.compare import CheckReport
    from spile.compile.step import Compiled
    from spile.plan.fetch import Fetched


def taps_table(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print taps, one line each: name, shape, bytes and other names."""
    table = Table(box=None, pad_edge=False)
    for title in ("tap", "shape", "bytes/token", "meaning", "also known as"):
        table.add_column(title, justify="right" if title == "bytes/token" else "left")
    for entry in entries:
        shape = "×".join(map(str, entry["shape"])) or "1"
        aliases = "\n".join(entry["aliases"])
        table.add_row(entry["name"], shape, f"{entry['bytes']:,}", entry["meaning"], aliases)
    # A pipe has no width, and cutting a name off would make it useless.
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def compile_text(found: Sequence["Compiled"]) -> str:
    """What a step needs and how fast it may be; of several meshes the first, then all of them."""
    best = found[0]
    held = best.weights + best.taps + (best.temporaries or best.estimated_temporaries)
    made = "does not fit" if best.temporaries is None else size(best.temporaries)
    chip = ""
    if best.on == "cpu":
        held = best.weights + best.taps + best.estimated_temporaries
        chip = f" (virtual CPUs'; the chip's about {size(best.estimated_temporaries)})"
    verdict = {True: "yes", False: "no", None: "unknown"}[best.fits]
    room = f", {size(held)} of {size(best.memory)}" if best.memory else ""
    lines = [
        f"{best.topology}: {best.devices} device{'s' * (best.devices > 1)} on {best.hosts} "
        f"host{'s' * (best.hosts > 1)}, mesh {best.mesh}; compiled on {best.on} in "
        f"{best.compiling:.1f} s",
        f"a step of {best.tokens:,} tokens in contexts of {best.seq_len:,}, "
        f"{best.compute_dtype}, stored as {best.store_dtype}; of each device:",
        f"  weights       {size(best.weights)}",
        f"  taps          {size(best.taps)}",
        f"  temporaries   {made}{chip}",
        f"  fits          {verdict}{room}",
        f"  arithmetic    {best.flops / 1e12:,.2f} TFLOP",
        f"  memory moves  {size(best.traffic)}",
    ]
    for kind, each in best.collectives.items():
        lines.append(f"  sends         {size(each.sent)} in {each.count:,} x {kind}")
    if best.seconds and best.tokens_per_second and best.tokens_one_by_one:
        times = ", ".join(f"{n.replace('_', ' ')} {s * 1e3:,.1f}"
                          for n, s in vars(best.seconds).items())  # fmt: skip
        cost = f"; ${best.dollars:,.2f} a billion tokens" if best.dollars else ""
        cost += f", ${best.dollars_spot:,.2f} spot" if best.dollars_spot else ""
        lines.append(f"  at least, ms  {times}")
        lines.append(
            f"at most {best.tokens_per_second:,.0f} tok/s, limited by "
            f"{best.seconds.limit.replace('_', ' ')}{cost}; {best.tokens_one_by_one:,.0f} if "
            "kernels run one by one"
        )
    lines += [f"note: {note}" for note in best.notes]
    if len(found) > 1:
        lines.append(f"{'mesh':26} {'weights':>9} {'fits':>5} {'tok/s':>11}  limited by")
    for each in found if len(found) > 1 else ():
        rate = f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "?"
        limit = each.seconds.limit.replace("_", " ") if each.seconds else "?"
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        lines.append(f"{each.mesh:26} {size(each.weights):>9} {fits:>5} {rate:>11}  {limit}")
    return "\n".join(lines)


def check_text(out: str, report: "CheckReport") -> str:
    """How far each tap is from the reference, and the verdict."""
    width = max(map(len, report.taps))
    lines = [
        f"{'tap':{width}}  error     allowed   control   storing alone         cosine    "
        "(control: neighbouring layer or token; in brackets: a typical channel)"
    ]
    for name, tap in report.taps.items():
        verdict = "" if tap.ok else "  <- " + ("too far" if tap.error > tap.allowed else "unclear")
        lines.append(
            f"{name:{width}}  {tap.error:.2e}  {tap.allowed:.2e}  {tap.control:.2e}  "
            f"{tap.loss.relative_l2:.2e} ({tap.loss.typical_channel:.2e})  "
            f"{tap.loss.cosine:.6f}{verdict}"
        )
    far = sum(tap.error > tap.allowed for tap in report.taps.values())
    unclear = sum(not tap.ok for tap in report.taps.values()) - far
    verdict = [f"{far} taps disagree with the reference"] if far else []
    verdict += [f"{unclear} taps cannot be told from a neighbour"] if unclear else []
    lines.append(
        f"{out}: {', '.join(verdict) or 'every tap agrees with the reference'} "
        f"({report.documents} documents, {report.tokens:,} tokens, {report.reference})"
    )
    return "\n".join(lines)


def fetch_text(made: "Fetched") -> str:
    """What is here now, and how to use it."""
    flags = {f"--{name}": getattr(made, name) for name in ("model", "lora", "corpus", "cache")}
    use = " ".join(f"{flag} {shlex.quote(name)}" for flag, name in flags.items() if name)
    there = f" ({made.files_there:,} were there already)" if made.files_there else ""
    return f"{made.files:,} files{there}, {size(made.bytes)} fetched\n  use     {use}"
