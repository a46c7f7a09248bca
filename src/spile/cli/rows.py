"""Verbs about the order of a dataset's rows: shuffled on disk, or for trainers."""

import argparse
import dataclasses
import json
import os
import re
import sys

from spile.core.config import Runtime, parse_count
from spile.core.errors import ConfigError, Interrupted, SpileError, printable


def shuffle(arguments: argparse.Namespace) -> int:
    from spile.cli.dataset_text import shuffle_text
    from spile.dataset.maintain.shuffle import shuffle
    from spile.objects import open_objects

    runtime = Runtime(shard_bytes=arguments.shard_bytes)
    made = shuffle(
        open_objects(arguments.out), open_objects(arguments.dest), seed=arguments.seed,
        memory=_count("--memory", arguments.memory), scratch=arguments.scratch,
        shard_bytes=runtime.shard_bytes, compress=arguments.compress,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else shuffle_text(made))
    return 0


def serve_rows(arguments: argparse.Namespace) -> int:
    from spile.dataset.read.dataset import open_dataset
    from spile.interop.flight.server import RowServer

    dataset = open_dataset(arguments.out)
    taps = arguments.taps.split(",") if arguments.taps else dataset.taps
    in_bytes = re.search("[a-zA-Z]", arguments.window)
    batches = dataset.batches(
        [tap.strip() for tap in taps],
        arguments.batch_size,
        seed=arguments.seed,
        shuffle=None if arguments.shuffle == "none" else arguments.shuffle,
        window=arguments.window if in_bytes else _count("--window", arguments.window),
        epochs=None if arguments.epochs == "none" else _count("--epochs", arguments.epochs),
        where=arguments.where,
        drop_last=arguments.drop_last,
        encoded=True,
    )
    server = RowServer(
        batches,
        host=arguments.host,
        port=arguments.port,
        token=os.environ.get("SPILE_TOKEN") or None,
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
    if not server.is_closed:  # a trainer that reads nothing would be waited for at the exit, too
        sys.stdout.flush()
        os._exit(code)
    return code


def _count(flag: str, text: str) -> int:
    try:
        return parse_count(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a number, or 1GiB or 500MB, got {text!r}") from None
