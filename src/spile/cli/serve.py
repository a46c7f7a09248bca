"""The verb that shows a dataset in a browser."""

import argparse
import json
import re
import threading

from spile.cli.flags import Verbs, add_listening, listen_address
from spile.core.config import parse_count
from spile.core.errors import ConfigError

# A wait without a timeout may miss a signal that arrives as it begins, or in another thread.
_LOOK_SECONDS = 0.5


def add_serve(verbs: Verbs) -> None:
    sub = verbs.add("serve", serve, "show a dataset, finished or not, in a browser")
    sub.add_argument("out", metavar="OUT")
    add_listening(sub, 8770)
    sub.add_argument("--token", metavar="X", help="[made, where one is needed]")
    sub.add_argument("--tokenizer", metavar="DIR", help="the model's, if it has moved")
    sub.add_argument(
        "--read",
        metavar="SIZE",
        default="16GiB",
        help="of all rows, at most, for plots of the whole [16GiB]",
    )
    sub.add_argument("--cache", metavar="DIR", help="where what is read of a bucket is kept")


def serve(arguments: argparse.Namespace) -> int:
    from spile.dataset.read.dataset import Dataset, finished_taps, open_dataset
    from spile.objects import open_objects
    from spile.serve.routes import Answers
    from spile.serve.server import Server

    try:
        most_bytes = parse_count(arguments.read)
    except ValueError:
        raise ConfigError(f"--read must be a size such as 16GiB, got {arguments.read}") from None
    if arguments.token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{16,}", arguments.token):
        raise ConfigError(
            "--token must be 16 letters, digits, - or _, or more; without it one is made"
        )
    address = listen_address(arguments, arguments.token)
    objects = open_objects(arguments.out)

    def opened() -> Dataset:
        # (With taps that are still being added, only the units that have them would be there.)
        taps = finished_taps(objects)
        return open_dataset(arguments.out, partial=True, taps=taps, cache=arguments.cache)

    answers = Answers(
        objects,
        opened,
        tokenizer=arguments.tokenizer,
        most_bytes=most_bytes,
    )
    server = Server(address, answers)
    answers.start()
    thread = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    thread.start()
    url = server.url
    said = f"{arguments.out}: {url}"
    if address.is_anywhere:
        said += f"\n(listening on every address of this machine, {address.in_url}; this is one)"
    try:  # before printing: a reader of the line may end us at once
        print(json.dumps({"url": url}) if arguments.json else said, flush=True)
        while not arguments.stop.wait(_LOOK_SECONDS):
            continue
    except KeyboardInterrupt:
        pass  # the normal way to end it
    finally:
        server.shutdown()
        server.server_close()
        answers.close()
    return 0
