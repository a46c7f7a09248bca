"""Every answer that S3 and Google document for a conditional write, from a server that gives it."""

from collections.abc import Iterator

import pytest

from spile.core import retry
from spile.core.errors import StoreError
from spile.objects import bucket, open_objects
from support import servers

STORES = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}

# What may go away by itself, as the services spell it.
PASSING = [
    ("s3", "409 Conflict", "ConditionalRequestConflict"),
    ("s3", "409 Conflict", "OperationAborted"),
    ("s3", "400 Bad Request", "RequestTimeout"),
    ("s3", "429 Too Many Requests", "TooManyRequests"),
    ("s3", "500 Internal Server Error", "InternalError"),
    ("s3", "503 Slow Down", "SlowDown"),
    ("s3", "503 Service Unavailable", "ServiceUnavailable"),
    ("gs", "408 Request Timeout", "RequestTimeout"),
    ("gs", "409 Conflict", "Conflict"),
    ("gs", "429 Too Many Requests", "SlowDown"),
    ("gs", "500 Internal Server Error", "InternalError"),
    ("gs", "502 Bad Gateway", "BadGateway"),
    ("gs", "503 Service Unavailable", "ServiceUnavailable"),
    ("gs", "504 Gateway Timeout", "GatewayTimeout"),
]
FINAL = [
    ("s3", "400 Bad Request", "ExpiredToken", "check the credentials"),
    ("s3", "400 Bad Request", "InvalidArgument", "InvalidArgument"),
    ("s3", "403 Forbidden", "AccessDenied", "check the credentials"),
    ("s3", "403 Forbidden", "RequestTimeTooSkewed", "check the credentials"),
    ("s3", "404 Not Found", "NoSuchBucket", "there is no such bucket"),
    ("gs", "401 Unauthorized", "AuthenticationRequired", "check the credentials"),
    ("gs", "403 Forbidden", "AccessDenied", "check the credentials"),
    ("gs", "404 Not Found", "NoSuchBucket", "there is no such bucket"),
]


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def proxies() -> Iterator[dict[str, str]]:
    with servers.failing("s3", 0.0, 0) as s3, servers.failing("gs", 0.0, 0) as gs:
        yield {"s3": s3, "gs": gs}


def said(code: str) -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as planned</Message></Error>"


@pytest.mark.parametrize(
    ("kind", "status", "code", "done"),
    [
        (*answer, done)
        for answer in PASSING
        for done in (False, True)
        if not (done and answer[1].startswith("409"))  # which says that nothing was done
    ],
)
def test_what_may_pass_is_tried_again_and_the_object_is_ours(
    kind: str, status: str, code: str, done: bool, proxies: dict[str, str]
) -> None:
    objects = open_objects(STORES[kind]())
    servers.plan(proxies[kind], ("PUT", "b", status, said(code), done))
    assert objects.create("b", b"ours")
    assert servers.planned(proxies[kind]) == []
    assert objects.get("b") == b"ours"
    assert not objects.create("b", b"theirs")
    assert objects.get("b") == b"ours"


@pytest.mark.parametrize(("kind", "status", "code", "line"), FINAL)
def test_what_stays_wrong_is_said_at_once(
    kind: str, status: str, code: str, line: str, proxies: dict[str, str]
) -> None:
    objects = open_objects(STORES[kind]())
    servers.plan(proxies[kind], ("PUT", "b", status, said(code), False))
    with pytest.raises(StoreError, match=line):
        objects.create("b", b"ours")
    assert objects.create("b", b"ours")


def test_a_key_that_is_said_to_exist_and_does_not_is_tried_again(
    kind: str, proxies: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_objects(STORES[kind]())
    again = ("PUT", "b", "412 Precondition Failed", said("PreconditionFailed"), False)
    servers.plan(proxies[kind], again, again)
    assert objects.create("b", b"ours")
    servers.plan(proxies[kind], *[("PUT", "c", *again[2:])] * 200)
    monkeypatch.setattr(bucket, "PATIENCE", 0.3)
    with pytest.raises(StoreError, match="tried for"):
        objects.create("c", b"ours")


def test_a_conflict_with_a_request_that_wins_is_lost(kind: str, proxies: dict[str, str]) -> None:
    objects = open_objects(STORES[kind]())
    assert objects.create("b", b"theirs")
    servers.plan(proxies[kind], ("PUT", "b", "409 Conflict", said("Conflict"), False))
    assert not objects.create("b", b"ours")
    assert objects.get("b") == b"theirs"
