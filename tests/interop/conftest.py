"""A small dataset with names, several layers, heads, integers and a single number."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spile.dataset.format import TapInfo
from spile.interop.export import Exported, export, export_source
from support import stored


def taps(dtype: str) -> stored.Taps:
    return {
        "resid_post.0": TapInfo((6,), dtype, ("hidden_states[1]", "blocks.0.hook_resid_post")),
        "resid_post.1": TapInfo((6,), dtype, ("blocks.1.hook_resid_post", "blocks.1.hook_out")),
        "resid_post.2": TapInfo((6,), dtype, ("blocks.2.hook_resid_post",)),
        "q.1": TapInfo((2, 3), dtype, ("blocks.1.attn.hook_q",)),
        "expert_ids.1": TapInfo((2,), "int16", ("blocks.1.mlp.hook_expert_indices",)),
        "logprob": TapInfo((), "float32"),
    }


@pytest.fixture(scope="session", params=["bfloat16", "float16", "float32", "int8"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    """A dataset of 111 rows: thirteen contexts of eight rows, and seven more rows."""
    return stored.build(tmp_path_factory.mktemp("out") / "out", taps=taps(request.param))


@pytest.fixture(scope="session")
def floats(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    return stored.build(tmp_path_factory.mktemp("out") / "out", taps=taps("float32"))


@pytest.fixture
def exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, Exported]]:
    """Export in windows of a few rows."""

    def run(made: stored.Stored, to: str, **options: object) -> tuple[Path, Exported]:
        monkeypatch.setattr(export_source, "WINDOW_BYTES", 400)
        dest = tmp_path / to
        return dest, export(str(made.path), dest, to=to, **options)  # type: ignore[arg-type]

    return run
