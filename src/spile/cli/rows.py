"""Verbs for the order of a dataset's rows: shuffle on disk, or serve to trainers."""

import argparse
import dataclasses
import json
import os
import re
import sys
from typing import TYPE_CHECKING

from spile.cli.flags import Verbs, add_listening, count_of, listen_address
from spile.core.config import Runtime
from spile.core.errors import Interrupted, SpileError, printable
from spile.core.humanize import size
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.dataset.maintain.shuffle import Shuffled


def add_shuffle(verbs: Verbs) -> None:
    sub = verbs.add("shuffle", shuffle, "write a new dataset with its rows in random order")
    sub.place("out")
    sub.place("dest", "directory or URL of the new dataset")
    sub.number("--seed", "seed of the permutation [0]", 0)
    sub.add("--memory", "memory for rows; the order depends on it [4GiB]", "SIZE", default="4GiB")
    sub.add(
        "--scratch",
        "directory or URL for intermediate files as large as "
        "the dataset; removed at the end [DEST/scratch]",
        "DIR",
    )
    sub.add("--shard-bytes", "as for extract [1GiB]", "SIZE", default="1GiB")
    sub.switch("--compress", "as for extract")
    sub.add("--taps", "taps to take, as for export [all]", "T")


def shuffle(arguments: argparse.Namespace) -> None:
    from spile.dataset.maintain.shuffle import shuffle
    from spile.run.pipeline.display import waiting

    runtime = Runtime(shard_bytes=arguments.shard_bytes)
    with waiting("shuffling", quiet=arguments.json):
        made = shuffle(
            open_objects(arguments.out),
            open_objects(arguments.dest),
            seed=arguments.seed,
            memory=count_of("--memory", arguments.memory),
            scratch=arguments.scratch,
            shard_bytes=runtime.shard_bytes,
            compress=arguments.compress,
            taps=arguments.taps,
        )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else shuffle_text(made))


def shuffle_text(made: "Shuffled") -> str:
    """Describe the shuffled dataset."""
    return (
        f"{made.dest}: {made.rows:,} rows in random order, {made.units:,} "
        f"unit{'s' * (made.units != 1)}, {made.shards:,} shards, {size(made.bytes)}, in "
        f"{made.passes} passes; every row of the source once"
    )


def add_serve_rows(verbs: Verbs) -> None:
    sub = verbs.add(
        "serve-rows",
        serve_rows,
        "read and shuffle once, for many trainers",
        epilog="  a trainer: for batch in spile.connect('grpc://127.0.0.1:8815'): ...\n"
        "  SPILE_TOKEN: the token of trainers; needed on addresses other than this machine's, "
        "and made if it is not set",
    )
    sub.place("out")
    sub.add("--taps", "taps to serve, comma separated [all]", "T")
    sub.number("--batch-size", "rows in a batch [4096]", 4096)
    sub.number("--seed", "[0]", 0)
    sub.add("--shuffle", None, choices=("window", "full", "none"), default="window")
    sub.add(
        "--window",
        "shuffle window in rows, or in bytes such as 512MiB [65536]",
        "N",
        default="65536",
    )
    sub.add("--epochs", "number of epochs, or none for endless [1]", "N", default="1")
    sub.add("--where", "rows to serve, as for extract", "X")
    sub.switch("--drop-last", "leave out the last, short batch of an epoch")
    sub.number("--trainers", "start when this many trainers are connected [1]", 1)
    sub.number("--buffer", "how many batches a trainer may be behind the fastest [8]", 8)
    sub.number(
        "--patience",
        "how long others wait for a trainer that takes nothing, before they continue [300]",
        300.0,
        unit="SECONDS",
    )
    add_listening(sub, 8815)


def serve_rows(arguments: argparse.Namespace) -> int:
    from spile.dataset.read.opening import open_dataset
    from spile.interop.flight.server import RowServer

    address = listen_address(arguments, os.environ.get("SPILE_TOKEN") or None)
    dataset = open_dataset(arguments.out)
    taps = arguments.taps.split(",") if arguments.taps else dataset.taps
    in_bytes = re.search("[a-zA-Z]", arguments.window)
    batches = dataset.batches(
        [tap.strip() for tap in taps],
        arguments.batch_size,
        seed=arguments.seed,
        shuffle=None if arguments.shuffle == "none" else arguments.shuffle,
        window=arguments.window if in_bytes else count_of("--window", arguments.window),
        epochs=None if arguments.epochs == "none" else count_of("--epochs", arguments.epochs),
        where=arguments.where,
        drop_last=arguments.drop_last,
        encoded=True,
    )
    server = RowServer(
        batches,
        address,
        trainers=arguments.trainers,
        buffer=arguments.buffer,
        patience=arguments.patience,
    )
    told = {"url": server.url, "token": server.token}
    if arguments.json:
        print(json.dumps(told), flush=True)
    else:
        known = f", SPILE_TOKEN={server.token}" if server.token else ""
        print(f"{arguments.out}: batches at {server.url}{known}", flush=True)
    try:
        server.run(arguments.stop)
        code = 0
    except (SpileError, KeyboardInterrupt) as error:
        if server.is_closed:
            raise
        told = error if isinstance(error, SpileError) else Interrupted()
        print(f"spile: {printable(str(told))}", file=sys.stderr)
        code = told.exit_code
    if not server.is_closed:  # a normal exit would wait for a trainer that reads nothing
        sys.stdout.flush()
        os._exit(code)
    return code
