"""A run into a bucket that refuses one request: no unit is lost, and errors are reported."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import spile
from chaos.harness import run
from spile.dataset.maintain.verify import verify
from spile.objects import open_objects
from support import servers


@pytest.fixture
def proxy() -> Iterator[str]:
    with servers.failing("s3", 0.0, 0) as address:
        yield address


def extracted(model: Path, corpus: Path, out: str) -> tuple[object, ...]:
    return ("extract", "--model", model, "--corpus", corpus, "--taps", "resid_post:0",
            "--unit-tokens", "300", "--out", out, "--quiet")  # fmt: skip


def said(code: str) -> str:
    return f"<Error><Code>{code}</Code></Error>"


def test_a_conflict_at_a_units_record_loses_no_unit(model: Path, corpus: Path, proxy: str) -> None:
    out = servers.new_s3_store()
    conflict = "409 Conflict", said("ConditionalRequestConflict"), False
    servers.plan(proxy, ("PUT", "done/000000/00000001", *conflict), ("PUT", "manifest", *conflict))
    result = run(*extracted(model, corpus, out))
    assert result.code == 0, result.err
    assert servers.planned(proxy) == []
    assert verify(open_objects(out)).ok
    assert spile.open(out).num_tokens > 300


def test_credentials_that_expire_end_the_run_and_the_same_command_goes_on(
    model: Path, corpus: Path, proxy: str
) -> None:
    out = servers.new_s3_store()
    expired = "400 Bad Request", said("ExpiredToken"), False
    servers.plan(proxy, ("PUT", "done/000000/00000001", *expired))
    result = run(*extracted(model, corpus, out))
    assert result.code == 3
    assert "check the credentials" in result.err
    assert run(*extracted(model, corpus, out)).code == 0
    assert verify(open_objects(out)).ok
