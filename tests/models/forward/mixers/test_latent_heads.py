"""Heads of latent attention, against their definition in plain numpy."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.config.arch import Arch, Latent
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs
from spile.models.forward.mixers.latent_heads import latent_heads, rotate_last
from support import tiny

HEADS, OWN, ROPE, VALUE, RANK = 4, 6, 4, 5, 7
ANGLES = np.random.default_rng(1).uniform(0, 6, (2, 3, 1, ROPE // 2))


def arch_of(query_rank: int | None) -> Arch:
    _, arch = read_config(tiny.CONFIG, "test")
    latent = Latent(RANK, query_rank, ROPE, VALUE, norm_eps=0.1)
    return replace(
        arch, num_heads=HEADS, num_kv_heads=HEADS, head_dim=OWN + ROPE, latent=latent, qkv_bias=True
    )


def given(arch: Arch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    block = {spec.name: rng.standard_normal(spec.shape) for spec in block_specs(arch)}
    return rng.standard_normal((2, 3, arch.width)), block


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight


def run(arch: Arch, x: np.ndarray, block: dict[str, np.ndarray], **changed: Any) -> Any:
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in block.items()}

    def at(site: str, values: Any) -> Any:
        return values * changed.get(site, 1.0)

    return latent_heads(jnp.asarray(x, jnp.float32), arrays, arch, at)


@pytest.mark.parametrize("query_rank", [None, 8])
def test_heads_are_projected_from_their_latents(query_rank: int | None) -> None:
    arch = arch_of(query_rank)
    x, block = given(arch)
    latent = normed(x @ block["wka"].T + block["bka"], block["kv_latent_norm"])
    shared = x @ block["wkr"].T + block["bkr"]
    if query_rank:
        asking = normed(x @ block["wqa"].T + block["bqa"], block["q_latent_norm"])
        queries = asking @ block["wqb"].T
    else:
        queries = x @ block["wq"].T
    found = run(arch, x, block)
    np.testing.assert_allclose(found["kv_latent"], latent, rtol=1e-4, atol=1e-4)
    for head in range(HEADS):
        own = slice(OWN * head, OWN * (head + 1))
        keys = np.concatenate([latent @ block["wk"][own].T, shared], axis=-1)
        values = latent @ block["wv"][VALUE * head : VALUE * (head + 1)].T
        width = OWN + ROPE
        wanted = {"q": queries[..., width * head : width * (head + 1)], "k": keys, "v": values}
        for site, value in wanted.items():
            np.testing.assert_allclose(found[site][:, :, head], value, rtol=1e-4, atol=1e-3)


def test_a_latent_that_is_changed_changes_what_is_projected_from_it_alone() -> None:
    arch = arch_of(8)
    x, block = given(arch)
    plain, without = run(arch, x, block), run(arch, x, block, kv_latent=0.0)
    assert not without["v"].any() and not without["k"][..., :OWN].any()
    np.testing.assert_array_equal(without["k"][..., OWN:], plain["k"][..., OWN:])
    np.testing.assert_array_equal(without["q"], plain["q"])


@pytest.mark.parametrize("way", ["neighbours", "regrouped", "halves"])
def test_the_last_dimensions_turn(way: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, HEADS, OWN + ROPE))
    last = x[..., OWN:]
    halves = way == "halves"
    first, second = np.split(last, 2, -1) if halves else (last[..., ::2], last[..., 1::2])
    turned = (first + 1j * second) * np.exp(1j * ANGLES)
    pair = (turned.real, turned.imag)
    if way == "neighbours":
        wanted = np.stack(pair, axis=-1).reshape(last.shape)
    else:
        wanted = np.concatenate(pair, axis=-1)
    cos, sin = (jnp.asarray(f(ANGLES), jnp.float32) for f in (np.cos, np.sin))
    found = rotate_last(
        jnp.asarray(x, jnp.float32), cos, sin,
        interleaved=way == "neighbours", regrouped=way == "regrouped",
    )  # fmt: skip
    np.testing.assert_allclose(found[..., OWN:], wanted, atol=1e-5)
    np.testing.assert_array_equal(found[..., :OWN], x[..., :OWN].astype(np.float32))
