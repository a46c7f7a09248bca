"""The table of families: rows are complete, consistent, and short enough to write by hand."""

import ast
import dataclasses
import json
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import spile.models.config.families
from spile.models.config.arch import Arch, Experts
from spile.models.config.families import FAMILIES, REFUSED
from spile.models.config.family import Family
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs, outer_specs
from spile.models.files.checkpoint import Checkpoint
from support import families
from support.marks import some

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
MODELS = Path(spile.models.config.families.__file__).parents[1]
VARIANTS = [name for name in families.FAMILIES if name not in families.REFUSED]
ROWS = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@cache
def variant(name: str) -> tuple[Family, Arch]:
    """Read the config of a tiny model."""
    with torch.device("meta"):
        model = families.FAMILIES[name]()
    config = json.loads(model.config.to_json_string(use_diff=False))
    return read_config({**config, "architectures": [type(model).__name__]}, name)


@cache
def published() -> dict[str, tuple[Family, Arch]]:
    return {
        path.stem: read_config(json.loads(path.read_text()), path.name)
        for path in CONFIGS.glob("*.json")
    }


def assert_every_array_has_its_tensors(family: Family, arch: Arch) -> None:
    blocks = {spec.name: spec for spec in block_specs(arch)}
    outer = {spec.name: spec for spec in outer_specs(arch)}
    heads = {"head", "head_bias"}
    assert set(blocks) | set(outer) - heads <= set(family.weights)
    assert not set(blocks) & set(outer)
    for name, spec in {**blocks, **outer}.items():
        if name in heads:
            continue
        source = family.weights[name]
        assert ("{layer}" in source.name) is (name in blocks)
        assert not source.one_by_one or spec.axes[0] in ("experts", "heads", "kv_heads")
        assert not source.parts or name in source.parts
        for part in source.parts:  # whoever is fused with it is there too
            assert family.weights[part] == source
            assert part in blocks
    # Each tensor's name stands for one array, but for those that are fused in it.
    for layer in (0, arch.num_layers - 1):
        checkpoint = Checkpoint(Path(), family, arch, {}, (), family.prefixes[0])
        holders: dict[str, set[str]] = {}
        for spec in block_specs(arch, arch.layers[layer]):
            for tensor in checkpoint.names(spec, layer):
                holders.setdefault(tensor, set()).add(spec.name)
        assert all(
            held == set(checkpoint.source(next(iter(held))).parts or held)
            and (len(held) == 1 or checkpoint.source(next(iter(held))).parts)
            for held in holders.values()
        )


@pytest.mark.parametrize("name", some(VARIANTS, *families.one_of_each(VARIANTS)))
def test_every_array_of_every_variant_has_its_tensors(name: str) -> None:
    assert_every_array_has_its_tensors(*variant(name))


def test_every_array_of_every_published_model_has_its_tensors() -> None:
    for family, arch in published().values():
        assert_every_array_has_its_tensors(family, arch)


def test_every_family_has_a_published_config_and_a_computed_variant() -> None:
    names = {family.name for family in FAMILIES}
    assert {family.name for family, _ in published().values()} == names
    computed = {variant(name)[0].name for name in VARIANTS}
    # made by functions of their own
    assert names - computed == {
        "gemma3-multimodal",
        "gemma4-multimodal",
        "mistral3",
        "mistral3-ministral3",
        "muse_glimmer",
        "gemma4-experts-multimodal",
        "llama4-multimodal",
        "qwen3_5-multimodal",
        "qwen3_5_moe-multimodal",
    }


def test_names_are_not_given_twice() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    rows: dict[str, list[Family]] = {}
    for family in FAMILIES:
        for name in family.architectures:
            rows.setdefault(name, []).append(family)
    # If a class has several rows, all but the last have a condition.
    assert all(family.when for several in rows.values() for family in several[:-1])
    assert not [several for several in rows.values() if len(several) == 1 and several[0].when]


@ROWS
def test_a_row_speaks_of_fields_and_keys_that_exist_and_of_each_key_once(family: Family) -> None:
    fields = {field.name for field in dataclasses.fields(Arch)}
    assert set(family.fixed) <= fields
    assert set(family.biases) <= fields
    assert not set(family.fixed) & (set(family.biases) | set(family.amounts))
    assert set(family.amounts) | set(family.switched) <= fields
    assert set(family.experts) <= {field.name for field in dataclasses.fields(Experts)}
    spelled = {
        name
        for usual, own in family.keys.items()
        for name in ((own,) if isinstance(own, str) else own)
    }
    read = spelled | {key for key in family.reads if key not in family.keys}
    read |= set(family.biases.values()) | set(family.amounts.values())
    read |= {key for key, _ in family.switched.values()}
    assert not read & set(family.ignored), "read or ignored, not both"
    assert not read & set(family.harmless), "read or required, not both"
    assert not set(family.ignored) & set(family.harmless)
    assert family.windows in (
        "never", "always", "upper", "lower", "pattern", "listed", "unrotated", "but_fourth"
    )  # fmt: skip
    if family.windows != "never":
        assert "sliding_window" in family.reads
    assert all(isinstance(values, tuple) and values for values in family.harmless.values())


@ROWS
def test_no_tensor_that_is_needed_is_listed_as_unused(family: Family) -> None:
    arch = next(arch for row, arch in published().values() if row == family)
    for prefix in family.prefixes:
        needed = Checkpoint(Path(), family, arch, {}, (), prefix).shapes()
        unused = [stem + name for name in family.unused_weights for stem in (prefix, "")]
        assert not [n for n in needed if any(fnmatchcase(n, pattern) for pattern in unused)]


@pytest.mark.parametrize(
    "file",
    [
        *(f"forward/{name}" for name in ("decoder", "moe", "attention", "ops", "weights")),
        *(f"config/{name}" for name in ("specs", "rope")),
    ],
)
def test_nothing_is_computed_by_the_name_of_a_family(file: str) -> None:
    """Switches describe models: code for one family alone would be a second decoder."""
    text = (MODELS / f"{file}.py").read_text()
    tree = ast.parse(text)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not {name for name in used if "famil" in name.lower()}
    names = {family.name for family in FAMILIES}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not strings & names
    if file in ("decoder", "moe", "attention", "ops"):
        assert "family" not in text


ROW_FILES = sorted((MODELS / "config/rows").glob("*.py"))


def row_lengths() -> dict[str, int]:
    """Count the lines of each row that is written out."""
    found: dict[str, int] = {}
    for node in (node for file in ROW_FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Family":
            given: dict[str | None, Any] = {word.arg: word.value for word in node.keywords}
            found[given["name"].value] = (node.end_lineno or 0) - node.lineno + 1
    return found


def test_adding_a_family_takes_at_most_sixty_lines_of_data() -> None:
    lengths = row_lengths()
    assert set(lengths) == {family.name for family in FAMILIES}
    assert 10 <= lengths["starcoder2"] <= 60, "the example of docs/models.md"
    assert max(lengths.values()) <= 60, lengths


def test_the_table_is_data() -> None:
    """Rows have no functions, branches or loops but comprehensions, and their type no methods."""
    kinds = (ast.FunctionDef, ast.Lambda, ast.If, ast.IfExp, ast.For, ast.While, ast.ClassDef)
    assert len(ROW_FILES) > 5
    for file in (*ROW_FILES, MODELS / "config/families.py"):
        tree = ast.parse(file.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, kinds)], file.name
    tree = ast.parse((MODELS / "config/family.py").read_text())
    [family] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert all(isinstance(node, ast.AnnAssign | ast.Expr) for node in family.body), family.name


def test_the_page_of_models_names_every_class_that_is_read_or_refused() -> None:
    page = (MODELS.parents[2] / "docs/models.md").read_text()
    read, refused = page.split("Refused by name, with the reason:")
    refused = refused.partition("\n\n## ")[0].partition("\nTests compare")[0]
    every = {name for family in FAMILIES for name in family.architectures}
    assert set(re.findall(r"`(\w+(?:ForCausalLM|Generation|LMHeadModel))`", read)) == every
    assert set(re.findall(r"`(\w+For\w+|\w+Model)`", refused)) == set(REFUSED)
