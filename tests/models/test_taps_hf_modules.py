"""Paths of HF modules as taps: each accepted path stands for that module's output."""

from typing import Any

import numpy as np
import pytest
import torch

from spile.check.reference import Reference
from spile.core.errors import ConfigError
from spile.models.config.hf_config import read_config
from spile.models.sites import SITES
from spile.models.taps import parse_taps
from support.families import FAMILIES, randomised

IDS = np.random.default_rng(0).integers(0, 256, 24)
KINDS = ("llama-gqa", "gemma2-gqa", "gpt2", "neox", "olmo2-gqa", "qwen3moe-gqa")


def paths(model: Any) -> list[str]:
    """Paths of the table that the model has, in its first and its last block."""
    last = model.config.get_text_config().num_hidden_layers - 1
    stems = ("model.layers", "transformer.h", "gpt_neox.layers")
    modules = {name for name, _ in model.named_modules()}
    blocks = [
        f"{stem}.{layer}{module}"
        for stem in stems
        for layer in (0, last)
        for module in listed(layered=True)
    ]
    return [path for path in (*listed(layered=False), *blocks) if path in modules]


def listed(*, layered: bool) -> list[str]:
    """The modules in the table: ends of paths in a block, or whole paths."""
    return [path for site in SITES.values() if site.layered is layered for path in site.modules]


def outputs(model: Any, names: list[str]) -> dict[str, np.ndarray]:
    """Return the outputs of the modules for the tokens."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, given: Any, made: Any) -> None:
            made = made[0] if isinstance(made, tuple) else made
            found[name] = made.detach().reshape(len(IDS), -1).numpy()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        model(torch.tensor(IDS)[None])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_module_that_is_accepted_gives_the_values_of_the_tap(name: str) -> None:
    model = randomised(FAMILIES[name])
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    _, arch = read_config(config, name)
    truth = Reference(model).taps(IDS, None)
    given = outputs(model, paths(model))
    assert any(path.endswith(".0") for path in given)
    for path, values in given.items():
        try:
            (tap,) = parse_taps(path, arch)
        except ConfigError as error:
            site = str(error).rpartition(" ")[2]
            (tap,) = parse_taps(site, arch)
            wanted = truth[tap.name].reshape(len(IDS), -1)
            assert not np.allclose(values, wanted, rtol=1e-3, atol=1e-4), "it need not be refused"
            continue
        wanted = truth[tap.name].reshape(len(IDS), -1)
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5, err_msg=path)
