"""`spile serve` refuses bad flags before it opens anything."""

import argparse
from typing import Any

import pytest

from spile import cli
from spile.cli.look import serve
from spile.core.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    return cli.make_parser().parse_args(["serve", "nowhere", *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--read", "much"), "--read must be a size such as 16GiB, got 'much'"),
        (("--port", "65536"), "--port must be from 0 to 65535, got 65536"),
        (("--port", "-1"), "--port must be from 0 to 65535, got -1"),
        (("--token", "short"), "--token must be 16 letters"),
        (("--token", "sixteen letters!"), "--token must be 16 letters"),
    ],
)
def test_a_bad_flag_is_refused_by_name(words: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        serve(parsed(*words))
