"""Verbs for an existing dataset: verify, sign, drop, gc, rm, export, copy, merge, compact, push."""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from spile.cli.flags import Verbs, count_of
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, SpileError, printable
from spile.core.humanize import plural, size
from spile.core.options import listed
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.dataset.maintain.assemble import Assembled
    from spile.dataset.maintain.compact import Compacted
    from spile.dataset.maintain.remove import Removed
    from spile.dataset.maintain.repair import Repaired
    from spile.dataset.maintain.replica import Copied
    from spile.dataset.maintain.signature import Signed
    from spile.dataset.maintain.verify import Report
    from spile.interop.export import Exported
    from spile.interop.hub.push import Pushed
    from spile.objects import Objects

# Options of a recipe that name files.
_SOURCES = ("model", "lora", "corpus", "template", "encode", "splice")


def add_verify(verbs: Verbs) -> None:
    sub = verbs.add("verify", verify, "audit every byte of a dataset")
    sub.place("out")
    sub.switch("--partial", "accept units that are not done yet")
    how = sub.either()
    how.switch("--quick", "compare only the sizes and checksums that a listing gives; read no rows")
    how.switch(
        "--resume", "continue an interrupted audit; skip units that it found sound on this machine"
    )
    signed = sub.group("signature")
    signed.switch(
        "--signature", "also check that `spile sign` signed every record and file as it is"
    )
    signed.add(
        "--signers",
        "file of allowed signers as ssh-keygen reads it, or a public key [~/.ssh/allowed_signers]",
        "FILE",
    )
    again = sub.group("repair")
    again.switch(
        "--repair",
        "make damaged and missing units again, with the model and the corpus of the recipe; "
        "with --partial, set damaged units aside for `spile extract` to make again",
    )
    again.add(
        "--from",
        "the dataset that OUT was compacted from; damaged units are copied from it",
        "DATASET",
        dest="source",
    )
    for name in _SOURCES:
        again.add(f"--{name}", "its place now, if it has moved", "X")


def verify(arguments: argparse.Namespace) -> int:
    from spile.dataset.maintain.signature import read_signed
    from spile.dataset.maintain.verify import Journal, verify
    from spile.run.pipeline.display import counted

    objects = open_objects(arguments.out)
    signers = Path(arguments.signers) if arguments.signers else None
    asked = arguments.signature or signers is not None
    if asked and (arguments.quick or arguments.repair):
        raise ConfigError("--signature cannot be combined with --quick or --repair; run it alone")
    signed = read_signed(objects, signers) if asked else None
    # (A journal without a signature does not show that the files it found sound were signed.)
    audited = f"{objects.url} {signed.digest}" if signed else objects.url
    journal = None if arguments.quick else Journal(audited, resume=arguments.resume)

    def audit() -> "Report":
        with counted("units", quiet=arguments.json) as progress:
            return verify(
                objects,
                partial=arguments.partial,
                quick=arguments.quick,
                journal=journal,
                progress=progress,
                signed=signed,
            )

    report, told = audit(), {}
    if arguments.repair:
        repaired = _repair(arguments, objects, report)
        before = report
        if not before.ok:
            report = audit()
        told = {"repaired": dataclasses.asdict(repaired), "faults_before": before.faults}
    if arguments.json:
        found = {**dataclasses.asdict(report), "damaged": sorted(report.damaged)}
        print(json.dumps({"ok": report.ok, **found, **told}))
    else:
        print(verify_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def _repair(arguments: argparse.Namespace, objects: "Objects", report: "Report") -> "Repaired":
    """Make units again that an audit found damaged, and report what was made."""
    from spile.metrics import Counters
    from spile.run.pipeline.display import progress
    from spile.run.repair import repair

    if not arguments.json:
        for fault in report.faults:
            print(f"found: {printable(fault)}")
    counters = Counters()
    with progress(counters, quiet=arguments.json) as on_start:
        repaired = repair(
            objects,
            report,
            recipe=Recipe(**{name: getattr(arguments, name) for name in _SOURCES}),
            source=open_objects(arguments.source) if arguments.source else None,
            partial=arguments.partial,
            counters=counters,
            on_start=on_start,
            stop=arguments.stop,
        )
    if not arguments.json:
        print(repair_text(repaired, partial=arguments.partial))
    return repaired


def repair_text(repaired: "Repaired", *, partial: bool) -> str:
    """Summarize the units that were made again."""
    if repaired.passes:
        own = dataclasses.replace(repaired, passes={})
        changed = own.units or own.records or own.restored
        lines = [repair_text(own, partial=partial)] if changed else []
        lines += [
            f"pass {name}: {repair_text(found, partial=partial)}"
            for name, found in repaired.passes.items()
        ]
        return "\n".join(lines)
    if repaired.restored:
        own = dataclasses.replace(repaired, restored=[])
        more = f"\n{repair_text(own, partial=partial)}" if own.units or own.records else ""
        return f"restored: {', '.join(repaired.restored)}{more}"
    if not (repaired.units or repaired.records):
        return "nothing was repaired"
    units = f"unit{'s' * (len(repaired.units) != 1)} {', '.join(map(str, repaired.units))}"
    told = [units] if repaired.units else []
    if partial:
        what = ", ".join([*told, *repaired.records])
        return f"set aside: {what}; the same `spile extract` makes them again"
    if repaired.units:
        told = [f"{units} ({len(repaired.identical)} with the same rows, bit for bit)"]
    return f"made again: {', '.join([*told, *repaired.records])}"


def verify_text(out: str, report: "Report") -> str:
    lines = [f"fault: {printable(fault)}" for fault in report.faults]
    lines += [f"orphan: {printable(key)}" for key in report.orphans]
    if report.orphans:
        lines.append(
            f"{plural(len(report.orphans), 'orphan')}, harmless; `spile gc {shlex.quote(out)}` "
            "removes those of finished units"
        )
    sound = "whole and sound" if report.units_done == report.units else "sound so far"
    if report.units_done == report.units and not report.rows:
        sound = "sound, but without rows"
    verdict = sound if report.ok else plural(len(report.faults), "fault")
    how = "by size and etag" if report.quick else "read"
    if report.resumed:
        how += f", {report.resumed} units of them by the earlier audit"
    if report.signed_by:
        covered = report.units_done - len(report.unsigned)
        lines.append(f"signed by {report.signed_by}: {covered} of {report.units_done} units")
    for name, found in report.passes.items():
        part = "" if found.units_done == found.units else ", still being added"
        lines.append(
            f"pass {name}: {'sound' if found.ok else plural(len(found.faults), 'fault')} "
            f"({found.units_done} of {found.units} units, {size(found.bytes)}{part})"
        )
    lines.append(
        f"{out}: {verdict} ({report.units_done} of {report.units} units, {report.rows:,} rows, "
        f"{size(report.bytes)} {how})"
    )
    return "\n".join(lines)


def add_sign(verbs: Verbs) -> None:
    sub = verbs.add(
        "sign",
        sign,
        "sign a dataset with an ssh key, so that others can verify it",
        epilog="  spile sign acts/demo --key ~/.ssh/id_ed25519\n"
        "  spile verify acts/demo --signature --signers id_ed25519.pub",
    )
    sub.place("out")
    sub.add(
        "--key",
        "a private key, or the public key of one that ssh-agent holds",
        "FILE",
        required=True,
    )


def sign(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.signature import sign
    from spile.run.pipeline.display import counted

    with counted("files", quiet=arguments.json) as progress:
        made = sign(
            open_objects(arguments.out), Path(arguments.key).expanduser(), progress=progress
        )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else sign_text(made))


def sign_text(made: "Signed") -> str:
    """Describe what was signed, and how others can verify it."""
    return (
        f"{made.url}: signed {made.units} of {made.units_total} units, {made.files:,} files and "
        f"records, {size(made.bytes)}, with {made.key}\n"
        f"  verify  spile verify {shlex.quote(made.url)} --signature --signers FILE"
    )


def add_drop(verbs: Verbs) -> None:
    sub = verbs.add(
        "drop",
        drop,
        "drop added taps, or features; gc then frees their space",
        epilog="  spile drop acts/demo --taps mlp_out.20\n  spile gc acts/demo",
    )
    sub.place("out")
    what = sub.either()
    what.add("--taps", "comma separated; taps added by one --add-taps are dropped together", "T")
    what.add("--features", "names of features, comma separated, as in `spile status`", "NAME")


def drop(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.features import drop_features
    from spile.dataset.records.ledger import Ledger
    from spile.dataset.records.passes import drop_taps

    given = arguments.taps or arguments.features
    if not given:
        raise ConfigError("drop: name --taps or --features")
    asked = [name for name in map(str.strip, given.split(",")) if name]
    drop = drop_taps if arguments.taps else drop_features
    gone = drop(Ledger(open_objects(arguments.out)), asked)
    if arguments.json:
        print(json.dumps({"dropped": gone}))
    else:
        freed = f"`spile gc {shlex.quote(arguments.out)}` frees {size(sum(gone.values()))}"
        print(f"dropped {', '.join(gone)}; {freed}")


def add_gc(verbs: Verbs) -> None:
    sub = verbs.add("gc", gc, "remove files that no unit needs; safe beside running workers")
    sub.place("out")
    sub.switch(
        "--abandoned", "also remove attempts at unfinished units; only when nothing is running"
    )


def gc(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.gc import collect_garbage
    from spile.run.pipeline.display import counted

    objects = open_objects(arguments.out)
    with counted("orphans", quiet=arguments.json) as progress:
        removed = collect_garbage(objects, abandoned=arguments.abandoned, progress=progress)
    if arguments.json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"{plural(len(removed), 'orphan')} removed")


def add_rm(verbs: Verbs) -> None:
    sub = verbs.add("rm", rm, "remove a whole dataset, and nothing else that lies there")
    sub.place("out", metavar="DATASET")
    sub.switch("--yes", "remove it without asking")


def rm(arguments: argparse.Namespace) -> int:
    from spile.dataset.maintain.remove import check_removable, remove
    from spile.run.pipeline.display import counted

    objects = open_objects(arguments.out)
    check_removable(objects)
    if not arguments.yes and not _agreed(arguments.out, objects):
        print("nothing was removed")
        return 0
    with counted("files", quiet=arguments.json) as progress:
        removed = remove(objects, progress=progress)
    print(json.dumps(dataclasses.asdict(removed)) if arguments.json else removed_text(removed))
    return 0


def _agreed(out: str, objects: "Objects") -> bool:
    """Ask on the terminal whether to remove a dataset."""
    from spile.dataset import format as fmt
    from spile.objects import exists
    from spile.status.status import read_status

    told = f"{out}: the rest of a dataset that was removed in part"
    if exists(objects, fmt.UNITS):
        found = read_status(objects)
        taps = sum(len(each.taps) for each in (found, *found.passes))
        space = size(found.bytes + sum(each.bytes for each in found.passes))
        told = (
            f"{out}: {plural(found.rows, 'row')} of {plural(taps, 'tap')}, "
            f"{plural(found.documents, 'document')}, {space}"
        )
    if not sys.stdin.isatty():
        raise ConfigError(f"{told}; nobody can be asked here: add --yes to remove it")
    print(f"{told}; remove it for good? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def removed_text(removed: "Removed") -> str:
    """Describe what was removed, and what was left."""
    told = f"{removed.url}: removed {plural(removed.files, 'file')}, {size(removed.bytes)}"
    if removed.left:
        told += f"\nleft, since they belong to no dataset: {listed(removed.left)}"
    return told


def add_export(verbs: Verbs) -> None:
    sub = verbs.add("export", export, "write a dataset in another tool's format")
    formats: Iterable[str] = ()
    if verbs.may_be("export"):
        from spile.interop.export import FORMATS as formats
    sub.place("out")
    sub.add("--to", ", ".join(formats), "FORMAT", required=True)
    sub.place("dest", "the directory to make")
    sub.add("--taps", "taps to export [all]", "T")
    sub.number("--context-size", "rows in a sequence [seq-len]")
    sub.add("--dtype", "[as stored if the format has it, else float32]", "X")


def export(arguments: argparse.Namespace) -> None:
    from spile.interop.export import export

    names = ("to", "taps", "context_size", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    made = export(arguments.out, arguments.dest, **options)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else export_text(made))


def export_text(made: "Exported") -> str:
    """Describe what was written, and which rows were left out."""
    if made.features:
        return (
            f"{made.dest}: {plural(made.features, 'feature')} as {made.format}, {size(made.bytes)} "
            f"in {plural(made.files, 'file')}"
        )
    lines = [
        f"{made.dest}: {made.rows:,} rows of {len(made.taps)} taps as {made.format}, "
        f"{size(made.bytes)} in {made.files} files"
    ]
    if made.context_size:
        lines.append(f"sequences of {made.context_size:,} rows, cut from the stored order")
    if made.left_over:
        rows = f"{made.left_over:,} row{'s' * (made.left_over > 1)}"
        lines.append(f"left over: the last {rows}, too few for a sequence or a file")
    return "\n".join(lines)


def add_copy(verbs: Verbs) -> None:
    sub = verbs.add(
        "copy",
        copy,
        "copy a dataset, or some of its taps and units; may be continued",
        epilog="  SPILE_SOURCE_AWS_…, SPILE_SOURCE_GOOGLE_…: credentials for OUT alone\n"
        "  SPILE_DEST_AWS_…, SPILE_DEST_GOOGLE_…: credentials for DEST alone",
    )
    sub.place("out")
    sub.place("dest", "the directory or URL of the copy")
    sub.add("--taps", "taps to take, as for export [all]", "T")
    sub.add("--units", "units to copy, e.g. 0-99,150 [all]", "U")


def copy(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.assemble import copy_part
    from spile.dataset.maintain.replica import replicate
    from spile.run.pipeline.display import counted

    source = open_objects(arguments.out, prefix="SPILE_SOURCE_")
    dest = open_objects(arguments.dest, prefix="SPILE_DEST_")
    with counted("units", quiet=arguments.json) as progress:
        if arguments.taps is None and arguments.units is None:
            made = replicate(source, dest, progress=progress)
            text = copy_text(made)
        else:
            made = copy_part(
                source, dest, taps=arguments.taps, units=arguments.units, progress=progress
            )
            text = assembled_text(made)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else text)


def copy_text(made: "Copied") -> str:
    """Describe what was copied, and what was there before."""
    there = f", {made.units_there:,} of them were there already" if made.units_there else ""
    lines = [
        f"{made.dest}: {made.units:,} of {made.units_total:,} units{there}; {made.files:,} files, "
        f"{size(made.bytes)} copied and compared with their checksums"
    ]
    if made.units < made.units_total:
        lines.append("once the other units are done, the same command copies them")
    return "\n".join(lines)


def assembled_text(made: "Assembled") -> str:
    """Describe the new dataset."""
    there = f", {made.units_there:,} of them were there already" if made.units_there else ""
    return (
        f"{made.dest}: {made.rows:,} rows of {plural(len(made.taps), 'tap')} in "
        f"{plural(made.units, 'unit')}{there}, {size(made.bytes)}"
    )


def add_merge(verbs: Verbs) -> None:
    sub = verbs.add("merge", merge, "join datasets of one recipe over different documents")
    sub.place("out", "two datasets or more, in order", nargs="+")
    sub.place("dest", "directory or URL of the new dataset")


def merge(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.assemble import merge
    from spile.run.pipeline.display import counted

    sources = [open_objects(out, prefix="SPILE_SOURCE_") for out in arguments.out]
    dest = open_objects(arguments.dest, prefix="SPILE_DEST_")
    with counted("units", quiet=arguments.json) as progress:
        made = merge(sources, dest, progress=progress)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else assembled_text(made))


def add_compact(verbs: Verbs) -> None:
    sub = verbs.add("compact", compact, "rewrite a dataset in few large shards")
    sub.place("out")
    sub.place("dest", "directory or URL of the new dataset")
    sub.add("--unit-bytes", "merge units up to this size [64GiB]", "SIZE", default="64GiB")
    sub.add("--shard-bytes", "as for extract [1GiB]", "SIZE", default="1GiB")
    sub.switch("--compress", "as for extract")
    sub.add("--taps", "taps to take, as for export [all]", "T")


def compact(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.compact import compact

    runtime = Runtime(shard_bytes=arguments.shard_bytes)
    made = compact(
        open_objects(arguments.out),
        open_objects(arguments.dest),
        unit_bytes=count_of("--unit-bytes", arguments.unit_bytes, "1GiB or 500MB"),
        shard_bytes=runtime.shard_bytes,
        compress=arguments.compress,
        taps=arguments.taps,
    )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else compact_text(made))


def compact_text(made: "Compacted") -> str:
    """Describe the sizes before and after."""
    return (
        f"{made.dest}: {made.rows:,} rows in {made.units:,} unit{'s' * (made.units != 1)} "
        f"(of {made.units_before:,}), {made.shards:,} shards (of {made.shards_before:,}), "
        f"{size(made.bytes)} (of {size(made.bytes_before)})"
    )


def add_push(verbs: Verbs) -> None:
    sub = verbs.add("push", push, "upload a dataset to the Hugging Face Hub, with a card")
    sub.place("out")
    sub.place("repo", "owner/name of a dataset repository")
    sub.switch("--private", "make the repository private; refuse an existing public one")
    sub.add("--revision", "created if missing [main]", "BRANCH")


def push(arguments: argparse.Namespace) -> None:
    from spile.interop.hub.push import push

    made = push(
        arguments.out, arguments.repo, private=arguments.private, revision=arguments.revision
    )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else push_text(made))


def push_text(made: "Pushed") -> str:
    """Describe what was uploaded, and how to download it."""
    lines = [f"{made.url}: {made.files:,} files uploaded, {made.files_there:,} were there already"]
    if not made.card_written:
        lines.append("its README.md was left as it is")
    return "\n".join([*lines, f"  load    {made.download}"])
