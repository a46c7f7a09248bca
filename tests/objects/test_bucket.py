"""Faulty buckets: which requests are retried, which are not, and which answers are not trusted."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import ConfigError, StoreError
from spile.objects import Spool, bucket, check_creates_once, open_objects
from spile.objects.protocol import COUNTED
from support import servers, tiny

STORES = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}


def stream(url: str, key: str, data: bytes) -> str:
    writer = open_objects(url).stream(key)
    writer.write(data)
    return writer.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", STORES)
def test_a_long_listing_under_faults_goes_on_from_where_it_stood(kind: str) -> None:
    url = STORES[kind]()
    keys = [f"a/{number:04d}" for number in range(1100)]  # more than a page of either server
    objects = open_objects(url)
    for key in keys:
        objects.create(key, b"x" * (int(key[2:]) % 7))
    with servers.failing(kind, 0.4, seed=1) as proxy:
        found = list(open_objects(url).entries("a/"))
        counts = servers.counts(proxy)
    assert [entry.key for entry in found] == keys
    assert [entry.size for entry in found] == [int(key[2:]) % 7 for key in keys]
    if kind == "gs":
        assert counts["requests"] > 11, counts


@pytest.mark.parametrize("kind", STORES)
def test_a_listing_gives_the_etag_that_the_upload_gave(kind: str) -> None:
    url = STORES[kind]()
    etag = stream(url, "a/b", b"rows" * 1000)
    assert len(etag) == 32
    assert [(e.key, e.size, e.etag) for e in open_objects(url).entries()] == [("a/b", 4000, etag)]


@pytest.mark.parametrize("kind", STORES)
def test_a_large_range_does_not_change_with_the_writers_buffer(kind: str) -> None:
    """Large data is sent without a copy only if nobody can change it."""
    objects = open_objects(STORES[kind]())
    first, second = b"constant" * (1 << 17), bytearray(b"reused!!" * (1 << 17))
    for key, pieces in {"a": [first], "b": [second], "c": [first, second]}.items():
        expected, writer = b"".join(pieces), objects.stream(key)
        for piece in pieces:
            writer.write(memoryview(piece))
        second[:8] = b"changed!"
        writer.close()
        second[:8] = b"reused!!"
        assert bytes(objects.get_range(key, 0, len(expected))) == expected
        again = objects.stream(f"{key}-copied")
        again.write(objects.get_range(key, 0, len(expected)))
        again.close()
        assert objects.get(f"{key}-copied") == expected


def test_uploads_and_tries_are_counted() -> None:
    url, before = servers.new_gcs_store(), COUNTED.snapshot()

    def grown(name: str) -> float:
        return COUNTED[name] - before.get(name, 0)

    stream(url, "a/b", b"rows" * 1000)
    assert (grown("uploaded"), grown("uploading"), grown("retries")) == (4000, 0, 0)
    with servers.failing("gs", 0.6, seed=3):
        for number in range(8):
            stream(url, f"c/{number}", b"rows")
    assert (grown("uploaded"), grown("uploading")) == (4032, 0)
    assert grown("retries") > 0


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with contextlib.closing(Spool(tmp_path)) as made:
        yield made


def test_what_leaves_a_spool_and_arrives_changed_is_noticed(spool: Spool) -> None:
    with servers.faulty_gcs("corrupting") as url:
        writer = open_objects(url, spool).stream("a/b")
        writer.write(b"rows" * 2000)
        with pytest.raises(StoreError, match=f"{url}/a/b: the stored bytes differ from those sent"):
            writer.close()
        writer.abandon()


def test_etags_that_are_no_digests_are_found_out_once(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spile")
    with servers.faulty_gcs("opaque") as url:
        objects = open_objects(url, spool)
        for number in range(3):
            writer = objects.stream(f"a/{number}")
            writer.write(b"rows")
            writer.close()
        assert [objects.get(f"a/{number}") for number in range(3)] == [b"rows"] * 3
    assert caplog.text.count("etags are not MD5 digests") == 1


def test_what_is_forbidden_is_not_tried_again() -> None:
    with servers.faulty_gcs("closed") as url:
        began = time.monotonic()
        with pytest.raises(StoreError, match="check the credentials and their rights"):
            stream(url, "a/b", b"rows")
        with pytest.raises(StoreError, match="check the credentials and their rights"):
            open_objects(url).create("a", b"")
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("scheme", STORES)
def test_a_bucket_that_is_not_there_is_said_to_be_missing(scheme: str) -> None:
    STORES[scheme]()
    objects = open_objects(f"{scheme}://no-such-bucket/x")
    began = time.monotonic()
    for ask in (
        lambda: objects.create("a", b""),
        lambda: objects.replace("a", b""),
        lambda: list(objects.list()),
        lambda: stream("gs://no-such-bucket/x", "a", b"rows"),
    ):
        with pytest.raises(StoreError, match="no such bucket"):
            ask()
    assert time.monotonic() - began < 2


def test_an_address_where_nobody_listens_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PATIENCE_AT_FIRST", 0.5)
    servers.s3_endpoint()
    for name, value in servers.s3_environment(f"http://127.0.0.1:{tiny.free_port()}").items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"creating s3://b/x/a: .*\(tried for \d+ s\)") as caught:
        open_objects("s3://b/x").create("a", b"")
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


def test_a_service_that_was_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that has answered before is retried longer: it may come back."""
    monkeypatch.setattr(bucket, "PATIENCE_AT_FIRST", 0.3)
    url = servers.new_gcs_store()
    objects = open_objects(url)
    objects.create("first", b"")
    failures = threading.Semaphore(6)

    class Failing:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def put(self, *arguments: Any, **options: Any) -> Any:
            if failures.acquire(blocking=False):
                raise OSError("connection reset")
            return self.store.put(*arguments, **options)

    monkeypatch.setattr(objects, "_store", Failing(objects._store))  # type: ignore[attr-defined]
    began = time.monotonic()
    assert objects.create("second", b"")
    assert time.monotonic() - began > 1


def test_a_server_that_ignores_preconditions_is_refused() -> None:
    with (
        servers.faulty_gcs("careless") as url,
        pytest.raises(StoreError, match="ignores preconditions"),
    ):
        check_creates_once(open_objects(url))


@pytest.mark.parametrize("kind", [*STORES, "memory"])
def test_a_server_that_honours_them_is_left_as_it_was(kind: str) -> None:
    objects = open_objects(STORES[kind]() if kind in STORES else "memory://probe")
    check_creates_once(objects)
    assert list(objects.list()) == []


def test_own_credentials_never_mix_with_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"AWS_SESSION_TOKEN": "stale", "AWS_REGION": "eu-west-1",
             **servers.s3_environment("http://127.0.0.1:9")}  # fmt: skip
    own = servers.s3_account("own")
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    for name, value in own.items():
        monkeypatch.setenv(f"SPILE_DEST_{name}", value)
    objects = open_objects(servers.s3_url(), prefix="SPILE_DEST_")
    assert objects.create("a", b"1") and objects.get("a") == b"1"
    assert objects.endpoint == own["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("SPILE_DEST_AWS_ENDPOINT_URL")
    assert open_objects("s3://b", prefix="SPILE_DEST_").endpoint == ""  # (Amazon's own)
    monkeypatch.delenv("SPILE_DEST_AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY is set, but not SPILE_DEST_AWS"):
        open_objects("s3://b", prefix="SPILE_DEST_")


def test_google_credentials_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "one.json")
    monkeypatch.setenv("SPILE_DEST_GOOGLE_APPLICATION_CREDENTIALS", "other.json")
    with pytest.raises(ConfigError, match="GOOGLE_SERVICE_ACCOUNT is set, but not SPILE_DEST_G"):
        open_objects("gs://b", prefix="SPILE_DEST_")
