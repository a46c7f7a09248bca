"""Dollars for stored bytes and for requests."""

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.dataset.format import TapInfo
from spile.plan.prices import PRICES, UNIT_REQUESTS, Requests, price_of, requests_of


def test_public_prices_are_those_of_the_scheme() -> None:
    assert price_of("s3://bucket/x") == PRICES["s3"]
    assert price_of("gs://bucket") == PRICES["gs"]
    assert price_of("/disk") is None
    assert price_of("/disk", "1,2,3") is None


def test_given_prices_replace_the_public_ones() -> None:
    price = price_of("s3://bucket/x", "0.015,0.0045,0.00036")
    assert price is not None
    assert price.monthly(1 << 40) == pytest.approx(0.015 * 1024)
    assert price.requests(Requests(1000, 2000, 5000)) == pytest.approx(3 * 0.0045 + 5 * 0.00036)


@pytest.mark.parametrize("given", ["", "1", "1,2", "1,2,x", "1,-2,3", "1,2,nan", "1,2,3,4"])
def test_what_is_no_price_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--prices must be"):
        price_of("s3://bucket", given)


def test_every_tap_of_a_unit_has_as_many_objects_as_its_rows_need() -> None:
    taps = {"a": TapInfo((4,), "float32"), "b": TapInfo((1,), "float32")}  # 16 and 4 bytes a row
    asked = requests_of(np.array([10, 11, 0]), taps, 160)
    shards = (1 + 2 + 0) + (1 + 1 + 0)
    assert asked.creates == shards + 3 * UNIT_REQUESTS.creates
    assert (asked.lists, asked.reads) == (3 * UNIT_REQUESTS.lists, 3 * UNIT_REQUESTS.reads)
