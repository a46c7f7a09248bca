"""ARC tasks from files: every layout gives the same tasks; other files give a one-line error."""

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import InputError
from spile.corpus.programs.arc import Pair, Task, read_tasks
from support.marks import examples
from support.remote import upload

FIXTURES = Path(__file__).parents[2] / "fixtures" / "arc"
LAYOUTS = ("training", "made_challenges.json", "tasks.jsonl")
GRID = [[1, 2], [3, 4]]
TASK = {"train": [{"input": GRID, "output": GRID}], "test": [{"input": GRID}]}


def test_a_task_is_read_as_it_stands() -> None:
    tasks = read_tasks(str(FIXTURES / "training"))
    assert [task.id for task in tasks] == ["0c9d4f31", "5a1e0b27", "e3b7720a"]
    assert tasks[0] == Task(
        id="0c9d4f31",
        train=(Pair(((1, 1), (2, 0)), ((2, 2), (1, 0))), Pair(((0, 2, 1),), ((0, 1, 2),))),
        test=(
            Pair(((2,), (1,), (0,)), ((1,), (2,), (0,))),
            Pair(((1, 8), (2, 2)), ((2, 8), (1, 1))),
        ),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_tasks_wherever_they_lie(layout: str) -> None:
    tasks = read_tasks(str(FIXTURES / "training"))
    assert read_tasks(str(FIXTURES / layout)) == tasks
    where = f"memory://arc-{layout}"
    root = upload(FIXTURES, where)
    assert read_tasks(f"{root}/{layout}") == tasks


def test_one_file_of_one_task_is_named_by_it() -> None:
    (task,) = read_tasks(str(FIXTURES / "training" / "e3b7720a.json"))
    assert task == read_tasks(str(FIXTURES / "training"))[2]


def test_without_solutions_outputs_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "made_challenges.json"
    path.write_bytes((FIXTURES / path.name).read_bytes())
    tasks = read_tasks(str(path))
    known = read_tasks(str(FIXTURES / path.name))
    assert [task.train for task in tasks] == [task.train for task in known]
    assert all(pair.output is None for task in tasks for pair in task.test)
    solutions = json.loads((FIXTURES / "made_solutions.json").read_bytes())
    del solutions["5a1e0b27"]
    (tmp_path / "made_solutions.json").write_text(json.dumps(solutions))
    assert read_tasks(str(path))[0::2] == known[0::2]
    assert read_tasks(str(path))[1] == tasks[1]


def test_empty_lines_a_byte_order_mark_and_both_id_names_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({**TASK, "task_id": "b"}), "", json.dumps({**TASK, "id": "a", "other": 1})]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert [task.id for task in read_tasks(str(path))] == ["a", "b"]


def test_other_files_of_a_folder_are_left_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.json").write_text(json.dumps(TASK))
    (tmp_path / "README.md").write_text("words\n")
    with caplog.at_level(logging.WARNING, "spile"):
        assert [task.id for task in read_tasks(str(tmp_path))] == ["a"]
    assert "1 files skipped that are not .json" in caplog.text


def with_grid(grid: Any, part: str = "train", key: str = "output") -> dict[str, Any]:
    pair = {"input": GRID, "output": GRID, key: grid}
    return {"train": [{"input": GRID, "output": GRID}, pair], "test": [pair]} | (
        {"test": TASK["test"]} if part == "train" else {"train": TASK["train"]}
    )


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (with_grid([[1, 2], [3]]), "train 2, output, row 2: has 1 cells, the first row has 2"),
        (with_grid([[1], [10]]), "train 2, output, row 2: 10 is not a colour"),
        (with_grid([[-1]], key="input"), "train 2, input, row 1: -1 is not a colour"),
        (with_grid([[True]]), "True is not a colour"),
        (with_grid([[1.0]]), "1.0 is not a colour"),
        (with_grid([["1"]]), "'1' is not a colour"),
        (with_grid([[None]]), "None is not a colour"),
        (with_grid([]), "a grid is a list of 1 to 30 rows"),
        (with_grid([[]]), "a row is a list of 1 to 30 cells"),
        (with_grid([[1]] * 31), "a grid is a list of 1 to 30 rows"),
        (with_grid([[1] * 31]), "a row is a list of 1 to 30 cells"),
        (with_grid([1, 2]), "row 1: a row is a list"),
        (with_grid([[1], 2]), "row 2: a row is a list"),
        (with_grid("12"), "a grid is a list"),
        (with_grid(None), "train 2, output: a grid is a list"),
        (with_grid([[11]], "test", "input"), "test 1, input, row 1: 11"),
        (with_grid([[11]], "test", "output"), "test 1, output, row 1: 11"),
        ({"train": [5], "test": [5]}, "train 1, input: a grid is a list"),
        ({"train": [], "test": TASK["test"]}, "needs lists train and test"),
        ({"train": TASK["train"], "test": []}, "needs lists train and test"),
    ],
)
def test_a_bad_grid_is_refused_by_its_place(task: Any, said: str, tmp_path: Path) -> None:
    folder, lines, many = tmp_path / "f", tmp_path / "a.jsonl", tmp_path / "many.json"
    folder.mkdir()
    (folder / "abc.json").write_text(json.dumps(task))
    lines.write_text(json.dumps({"id": "abc", **task}))
    many.write_text(json.dumps({"abc": task}))
    for path, name in ((folder, "abc.json"), (lines, "a.jsonl line 1"), (many, "many.json")):
        with pytest.raises(InputError) as caught:
            read_tasks(str(path))
        message = str(caught.value)
        assert said in message
        assert f"{name}: task 'abc'" in message
        assert "\n" not in message


def jsonl(*tasks: Any) -> bytes:
    return b"".join(json.dumps(task).encode() + b"\n" for task in tasks)


def test_a_line_without_an_id_is_named_after_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + jsonl(TASK, {**TASK, "task_id": "x"}, TASK))
    assert [task.id for task in read_tasks(str(path))] == ["task_00000001", "task_00000003", "x"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b"", "holds no task"),
        ("a.jsonl", jsonl({**TASK, "id": "x"}) + b"{oops\n", "line 2: not valid JSON"),
        ("a.jsonl", jsonl({**TASK, "id": 5}), "line 1: its id (id or task_id) is not a text"),
        ("a.jsonl", jsonl({**TASK, "task_id": ""}), "line 1: its id (id or task_id) is not a text"),
        ("a.jsonl", jsonl([1]), "line 1: task 'task_00000000': needs lists train and test"),
        ("a.jsonl", jsonl({**TASK, "id": "x"}, {**TASK, "id": "x"}), "line 2: a second task 'x'"),
        ("a.jsonl", jsonl({"id": "x\n\x1b"}), r"task 'x\n\x1b': needs lists"),
        ("a.json", b"{}", "holds no task"),
        ("a.json", b"[]", "not a JSON object of tasks"),
        ("a.json", b"", "not valid JSON"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b'{"x": {"train": ' + b"1" * 5000 + b"}}", "not valid JSON"),
        ("a.json", b"\xff\xfe{}", "not valid JSON"),
        ("a.json", b'{"x": 5}', "task 'x': needs lists train and test"),
        ("a.json", b'{"x": {}, "y": {}, "x": {}}', "key 'x' comes twice"),
        ("a.txt", b"words", "not valid JSON"),
    ],
)
def test_a_hostile_file_is_one_line(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_tasks(str(path))
    message = str(caught.value)
    assert said in message
    assert str(path) in message
    assert "\n" not in message
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("solutions", "said"),
    [
        ([], "not a JSON object of solutions"),
        ({"x": 5}, "task 'x': needs a list of 1 solutions"),
        ({"x": [GRID, GRID]}, "task 'x': needs a list of 1 solutions"),
        ({"x": [[[77]]]}, "task 'x', test 1, output, row 1: 77 is not a colour"),
    ],
)
def test_solutions_that_do_not_fit_are_refused(solutions: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "a_challenges.json").write_text(json.dumps({"x": TASK}))
    (tmp_path / "a_solutions.json").write_text(json.dumps(solutions))
    with pytest.raises(InputError) as caught:
        read_tasks(str(tmp_path / "a_challenges.json"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 10) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["train", "test", "input", "output", "id"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from(["a.jsonl", "a.json", "a_challenges.json"]))
@examples(150)
def test_whatever_json_holds_is_read_or_one_line(value: Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(json.dumps(value))
        (Path(folder) / "a_solutions.json").write_text(json.dumps(value))
        try:
            assert read_tasks(str(path))
        except InputError as error:
            assert "\n" not in str(error)


def _many_in_a_folder(folder: Path) -> None:
    (folder / "a_challenges.json").write_text(json.dumps({"x": TASK}))


def _one_id_twice(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x.json").write_text(json.dumps(TASK))


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (_many_in_a_folder, "a_challenges.json: not a task (train and test); to read a file"),
        (_one_id_twice, "b/x.json: a second task 'x'"),
        (lambda folder: (folder / "a.txt").write_text("x"), "holds no task"),
        (lambda folder: folder.rmdir(), "no such file or folder"),
    ],
)
def test_a_folder_that_is_none_of_tasks_is_refused(
    fill: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fill(folder)
    with pytest.raises(InputError) as caught:
        read_tasks(str(folder))
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
