"""Real servers on loopback, one of each kind for all tests of a process."""

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support import tiny

_BUCKET = "spile-tests"
_stores = itertools.count()


@cache
def s3_endpoint() -> str:
    """Start moto's S3 with working preconditions; the environment gets its address."""
    endpoint = started("s3_server.py")
    os.environ |= s3_environment(endpoint)
    _make_bucket(endpoint)
    return endpoint


def s3_environment(endpoint: str) -> dict[str, str]:
    """Environment variables by which clients find an S3 server."""
    return {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }  # fmt: skip


def new_s3_store() -> str:
    """The URL of an empty store."""
    s3_endpoint()
    return s3_url()


@cache
def s3_account(name: str) -> dict[str, str]:
    """Environment variables of another S3 server, which refuses requests without these keys."""
    keys = {"AWS_ACCESS_KEY_ID": f"{name}-key", "AWS_SECRET_ACCESS_KEY": f"{name}-secret"}
    endpoint = started("s3_server.py", *keys.values())
    _make_bucket(endpoint)
    return s3_environment(endpoint) | keys


def s3_url() -> str:
    """The URL of an empty store in any S3 server's bucket."""
    return f"s3://{_BUCKET}/{os.getpid()}/{next(_stores)}"


@cache
def gcs_endpoint() -> str:
    """Our server of Google's protocol."""
    endpoint = started("gcs_server.py")
    os.environ |= gcs_environment(endpoint)
    _make_bucket(endpoint)
    return endpoint


def gcs_environment(endpoint: str) -> dict[str, str]:
    """Write the service account's file by which obstore finds a server of Google's protocol."""
    account = {
        "gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


def new_gcs_store() -> str:
    gcs_endpoint()
    return f"gs://{_BUCKET}/{os.getpid()}/{next(_stores)}"


@contextlib.contextmanager
def faulty_gcs(*faults: str) -> Iterator[str]:
    """A server of Google's protocol with chosen bugs: yields the URL of an empty store."""
    endpoint = started("gcs_server.py", *faults)
    _make_bucket(endpoint)
    before = gcs_environment(gcs_endpoint())
    try:
        os.environ |= gcs_environment(endpoint)
        yield f"gs://{_BUCKET}/store"
    finally:
        os.environ |= before


@contextlib.contextmanager
def failing(kind: str, share: float, seed: int) -> Iterator[str]:
    """A proxy in front of a server that fails a share of the requests: yields its address.

    Meanwhile the environment names the proxy instead of the server.
    """
    made = {"s3": s3_endpoint, "gs": gcs_endpoint}[kind]()
    environment = {"s3": s3_environment, "gs": gcs_environment}[kind]
    upstream = made.rpartition(":")[2]
    proxy = started("flaky_proxy.py", upstream, str(share), str(seed))
    try:
        os.environ |= environment(proxy)
        yield proxy
    finally:
        os.environ |= environment(made)


def counts(proxy: str) -> dict[str, int]:
    """Requests that came to a failing proxy, and how many failed in which way."""
    with urllib.request.urlopen(f"{proxy}/-/counts") as answer:
        return json.load(answer)


def kinds(proxy: str) -> dict[str, int]:
    """Requests to a proxy, by the class under which S3 bills them."""
    with urllib.request.urlopen(f"{proxy}/-/kinds") as answer:
        return json.load(answer)


def plan(proxy: str, *answers: tuple[str, str, str, str, bool]) -> None:
    """Set how a proxy answers the next requests of a kind (see flaky_proxy.py)."""
    data = json.dumps(answers).encode()
    urllib.request.urlopen(urllib.request.Request(f"{proxy}/-/plan", data, method="PUT")).close()


def planned(proxy: str) -> list[list[object]]:
    """The answers that a proxy was told to give and has not given yet."""
    with urllib.request.urlopen(f"{proxy}/-/plan") as answer:
        return json.load(answer)


def unfinished_uploads() -> str:
    """S3's list of unfinished multipart uploads in the tests' bucket."""
    with urllib.request.urlopen(f"{s3_endpoint()}/{_BUCKET}?uploads") as answer:
        return answer.read().decode()


def _make_bucket(endpoint: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()


def started(script: str, *arguments: str) -> str:
    """Run a server beside this file until the tests end; returns its address."""
    port = tiny.free_port()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), str(port), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(server.kill)
    _wait(port)
    return f"http://127.0.0.1:{port}"


def _wait(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
