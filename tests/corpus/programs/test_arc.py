"""ARC as a corpus: grids and augmentations round-trip, prompts are pinned, draws are repeatable."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.core.errors import ConfigError, InputError
from spile.corpus.programs.arc import (
    AUGMENTATIONS,
    PROMPTS,
    Augmentation,
    Grid,
    GridEncoder,
    Pair,
    Questions,
    Settings,
    Task,
    tasks,
)
from spile.corpus.programs.program import Program, checked_document, digest_of

FIXTURES = Path(__file__).parents[2] / "fixtures" / "arc"
TRAINING = str(FIXTURES / "training")
ALL = ",".join(AUGMENTATIONS)
ENCODERS = [
    "+".join(c) for n in (1, 2, 3) for c in itertools.combinations(("spaces", "rows", "shape"), n)
]

COLOR = st.integers(0, 9)
GRIDS = st.tuples(st.integers(1, 30), st.integers(1, 30)).flatmap(
    lambda size: st.tuples(*[st.tuples(*[COLOR] * size[1])] * size[0])
)
SMALL = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda size: st.tuples(*[st.tuples(*[COLOR] * size[1])] * size[0])
)
TASKS = st.builds(
    Task,
    id=st.text(min_size=1, max_size=8),
    train=st.lists(st.builds(Pair, SMALL, SMALL), min_size=1, max_size=5).map(tuple),
    test=st.lists(st.builds(Pair, SMALL, SMALL | st.none()), min_size=1, max_size=2).map(tuple),
)


def augmentations(examples: int) -> st.SearchStrategy[Augmentation]:
    order = st.permutations(range(examples)).map(tuple) | st.just(())
    return st.builds(
        Augmentation, st.integers(0, 3), st.booleans(), st.permutations(range(10)).map(tuple), order
    )


@pytest.mark.parametrize("name", ["plain", *ENCODERS])
def test_what_is_encoded_is_decoded_to_the_same_grid(name: str) -> None:
    encoder = GridEncoder.parse(name)

    @given(GRIDS)
    @settings(max_examples=12, deadline=None)
    def check(grid: Grid) -> None:
        assert encoder.decode(encoder.encode(grid)) == grid

    check()


def test_encoders_write_what_they_say() -> None:
    grid = ((0, 1, 2), (3, 4, 5))
    texts = {name: GridEncoder.parse(name).encode(grid) for name in ["plain", *ENCODERS]}
    assert texts == {
        "plain": "012\n345",
        "spaces": "0 1 2\n3 4 5",
        "rows": "1 012\n2 345",
        "shape": "2x3\n012\n345",
        "spaces+rows": "1 0 1 2\n2 3 4 5",
        "spaces+shape": "2x3\n0 1 2\n3 4 5",
        "rows+shape": "2x3\n1 012\n2 345",
        "spaces+rows+shape": "2x3\n1 0 1 2\n2 3 4 5",
    }
    assert GridEncoder.parse("shape+rows+plain") == GridEncoder.parse("rows + shape")


@pytest.mark.parametrize("name", ["plain", *ENCODERS])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_changed_text_is_refused_or_decodes_to_what_encodes_to_it(
    name: str, data: st.DataObject
) -> None:
    encoder = GridEncoder.parse(name)
    text = encoder.encode(data.draw(SMALL))
    place = data.draw(st.integers(0, len(text)))
    changed = text[:place] + data.draw(st.text("0 1\nx2٣", max_size=2)) + text[place + 1 :]
    try:
        assert encoder.encode(encoder.decode(changed)) == changed
    except InputError as error:
        assert "\n" not in str(error)


def test_a_text_that_is_no_grid_is_refused() -> None:
    for name, text in (("plain", ""), ("plain", "01\n2"), ("plain", "0a"), ("rows", "2 01"),
                       ("shape", "2x2\n01"), ("spaces", "01"), ("plain", "01\n")):  # fmt: skip
        with pytest.raises(InputError):
            GridEncoder.parse(name).decode(text)


@given(TASKS.flatmap(lambda task: st.tuples(st.just(task), augmentations(len(task.train)))))
@settings(max_examples=40, deadline=None)
def test_an_augmentation_is_undone_by_its_inverse(both: tuple[Task, Augmentation]) -> None:
    task, change = both
    changed = change.apply(task)
    assert change.inverse().apply(changed) == task
    assert change.apply(change.inverse().apply(task)) == task
    assert change.inverse().inverse() == change
    for pair, other in zip(task.test, changed.test, strict=True):
        assert change.inverse().apply_grid(other.input) == pair.input
    assert Augmentation.from_json(json.loads(json.dumps(vars(change)))) == change


def test_turns_go_clockwise_and_come_before_the_flip() -> None:
    grid = ((1, 2, 3), (4, 5, 6))
    assert Augmentation(turns=1).apply_grid(grid) == ((4, 1), (5, 2), (6, 3))
    assert Augmentation(turns=2).apply_grid(grid) == ((6, 5, 4), (3, 2, 1))
    assert Augmentation(turns=3).apply_grid(grid) == ((3, 6), (2, 5), (1, 4))
    assert Augmentation(flip=True).apply_grid(grid) == ((3, 2, 1), (6, 5, 4))
    assert Augmentation(turns=1, flip=True).apply_grid(grid) == ((1, 4), (2, 5), (3, 6))
    colors = (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
    assert Augmentation(colors=colors).apply_grid(grid) == ((8, 7, 6), (5, 4, 3))
    eight = {Augmentation(t, f).apply_grid(grid) for t in range(4) for f in (False, True)}
    assert len(eight) == 8


@pytest.mark.parametrize(
    "parts",
    [{"turns": 4}, {"turns": -1}, {"colors": (0,) * 10}, {"colors": (1, 0)}, {"order": (1,)}],
)
def test_what_is_no_augmentation_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="augmentation: "):
        Augmentation(**parts)


def drawn(kinds: str, prediction: int, *, seed: int = 0, zero: bool = False) -> Augmentation:
    document = tasks(TRAINING, predictions=400, augment=kinds, seed=seed, keep_zero=zero)
    return Augmentation.from_json(document[prediction]["augmentation"])


def test_only_what_is_asked_for_is_drawn_and_all_of_it_comes() -> None:
    made = tasks(TRAINING, predictions=200, augment=ALL)
    found = [Augmentation.from_json(made[i]["augmentation"]) for i in range(1, 200)]
    assert {each.turns for each in found} == {0, 1, 2, 3}
    assert min(Counter(each.turns for each in found).values()) > 25
    assert {each.flip for each in found} == {False, True}
    assert len({each.colors for each in found}) == len(found)
    assert {each.order for each in found} == {(0, 1), (1, 0)}
    for first in range(10):
        assert any(each.colors[first] == first for each in found)
    for kind, field in zip(AUGMENTATIONS, ("turns", "flip", "colors", "order"), strict=True):
        for prediction in range(1, 20):
            change = drawn(kind, prediction)
            assert getattr(change, field) == getattr(found[prediction - 1], field)
            rest = {name: value for name, value in vars(change).items() if name != field}
            assert rest == {
                name: value for name, value in vars(Augmentation()).items() if name in rest
            }


def test_zero_can_stay_what_it_is() -> None:
    kept = [drawn("colors", i, zero=True).colors for i in range(1, 40)]
    assert all(colors[0] == 0 for colors in kept)
    assert len(set(kept)) == len(kept)


def test_the_first_prediction_is_plain_unless_told_otherwise() -> None:
    assert drawn(ALL, 0) == Augmentation()
    made = tasks(TRAINING, augment=ALL, plain_first=False)
    assert Augmentation.from_json(made[0]["augmentation"]) != Augmentation()


def test_a_draw_does_not_depend_on_what_else_is_asked_for(tmp_path: Path) -> None:
    whole = tasks(TRAINING, predictions=5, augment=ALL, seed=7)
    path = tmp_path / "5a1e0b27.json"
    path.write_bytes((FIXTURES / "training" / path.name).read_bytes())
    part = tasks(str(path), predictions=3, augment=ALL, seed=7)
    named = {
        (d["task_id"], d["test"], d["prediction"]): d for d in map(whole.__getitem__, range(20))
    }
    assert len(named) == 20
    for number in range(3):
        assert part[number] == named["5a1e0b27", 0, number]
    other = tasks(str(path), predictions=3, augment=ALL, seed=8)
    assert other[1] != part[1]


def test_draws_are_pinned() -> None:
    """Existing datasets were made with these."""
    first = Augmentation(turns=3, colors=(6, 3, 5, 2, 1, 9, 4, 0, 7, 8), order=(0, 1))
    assert drawn(ALL, 1) == first
    third = tasks(TRAINING, predictions=9, augment=ALL, seed=5, keep_zero=True)[29]
    assert Augmentation.from_json(third["augmentation"]) == Augmentation(
        turns=1, colors=(0, 2, 1, 3, 7, 4, 5, 6, 8, 9), order=(1, 0)
    )


def test_both_test_inputs_of_a_task_have_the_same_augmentation() -> None:
    made = tasks(TRAINING, predictions=2, augment=ALL)
    documents = [made[i] for i in range(len(made))]
    assert [(d["task_id"], d["test"], d["prediction"]) for d in documents] == [
        ("0c9d4f31", 0, 0), ("0c9d4f31", 0, 1), ("0c9d4f31", 1, 0), ("0c9d4f31", 1, 1),
        ("5a1e0b27", 0, 0), ("5a1e0b27", 0, 1), ("e3b7720a", 0, 0), ("e3b7720a", 0, 1),
    ]  # fmt: skip
    assert documents[1]["augmentation"] == documents[3]["augmentation"]
    assert documents[1]["segments"] != documents[3]["segments"]
    with pytest.raises(IndexError):
        made[len(made)]
    with pytest.raises(IndexError):
        made[-1]


def made_of(**given: Any) -> dict[str, Any]:
    """The document of one small task."""
    train = (Pair(((0, 9),), ((9, 0),)), Pair(((5,), (6,)), ((6,), (5,))))
    task = Task("t", train, (Pair(((3, 1),), ((1, 3),)),))
    return Questions([task], Settings(**given))[0]


PLAIN = """\
Input:
1 09
Output:
1 90

Input:
1 5
2 6
Output:
1 6
2 5

Input:
1 31
Output:
"""
CHAT = """\
Input 1:
09
Output 1:
90

Input 2:
5
6
Output 2:
6
5

Input 3:
31
Output 3:"""
SYSTEM = (
    "The grids below hold digits from 0 to 9, each standing for a colour. One rule turns every "
    "input into its output. Find it, and answer with the output of the last input alone, written "
    "as the others are."
)


def test_the_plain_prompt_is_pinned() -> None:
    """Pinned documents: a change to one of them needs another `_VERSION`."""
    assert made_of(encoder="rows")["segments"] == [["user", PLAIN]]
    answered = made_of(encoder="rows", answers=True)["segments"]
    assert answered == [["user", PLAIN], ["assistant", "1 13"]]


def test_the_chat_prompt_is_pinned() -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": CHAT}]
    assert made_of(prompt="chat")["messages"] == messages
    answer = {"role": "assistant", "content": "13"}
    assert made_of(prompt="chat", answers=True)["messages"] == [*messages, answer]


def test_the_prompt_of_turns_is_pinned() -> None:
    messages = made_of(prompt="turns", encoder="shape", answers=True)["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "1x2\n09"), ("assistant", "1x2\n90"), ("user", "2x1\n5\n6"),
        ("assistant", "2x1\n6\n5"), ("user", "1x2\n31"), ("assistant", "1x2\n13"),
    ]  # fmt: skip
    assert made_of(prompt="turns")["messages"][-1] == {"role": "user", "content": "31"}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_documents_that_carry_what_they_were_made_of(prompt: str) -> None:
    made = tasks(TRAINING, prompt=prompt, predictions=3, augment=ALL, answers=True)
    for number in range(len(made)):
        document = checked_document("here", made[number])
        assert set(document.metadata) == {"task_id", "test", "prediction", "augmentation"}
        roles = [role for role, _ in document.segments] or [m["role"] for m in document.messages]
        assert roles[-1] == "assistant"
        assert all(one != other for one, other in itertools.pairwise(roles))
        if document.segments:
            assert document.text is not None and document.text.endswith(document.segments[-1][1])
            GridEncoder().decode(document.segments[-1][1])


def test_the_answer_of_an_augmented_question_leads_back_to_the_tasks_own() -> None:
    """A model's answer is decoded, and the augmentation undone."""
    made = tasks(TRAINING, predictions=6, augment=ALL, encoder="spaces+shape", answers=True)
    encoder = GridEncoder.parse("spaces+shape")
    answers: dict[tuple[str, int], set[Grid]] = {}
    for number in range(len(made)):
        document = made[number]
        grid = encoder.decode(document["segments"][-1][1])
        own = Augmentation.from_json(document["augmentation"]).inverse().apply_grid(grid)
        answers.setdefault((document["task_id"], document["test"]), set()).add(own)
    assert answers[("0c9d4f31", 1)] == {((2, 8), (1, 1))}
    assert all(len(each) == 1 for each in answers.values())


def test_unknown_answers_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "made_challenges.json"
    path.write_bytes((FIXTURES / path.name).read_bytes())
    assert len(tasks(str(path))) == 4
    with pytest.raises(InputError, match=r"task '0c9d4f31', test 1: its output is not known") as e:
        tasks(str(path), answers=True)
    assert "_solutions.json" in str(e.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"encoder": "columns"}, "encoder knows plain, spaces, rows, shape; got 'columns'"),
        ({"encoder": "rows,shape"}, "got 'rows,shape'"),
        ({"augment": "rotate+flip"}, "augment knows rotate, flip, colors, order"),
        ({"augment": ["rotate"]}, "augment must be of type str"),
        ({"prompt": "poem"}, "prompt must be one of plain, chat, turns; got 'poem'"),
        ({"predictions": 0}, "predictions must be at least 1"),
        ({"predictions": 2}, 'makes equal documents; add augment="rotate,flip,colors,order"'),
        ({"predictions": 1.5}, "predictions must be of type int, got 1.5"),
        ({"predictions": True}, "predictions must be of type int"),
        ({"answers": 1}, "answers must be of type bool"),
        ({"seed": "x"}, "seed must be of type int"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tasks(TRAINING, **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_identity_is_that_of_tasks_and_settings_in_any_layout() -> None:
    def identity(name: str, **given: Any) -> tuple[str, ...]:
        arguments = {"path": str(FIXTURES / name), **given}
        return Program("spile.data.arc", "tasks", arguments).open().identity()

    base = identity("training", encoder="rows+shape", augment="flip,rotate")
    assert base == (
        "answers false", 'augment ["rotate","flip"]',
        'encoder {"rows":true,"shape":true,"spaces":false}', "keep_zero false", "plain_first true",
        "predictions 1", 'program "spile.data.arc:tasks"', 'prompt "plain"', "seed 0",
        'tasks "aeff00ce28401fbb8a86677112d187f6"', "version 1",
    ), "stores that exist know their corpus by this"  # fmt: skip
    for layout in ("made_challenges.json", "tasks.jsonl"):
        assert identity(layout, encoder="shape+rows", augment="rotate, flip") == base
    others = [
        identity("training", encoder="rows", augment="flip,rotate"),
        identity("training/e3b7720a.json", encoder="rows+shape", augment="flip,rotate"),
        identity("training", encoder="rows+shape", augment="flip,rotate", seed=1),
        identity("training", encoder="rows+shape", augment="flip,rotate", keep_zero=True),
        identity("training", encoder="rows+shape", augment="flip,rotate", predictions=2),
    ]
    assert len({base, *others}) == 6
    assert not any(str(FIXTURES) in part for part in base)


def test_another_process_makes_the_same_documents_of_the_corpus_name() -> None:
    name = f"arc:{TRAINING}(encoder='rows+shape', prompt='chat', predictions=4, augment='{ALL}')"
    source = Program.parse(name).open()
    assert source.length == 16
    here = digest_of(source.documents(0))
    code = (
        "import sys\nfrom spile.corpus.programs.program import digest_of\n"
        "from spile.corpus.programs.program import Program\n"
        "source = Program.parse(sys.argv[1]).open()\n"
        "print(digest_of(source.documents(0)), len(list(source.spans(2000))))\n"
        "assert 'jax' not in sys.modules\n"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, name],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        digest, ranges = done.stdout.split()
        assert digest == here
        assert int(ranges) == len(list(source.spans(2000))) > 3
