"""Requests are repeated until answered; wrong addresses and closed doors are told at once."""

import asyncio
import time
from typing import Any

import pytest

from spile.core.errors import ConfigError, StoreError
from spile.rollouts import client
from spile.rollouts.client import Engines, GivenUpError, Refusal
from spile.rollouts.exchange import UnusableAnswer
from support.engine_server import serving

BODY = {"prompt": [1, 2], "seed": 0, "max_tokens": 4}


def asked(url: str, parse: Any = bytes, *, most: int = 1 << 20, **options: Any) -> Any:
    async def ask() -> Any:
        async with Engines([url], **options) as engines:
            return await engines.ask("POST", "/completions", BODY, parse, most=most)

    return asyncio.run(ask())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "127.0.0.1:8000", "http://a:b@c"])
def test_addresses_that_cannot_be_a_servers_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        Engines([url])


def test_an_address_without_a_server_is_given_up_soon() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(StoreError, match="is the server running"):
        asked(url, patience_at_first=0.3)


def test_a_request_that_always_fails_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.1)

    def unusable(data: bytes) -> None:
        raise UnusableAnswer("it is odd")

    with serving() as server, pytest.raises(GivenUpError, match=r"it is odd \(8 times\)"):
        asked(server.url, unusable)
    assert server.asked.total() == 8


def test_what_a_server_refuses_is_an_answer() -> None:
    with serving() as server:
        server.refused = {"prompt", "1"}
        assert asked(server.url) == Refusal("400: the prompt is too long")


def test_an_endless_answer_is_read_up_to_a_limit() -> None:
    with serving("vllm", ("endless",)) as server:
        assert b"choices" in asked(server.url, most=1 << 18)
    assert server.asked.total() == 2


def test_equal_servers_share_requests_and_stand_in_for_each_other() -> None:
    async def ask(urls: list[str]) -> None:
        async with Engines(urls) as engines:
            for _ in range(6):
                await engines.ask("POST", "/v1/completions", BODY, bytes, most=1 << 20)

    with serving() as one, serving() as two:
        asyncio.run(ask([one.url, two.url + "/v1/"]))
        assert (one.asked.total(), two.asked.total()) == (3, 3)
        one.down = True
        asyncio.run(ask([one.url, two.url]))
        assert two.asked.total() == 9


def test_the_model_is_the_first_that_is_listed_or_the_named_one() -> None:
    async def model(url: str, wanted: str | None) -> tuple[str, str]:
        async with Engines([url]) as engines:
            return await engines.model(wanted)

    with serving("sglang") as server:
        assert asyncio.run(model(server.url, None)) == ("tiny", "sglang")
        with pytest.raises(ConfigError, match="--served-model other: the server has tiny"):
            asyncio.run(model(server.url, "other"))


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    with serving("vllm", ("429",)) as server:
        server.retry_after = "1"
        began = time.monotonic()
        assert b"choices" in asked(server.url)
        assert time.monotonic() - began >= 1.0
    assert server.asked.total() == 2
