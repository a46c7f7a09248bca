"""Real servers on loopback, one of each kind for all tests of a process."""

import atexit
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path

import tiny

_BUCKET = "spile-tests"
_stores = itertools.count()


@cache
def s3_endpoint() -> str:
    """moto's S3, which honours preconditions; its address is put into the environment."""
    endpoint = _started("s3_server.py")
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }  # fmt: skip
    request = urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()
    return endpoint


def new_s3_store() -> str:
    """The URL of an empty store."""
    s3_endpoint()
    return f"s3://{_BUCKET}/{os.getpid()}/{next(_stores)}"


@cache
def gcs_endpoint() -> str:
    """Our own server of Google's protocol; obstore finds it by a service account's file."""
    endpoint = _started("gcs_server.py")
    account = {
        "gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"] = json.dumps(account)
    request = urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()
    return endpoint


def new_gcs_store() -> str:
    gcs_endpoint()
    return f"gs://{_BUCKET}/{os.getpid()}/{next(_stores)}"


def _started(script: str, *arguments: str) -> str:
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
