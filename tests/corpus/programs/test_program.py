"""Programs as corpora: names are parsed without running code, and documents read twice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import ConfigError, DataError, InputError
from spile.core.units import Span
from spile.corpus.programs.program import Program, ProgramDocument, ProgramSource, is_program
from support.marks import examples

COUNTING = """
class ByNumber:
    def __init__(self, documents):
        self.documents = documents
    def __len__(self):
        return len(self.documents)
    def __getitem__(self, number):
        return self.documents[number]

def made(count):
    for i in range(count):
        yield {"text": f"{i} " + "word " * (i % 7), "n": i}

def create_dataset(count=10):
    return made(count)

def by_number(count=10):
    return ByNumber(list(made(count)))
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """The file of a program."""

    def written(source: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(source)
        return path

    return written


def opened(name: str | Path, **columns: Any) -> ProgramSource:
    assert is_program(str(name))
    return Program.parse(str(name)).open(**columns)


def numbers(documents: list[ProgramDocument]) -> list[int]:
    return [document.metadata["n"] for document in documents]


@pytest.mark.parametrize(
    ("name", "where", "function", "arguments"),
    [
        ("a.b.c:f", "a.b.c", "f", {}),
        ("a:f()", "a", "f", {}),
        ("a:f(x=1, y='two', z=[3.5, (None, True)])", "a", "f",
         {"x": 1, "y": "two", "z": [3.5, [None, True]]}),
        ("a:f(\n  x={'k': -1},\n)", "a", "f", {"x": {"k": -1}}),
        ("/d/p.py", "/d/p.py", "create_dataset", {}),
        ("/d/p.py:g", "/d/p.py", "g", {}),
        ("/d/p.py(x='a.py:f(1)')", "/d/p.py", "create_dataset", {"x": "a.py:f(1)"}),
        ("/d.py/a (b).py:g(x=')')", "/d.py/a (b).py", "g", {"x": ")"}),
        ("arc:/d/tasks", "spile.data.arc", "tasks", {"path": "/d/tasks"}),
        ("arc:gs://b/t.jsonl(seed=3)", "spile.data.arc", "tasks",
         {"path": "gs://b/t.jsonl", "seed": 3}),
    ],
)  # fmt: skip
def test_a_name_is_read(name: str, where: str, function: str, arguments: dict[str, Any]) -> None:
    assert is_program(name)
    program = Program.parse(name)
    assert (program.where, program.function, program.arguments) == (where, function, arguments)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=9)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(
    st.sampled_from(["a.b", "/some where/it's.py", "/d.py/x (y).py"]),
    st.dictionaries(st.sampled_from(["a", "where", "call", "é"]), LITERALS),
)
@examples(150)
def test_what_a_program_says_it_is_called_is_read_as_the_same(
    where: str, arguments: dict[str, Any]
) -> None:
    program = Program(where, "f", arguments)
    assert is_program(str(program))
    assert Program.parse(str(program)) == program


PIECES = ["a.b:f", "p.py", ":g", "(", ")", "x=", "'", "1", ",", "[", "arc:", "\n", "\\", "é", "\0"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12).map("".join))
@examples(300)
def test_any_name_is_read_or_refused_in_one_line(name: str) -> None:
    if is_program(name):
        try:
            program = Program.parse(name)
        except (ConfigError, InputError) as error:
            assert "\n" not in str(error)
        else:
            assert Program.parse(str(program)) == program


def test_paths_in_a_name_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["p.py:f(x='stays')", "arc:tasks"]
    full = [str(Program.parse(name)) for name in names]
    assert full == [
        f"{tmp_path}/p.py:f(x='stays')",
        f"spile.data.arc:tasks(path='{tmp_path}/tasks')",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "demo", "docs.jsonl", "a/b:c", "HuggingFaceFW/fineweb-edu:sample-10BT:train", "a.b",
        "x.pyc", "gs://bucket/p.py", "https://host/p.py:f", "hf://datasets/a/b", "dir/*.txt",
        "a:b:c", "1a:f", "a-b:f", "p.py:f:g", "p.py:f(", "arc:", "./a.b:c",
    ],
)  # fmt: skip
def test_other_names_are_no_programs(name: str) -> None:
    assert not is_program(name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("1", "given by name"),
        ("'x', a=1", "given by name"),
        ("*[1]", "given by name"),
        (")(a=1", "given by name"),
        (") or g(", "given by name"),
        ("**{'a': 1}", "unpacked"),
        ("a=1, a=2", "twice"),
        ("a=b", "a is not a literal"),
        ("a=f'{1}'", "a is not a literal"),
        ("a=[x for x in y]", "a is not a literal"),
        ("a=__import__('os')", "a is not a literal"),
        ("a={1: 2}", "keys that are not texts"),
        ("a={1, 2}", "holds set"),
        ("a=1e999", "holds float"),
        ("a=1j", "holds complex"),
        ("a=9999999999999999999", "2**63"),
        ("a=", "invalid syntax"),
        ("a='\n'", "unterminated string"),
        ("a='\0'", "null byte"),
        ("a=" + "[" * 150 + "]" * 150, "nested"),
        ("a=" + "-" * 5000 + "1", ""),
        ("a=" + "1" * 5000, ""),
        ("a='" + "x" * 10_000 + "'", "10000 characters"),
    ],
)
def test_arguments_that_are_no_literals_are_refused_in_one_line(arguments: str, said: str) -> None:
    name = f"a.b:f({arguments})"
    assert is_program(name)
    with pytest.raises((ConfigError, InputError)) as caught:
        Program.parse(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_nothing_is_run_before_a_program_is_opened(write: Callable[..., Path]) -> None:
    path = write("import pathlib\npathlib.Path(__file__ + '.ran').touch()\n" + COUNTING)
    ran = Path(f"{path}.ran")
    with pytest.raises(ConfigError):
        Program.parse(f"{path}:f(a=open({str(ran)!r}, 'w'))")
    program = Program.parse(str(path))
    assert not ran.exists()
    program.open()
    assert ran.exists()


def test_a_file_gives_its_documents(write: Callable[..., Path]) -> None:
    path = write(COUNTING)
    for name, length in ((path, None), (f"{path}:by_number", 10)):
        source = opened(name)
        assert source.length == length
        found = list(source.documents(0))
        assert numbers(found) == list(range(10))
        assert found[3].text == "3 word word word "
    assert numbers(list(opened(f"{path}:create_dataset(count=3)").documents(0))) == [0, 1, 2]


def test_a_module_gives_its_documents(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(COUNTING, "spile_test_module.py")
    monkeypatch.syspath_prepend(path.parent)
    source = opened("spile_test_module:by_number(count=4)")
    assert numbers(list(source.documents(1))) == [1, 2, 3]
    sys.modules.pop("spile_test_module")


def test_a_class_can_be_called_as_well_and_arguments_have_any_name(
    write: Callable[..., Path],
) -> None:
    path = write(
        "import dataclasses\n@dataclasses.dataclass\nclass Texts:\n    where: str\n    call: str\n"
        "    def __iter__(self):\n        return iter([self.where, self.call])\n"
    )
    source = opened(f"{path}:Texts(where='one', call='two')")
    assert [document.text for document in source.documents(0)] == ["one", "two"]


@pytest.mark.parametrize(
    ("source", "call", "said"),
    [
        ("x = 1\n", "", "has no function 'create_dataset'"),
        ("create_dataset = 5\n", "", "has no function"),
        (COUNTING, ":absent", "has no function 'absent'"),
        (COUNTING, "(number=3)", "unexpected keyword argument 'number'; its arguments: count"),
        ("def create_dataset(path): ...\n", "", "missing a required argument: 'path'"),
        ("def create_dataset(:\n", "", "SyntaxError"),
        ("1 / 0\n", "", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(0)\n", "", "SystemExit: 0"),
        ("import spile_no_such_thing\n", "", "No module named 'spile_no_such_thing'"),
        ("def create_dataset(): raise OSError('two\\nlines')\n", "", "OSError: two"),
        ("def create_dataset(): return 5\n", "", "returned int; it must return documents"),
        ("def create_dataset(): pass\n", "", "returned NoneType"),
        ("def create_dataset(): return 'abc'\n", "", "returned str"),
        ("def create_dataset(): return {'a': 1}\n", "", "returned dict"),
        ("\0", "", "null bytes"),
    ],
)
def test_a_program_that_cannot_be_opened_is_one_line(
    source: str, call: str, said: str, write: Callable[..., Path]
) -> None:
    path = write(source)
    with pytest.raises((ConfigError, InputError)) as caught:
        opened(f"{path}{call}")
    message = str(caught.value)
    assert said in message
    assert str(path) in message
    assert "\n" not in message


def test_files_and_modules_that_are_not_there_are_named(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"absent\.py: No such file"):
        opened(tmp_path / "absent.py")
    with pytest.raises(InputError, match="no module 'spile_absent'; install it"):
        opened("spile_absent.part:f")
    with pytest.raises(InputError, match=r"no module 'json\.absent'"):
        opened("json.absent:f")
    write("import spile_missing_dependency\n", "spile_needs_it.py")
    write("raise SystemExit(3)\n", "spile_ends.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="cannot be imported: .*'spile_missing_dependency'"):
        opened("spile_needs_it:f")
    with pytest.raises(InputError, match="cannot be imported: SystemExit: 3"):
        opened("spile_ends:f")


def cut_elsewhere(name: str, seed: int) -> list[Span]:
    """The spans into which another process cuts a program."""
    code = (
        "import json, sys, dataclasses\nfrom spile.corpus.programs.program import Program\n"
        "ranges = Program.parse(sys.argv[1]).open().spans(100)\n"
        "print(json.dumps([dataclasses.asdict(r) for r in ranges]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [Span(**each) for each in json.loads(done.stdout)]


def test_other_processes_cut_and_read_the_same(write: Callable[..., Path]) -> None:
    path = write(COUNTING)
    for name in (str(path), f"{path}:by_number"):
        source = opened(name)
        ranges = cut_elsewhere(name, 1)
        assert list(source.spans(100)) == ranges
        assert len(ranges) > 2
        assert numbers(source.read(ranges[1])) == list(range(ranges[1].first, ranges[2].first))


def test_the_order_of_a_set_is_not_the_same_elsewhere_and_is_refused(
    write: Callable[..., Path],
) -> None:
    path = write("def create_dataset():\n    return {f'word {i}' for i in range(50)}\n")
    one, other = (cut_elsewhere(str(path), seed)[0] for seed in (1, 2))
    assert one != other
    with pytest.raises(DataError, match="sort what has no order"):
        opened(path).read(one)  # this process may have the seed of either
        opened(path).read(other)


def test_a_programs_identity_is_its_source_and_arguments_not_its_path(tmp_path: Path) -> None:
    def identity(folder: str, source: str, call: str) -> tuple[str, ...]:
        path = tmp_path / folder / "p.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return opened(f"{path}{call}").identity()

    base = identity("a", COUNTING, "(count=3)")
    assert base == identity("b", COUNTING, ":create_dataset(count=3)")
    others = [
        identity("a", COUNTING, "(count=4)"),
        identity("a", COUNTING, ":by_number(count=3)"),
        identity("a", COUNTING + "\n", "(count=3)"),
    ]
    assert len({base, *others}) == 4
    assert {'program "p.py:create_dataset"', 'arguments {"count":3}'} < set(base)


def test_only_our_own_programs_may_be_run_because_a_store_names_them() -> None:
    assert Program.parse("arc:x").shipped
    assert Program.parse("spile.data.arc:tasks(path='x')").shipped
    for name in (
        "spile.corpus.programs.arc:read_tasks(path='x')",
        "os:system(command='x')",
        "spile/corpus/programs/arc.py:tasks",
    ):
        assert not Program.parse(name).shipped


def test_a_grain_dataset_is_read(write: Callable[..., Path]) -> None:
    pytest.importorskip("grain", reason="grain is not installed")
    path = write(
        "import grain\n"
        "def create_dataset(seed):\n"
        "    texts = [{'text': str(i)} for i in range(20)]\n"
        "    return grain.MapDataset.source(texts).shuffle(seed=seed)\n"
    )
    source = opened(f"{path}(seed=3)")
    (whole,) = source.spans(1 << 20)
    texts = [document.text or "" for document in source.read(whole)]
    assert sorted(texts, key=int) == [str(i) for i in range(20)]
    assert texts != sorted(texts, key=int)
