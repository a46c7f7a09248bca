"""The verb `rollouts` says what is missing."""

from chaos.harness import run


def test_the_place_and_the_server_must_be_given() -> None:
    for words, missing in (
        ((), "--out is missing"),
        (("--out", "x"), "--server is missing"),
        (("--out", "x", "--server", "http://x", "--per-prompt", "two"), "--per-prompt must be"),
    ):
        result = run("rollouts", *words)
        assert result.code == 2 and missing in result.err
