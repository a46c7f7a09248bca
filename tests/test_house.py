"""The tree keeps its rules: unique names, mirrored tests, jax in its folders, one version."""

import ast
import collections
import functools
import re
from pathlib import Path

import yaml

import spile

SOURCES = Path(__file__).parents[1] / "src" / "spile"
TESTS = Path(__file__).parent
MODULES = sorted(path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))
JAX = ("models/forward/", "run/", "compile/", "lens/", "interop/jax_loader.py")

# Modules that another file tests, because their behaviour shows only together with others.
EXEMPT = {
    "check/hf_arithmetic.py": "check/test_reference.py",
    "check/hf_gradients.py": "models/forward/test_gradient.py",
    "check/hf_hooks.py": "check/test_reference.py",
    "check/hf_modules.py": "check/test_reference.py",
    "check/latent_rows.py": "check/test_compare_sparse.py",
    "check/lens_rows.py": "e2e/test_lens_top.py",
    "check/load.py": "check/test_compare.py",
    "check/sampled.py": "e2e/test_pool.py",
    "corpus/chats/rows.py": "e2e/test_chats.py",
    "corpus/files.py": "corpus/test_units.py",
    "corpus/formats/byte_files.py": "corpus/formats/test_text.py",
    "corpus/formats/program.py": "corpus/formats/test_contract.py",
    "corpus/formats/tables.py": "corpus/formats/test_contract.py",
    "corpus/rollout_columns.py": "rollouts/test_store.py",
    "dataset/read/choice.py": "dataset/read/test_dataset.py",
    "dataset/read/document.py": "dataset/read/test_dataset.py",
    "dataset/read/opening.py": "dataset/read/test_dataset.py",
    "dataset/read/reduced.py": "e2e/test_reduce.py",
    "dataset/read/tap_groups.py": "dataset/read/test_dataset.py",
    "dataset/read/window.py": "dataset/read/test_batches.py",
    "features/parts.py": "features/test_run.py",
    "features/source.py": "features/test_run.py",
    "fleet/ray/driver.py": "chaos/test_ray.py",
    "run/model_baselines.py": "run/test_model_gradients.py",
    "models/config/family.py": "models/config/test_families.py",
    "models/config/hf_layers.py": "models/config/test_hf_config.py",
    "models/forward/kernels/chunks.py": "models/forward/kernels/test_state_space.py",
    "models/forward/kernels/chunks_tpu.py": "models/forward/kernels/test_state_space_tpu.py",
    "models/forward/kernels/wide_attention.py": "models/forward/kernels/test_attention.py",
    **{
        f"models/config/rows/{name}.py": "models/config/test_families.py"
        for name in (
            "delta_nets",
            "gemma",
            "gpt_like",
            "latent_attention",
            "llama_like",
            "mixtures",
            "state_spaces",
        )
    },
    **{
        f"models/files/encoders/{name}.py": "models/files/encoders/test_layouts.py"
        for name in (
            "circuit_tracer",
            "crosscoders",
            "dictionary_learning",
            "llama_scope",
            "openmoss",
            "qwen_scope",
            "sparsify",
        )
    },
    "models/files/encoders/settings.py": "models/files/encoders/test_saelens.py",
    "models/forward/ends.py": "models/forward/test_decoder.py",
    "models/forward/forward_pass.py": "models/forward/test_decoder.py",
    "models/forward/lens.py": "e2e/test_lens_top.py",
    "models/forward/mixers/short_convolution.py": "models/forward/mixers/test_state_space.py",
    "models/forward/sharding.py": "mesh/test_sharding.py",
    "models/forward/weight_loader.py": "models/forward/test_weights.py",
    "objects/hub/datasets_library.py": "corpus/formats/test_datasets_library.py",
    "objects/memory.py": "contracts/test_objects.py",
    "objects/rooted.py": "contracts/test_objects.py",
    "plan/lenses.py": "e2e/test_lens_top.py",
    "plan/cutting.py": "plan/test_resolve.py",
    "plan/fetch.py": "e2e/test_hub.py",
    "models/objectives.py": "e2e/test_gradients.py",
    "plan/answers.py": "e2e/test_gradients.py",
    "run/step/backward.py": "e2e/test_gradients.py",
    "plan/objectives.py": "e2e/test_gradients.py",
    "run/step/devices.py": "mesh/test_step.py",
    "run/step/output.py": "run/step/test_step.py",
    "run/step/settings.py": "run/step/test_resident.py",
}


@functools.cache
def tree(module: Path) -> ast.Module:
    return ast.parse((SOURCES / module).read_text())


def defined(node: ast.stmt) -> list[str]:
    """The public classes and type aliases (`Name = ...`, in the case of a class) of a statement."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.isupper()]


def test_no_two_public_classes_or_aliases_share_a_name() -> None:
    homes = collections.defaultdict[str, list[str]](list)
    for module in MODULES:
        for name in (name for node in tree(module).body for name in defined(node)):
            if name[0].isupper():
                homes[name].append(str(module))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert twice == {}


def mirrored(module: Path) -> bool:
    """Return whether tests/a/b/test_c.py, or test_c_SUBJECT.py beside it, exists for a/b/c.py."""
    name = f"test_{module.stem.lstrip('_')}"
    folder = TESTS / module.parent
    return (folder / f"{name}.py").exists() or any(folder.glob(f"{name}_*.py"))


def test_every_module_has_its_test_file_or_a_reason() -> None:
    modules = [module for module in MODULES if module.stem not in ("__init__", "__main__")]
    missing = {str(module) for module in modules if not mirrored(module)}
    assert missing - EXEMPT.keys() == set(), "write its tests, or say here where they are"
    assert EXEMPT.keys() - missing == set(), "these have tests of their own, or are gone"
    assert [path for path in EXEMPT.values() if not (TESTS / path).exists()] == []


def test_jax_is_imported_in_its_folders_alone() -> None:
    found = set()
    for module in MODULES:
        if str(module).startswith(JAX):
            continue
        for node in ast.walk(tree(module)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {f"{module}: {name}" for name in names if name.partition(".")[0] == "jax"}
    assert found == set()


def test_types_are_strict_but_where_a_library_leaves_them_unknown() -> None:
    """A file may turn off the rules about unknown types, and no other rule."""
    for module in MODULES:
        for line in re.findall(r"^# pyright: (.*)", (SOURCES / module).read_text(), re.MULTILINE):
            rules = [word.removesuffix("=false") for word in line.split(", ")]
            assert all(re.match("reportUnknown|reportMissingTypeStubs", r) for r in rules), module


def test_loggers_are_named_by_their_folder() -> None:
    """So that one area can be silenced; the progress line has a logger of its own."""
    for module in MODULES:
        text = (SOURCES / module).read_text()
        for area in re.findall(r'getLogger\("spile([^"]*)"\)', text):
            assert area in (f".{module.parts[0]}", ".progress"), module


def test_every_module_says_what_it_holds() -> None:
    silent = [m for m in MODULES if m.stem != "__init__" and not ast.get_docstring(tree(m))]
    assert silent == []


def test_names_of_tests_stay_under_70_characters() -> None:
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    assert len(names) > 3000
    assert [name for name in names if len(name) >= 70] == []


def test_the_citation_is_complete_and_of_this_version() -> None:
    cited = yaml.safe_load((TESTS.parent / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # that CFF 1.2.0 asks for
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(author.get("name") or author.get("family-names") for author in cited["authors"])
    assert str(cited["version"]) == spile.__version__


def test_the_changelog_has_this_version_below_what_is_unreleased() -> None:
    text = (TESTS.parent / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == spile.__version__ and all(date for _, date in headings[1:])
