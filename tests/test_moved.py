"""Module paths that documentation once showed stay importable for one release."""

import importlib
import subprocess
import sys

import pytest

import spile
from spile._moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_module_path_gives_the_module_and_one_line(old: str) -> None:
    if old == "spile.interop.torch":
        pytest.importorskip("torch")
    for name in MOVED:
        sys.modules.pop(name, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    names = [name for name in vars(new) if not name.startswith("_")]
    assert all(getattr(module, name) is getattr(new, name) for name in names)


def test_a_script_that_uses_an_old_path_runs_and_sees_one_line() -> None:
    code = "from spile.store.latents import top_rows; print(top_rows.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "top_rows\n"
    assert ran.stderr.count("is now spile.dataset.read.latents") == 1


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("spile.engine")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("spile.interop.torch_loader", "Loader", "TorchLoader"),
        ("spile.interop.torch_loader", "as_iterable", "torch_dataset"),
        ("spile.interop.trainers", "Rows", "TorchRows"),
    ],
)
def test_an_old_name_gives_the_new_one_and_one_line(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"{old} is now spile.{new}"):
        assert getattr(home, old) is getattr(spile, new)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = home.nothing
