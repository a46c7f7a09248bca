"""Our arrays inside a checkpoint's tensors: shapes are predicted, and parts are exact."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.models.config.specs import ParamSpec, TensorSource, fused, linears, named, norms

HEAD_DIM = 3


def spec(name: str, *shape: int, experts: bool = False, head_dim: int = HEAD_DIM) -> ParamSpec:
    axes = ("out", "in")[: len(shape) - experts]
    heads = shape[experts] // head_dim
    return ParamSpec(name, shape, ("experts", *axes) if experts else axes, heads)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def take(
    source: TensorSource, tensor: np.ndarray, name: str, specs: Mapping[str, ParamSpec]
) -> np.ndarray:
    return source.take(tensor, specs[name], specs)


def test_a_plain_tensor_is_the_array_itself() -> None:
    one = {"wo": spec("wo", 4, 6)}
    tensor = values(4, 6)
    assert TensorSource("o").shape(one["wo"], one) == (4, 6)
    assert take(TensorSource("o"), tensor, "wo", one) is tensor


def test_a_transposed_tensor_is_turned_and_a_bias_is_not() -> None:
    specs = {"wo": spec("wo", 4, 6), "bo": spec("bo", 4)}
    turned = TensorSource("o", transposed=True)
    tensor, bias = values(6, 4), values(4)
    assert turned.shape(specs["wo"], specs) == (6, 4)
    assert turned.shape(specs["bo"], specs) == (4,)
    np.testing.assert_array_equal(turned.take(tensor, specs["wo"], specs), tensor.T)
    np.testing.assert_array_equal(turned.take(bias, specs["bo"], specs), bias)


def test_each_expert_has_a_tensor_of_its_own() -> None:
    specs = {"w_up": spec("w_up", 5, 4, 6, experts=True), "b_up": spec("b_up", 5, 4, experts=True)}
    source = TensorSource("experts.{expert}.up")
    assert source.one_by_one
    assert not TensorSource("up").one_by_one
    assert source.shape(specs["w_up"], specs) == (4, 6)
    assert source.shape(specs["b_up"], specs) == (4,)
    tensor = values(4, 6)
    np.testing.assert_array_equal(take(source, tensor, "w_up", specs), tensor)


def test_fused_parts_of_one_expert_are_taken_from_its_own_tensor() -> None:
    specs = {n: spec(n, 5, 4, 6, experts=True) for n in ("w_gate", "w_up")}
    source = TensorSource("experts.{expert}.gate_up", ("w_gate", "w_up"), transposed=True)
    gate, up = values(4, 6), values(4, 6, seed=1)
    tensor = np.concatenate([gate, up]).T
    assert source.shape(specs["w_up"], specs) == tensor.shape == (6, 8)
    np.testing.assert_array_equal(take(source, tensor, "w_gate", specs), gate)
    np.testing.assert_array_equal(take(source, tensor, "w_up", specs), up)


def test_parts_of_unequal_size_follow_one_another() -> None:
    """As in Phi-3: many query heads, few heads of keys and values."""
    specs = {"wq": spec("wq", 12, 5), "wk": spec("wk", 3, 5), "wv": spec("wv", 3, 5)}
    parts = {name: values(*each.shape, seed=i) for i, (name, each) in enumerate(specs.items())}
    source = TensorSource("qkv", tuple(specs))
    tensor = np.concatenate(list(parts.values()))
    assert source.shape(specs["wv"], specs) == tensor.shape == (18, 5)
    for name, part in parts.items():
        taken = source.take(tensor, specs[name], specs)
        np.testing.assert_array_equal(taken, part)
        assert np.shares_memory(taken, tensor), "no copy where none is needed"


def test_heads_alternate_as_in_gpt_neox() -> None:
    """Two heads of three: q0 k0 v0 q1 k1 v1."""
    specs = {name: spec(name, 6) for name in ("bq", "bk", "bv")}
    tensor = np.arange(18)
    source = TensorSource("qkv", tuple(specs), "head")
    assert source.shape(specs["bk"], specs) == (18,)
    assert take(source, tensor, "bq", specs).tolist() == [0, 1, 2, 9, 10, 11]
    assert take(source, tensor, "bk", specs).tolist() == [3, 4, 5, 12, 13, 14]
    assert take(source, tensor, "bv", specs).tolist() == [6, 7, 8, 15, 16, 17]


def test_rows_alternate_as_in_gpt_oss() -> None:
    specs = {name: spec(name, 2, 3, experts=True) for name in ("b_gate", "b_up")}
    tensor = np.arange(12).reshape(2, 6)
    source = TensorSource("gate_up", tuple(specs), "row")
    assert source.shape(specs["b_up"], specs) == (2, 6)
    assert take(source, tensor, "b_gate", specs).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert take(source, tensor, "b_up", specs).tolist() == [[1, 3, 5], [7, 9, 11]]


@given(
    by=st.sampled_from(["part", "head", "row"]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    head_dim=st.integers(1, 4),
    inputs=st.integers(0, 4),  # none: a bias
    experts=st.integers(0, 3),  # none: a plain layer
    transposed=st.booleans(),
    apart=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_was_fused_comes_apart_again(
    by: str, counts: list[int], head_dim: int, inputs: int, experts: int, transposed: bool,
    apart: bool, seed: int,
) -> None:  # fmt: skip
    if by == "row":  # of one size
        counts = [counts[0]] * len(counts)
    elif by == "head":  # some may have several heads for each of the first's
        counts = [counts[0], *(counts[0] * count for count in counts[1:])]
    names = [f"w{i}" for i in range(len(counts))]
    inner = (inputs,) if inputs else ()
    lead = (experts,) if experts else ()
    rng = np.random.default_rng(seed)
    specs, parts = dict[str, ParamSpec](), dict[str, np.ndarray]()
    for name, count in zip(names, counts, strict=True):
        shape = (*lead, count * head_dim, *inner)
        specs[name] = spec(name, *shape, experts=bool(experts), head_dim=head_dim)
        parts[name] = rng.standard_normal(shape)

    def fuse(arrays: list[np.ndarray]) -> np.ndarray:
        """Join arrays [out, *inner] into one, by plain loops."""
        groups = {"part": 1, "head": counts[0], "row": len(arrays[0])}[by]
        rows = [
            row
            for group in range(groups)
            for array in arrays
            for row in np.split(array, groups)[group]
        ]
        tensor = np.stack(rows)
        return tensor.T if transposed and inner else tensor

    apart = apart and bool(experts)
    source = TensorSource("x.{expert}" if apart else "x", tuple(names), by, transposed)
    if experts:
        each = [fuse([parts[name][e] for name in names]) for e in range(experts)]
        tensors = each if apart else [np.stack(each)]
    else:
        tensors = [fuse([parts[name] for name in names])]
    for name in names:
        assert {tensor.shape for tensor in tensors} == {source.shape(specs[name], specs)}
        taken = [source.take(tensor, specs[name], specs) for tensor in tensors]
        np.testing.assert_array_equal(np.stack(taken) if apart else taken[0], parts[name])


def test_tables_are_made_of_stems_and_endings() -> None:
    assert named("a.", x="y.weight") == {"x": TensorSource("a.y.weight")}
    assert norms("a.", n="ln") == {
        "n": TensorSource("a.ln.weight"),
        "n_bias": TensorSource("a.ln.bias"),
    }
    assert linears("a.", q="q_proj", _up="up") == {
        "wq": TensorSource("a.q_proj.weight"), "bq": TensorSource("a.q_proj.bias"),
        "w_up": TensorSource("a.up.weight"), "b_up": TensorSource("a.up.bias"),
    }  # fmt: skip
    parts = fused("qkv", "wq", "wk", by="head", transposed=True)
    assert set(parts) == {"wq", "wk"}
    assert set(parts.values()) == {TensorSource("qkv", ("wq", "wk"), "head", True)}


@pytest.mark.parametrize("transposed", [False, True])
def test_taking_reads_a_map_of_a_file_without_loading_it(transposed: bool) -> None:
    specs = {name: spec(name, 4, 6) for name in ("wq", "wk")}
    tensor = values(6, 8) if transposed else values(8, 6)
    source = TensorSource("qk", ("wq", "wk"), transposed=transposed)
    assert np.shares_memory(source.take(tensor, specs["wk"], specs), tensor)
