"""Names of the Hub are pinned to a commit, and a resumed run uses the stored commit."""

import logging
from pathlib import Path

import pytest

from spile.objects.hub.names import continued, pinned
from support.hub_server import Hub, requests, sha


def test_names_are_pinned_to_the_commit_of_today(hub: Hub) -> None:
    hub.publish("models/me/llama", {"config.json": b"{}"})
    model = f"hf://me/llama@{sha(hub, 'models/me/llama')}"
    assert pinned("me/llama", "model") == pinned("me/llama@main", "model") == model
    assert pinned(model, "model") == model
    data = f"hf://datasets/me/texts@{sha(hub)}"
    for name in ("me/texts", "me/texts:default", "me/texts::train", "me/texts@main:default:train"):
        assert pinned(name, "dataset") == f"{data}:default:train"
    assert pinned("hf://datasets/me/texts/data", "dataset") == f"{data}/data"
    for other in ("s3://me/x", "a/b/c", "/me/texts", "./me/texts", "me/texts.jsonl", "x", "m.f:g"):
        assert pinned(other, "dataset") == other


def test_what_is_here_comes_before_what_the_hub_has(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "me" / "texts").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    requests(hub)
    with caplog.at_level(logging.INFO, "spile"):
        assert pinned("me/texts", "dataset") == "me/texts"
    assert "me/texts: reading the local path" in caplog.text
    assert requests(hub) == []


def test_a_name_without_a_commit_goes_on_from_the_stored_one() -> None:
    commit = "a" * 40
    stored = f"hf://datasets/me/texts@{commit}:default:train"
    for same in ("me/texts", "me/texts:default", "me/texts::train", "hf://datasets/me/texts::"):
        assert continued(same, stored, "dataset") == stored
    for other in ("me/texts:x", "me/texts::test", "me/texts@v2", f"me/texts@{'b' * 40}",
                  "you/texts", "hf://datasets/me/texts", "/local", "demo"):  # fmt: skip
        assert continued(other, stored, "dataset") == other
    assert continued("me/m", f"hf://me/m@{commit}", "model") == f"hf://me/m@{commit}"
    assert continued("hf://me/m/sub", f"hf://me/m@{commit}/sub", "model").endswith(f"{commit}/sub")
    assert continued("me/m", "/here", "model") == "me/m"
