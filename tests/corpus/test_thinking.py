"""Thinking and answers, told apart by the tokens that mark them."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from spile.core.index import ANSWER, ROLES, THINKING
from spile.corpus.thinking import MARKS, thinking_flags
from spile.corpus.tokenize import TextTokenizer
from support import tiny

USER, SAID, TEMPLATE = ROLES["user"], ROLES["assistant"], ROLES["template"]
ROLE_OF = {"u": USER, "a": SAID, "t": TEMPLATE}
KIND = {THINKING: "T", ANSWER: "A", 0: "."}


def kinds(text: str, roles: str, marks: object = (((ord("<"),), (ord(">"),)),)) -> str:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    said = np.array([ROLE_OF[role] for role in roles], np.uint16)
    return "".join(KIND[int(flag)] for flag in thinking_flags(ids, said, marks))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "roles", "wanted"),
    [
        ("q<so>yes", "uaaaaaaa", ".TTTTAAA"),
        ("q<so>yes", "utaaaaaa", "..TTTAAA"),  # the prompt began the thinking
        ("q<>yes", "uttaaa", "...AAA"),  # the template has emptied it
        ("q<endless", "uaaaaaaaa", ".TTTTTTTT"),
        ("<q>yes", "uuuaaa", "...AAA"),  # what a user writes marks nothing
        ("<q so>yes", "uuuaaaaaa", "...AAAAAA"),
        ("q<soqyes", "uaaauaaa", ".TTT.AAA"),  # another turn ends it
        ("q<a>b<c>d", "uaaaaaaaa", ".TTTATTTA"),
        ("yes", "aaa", "AAA"),
        ("q", "u", "."),
    ],
)
def test_what_lies_between_the_marks_is_thinking(text: str, roles: str, wanted: str) -> None:
    assert kinds(text, roles) == wanted


def test_marks_of_several_tokens_are_found_whole() -> None:
    marks = ((tuple(b"[x]"), tuple(b"[/]")),)
    assert kinds("[y][x]a[/]b", "aaaaaaaaaaa", marks) == "AAATTTTTTTA"
    assert kinds("q", "a", marks) == "A"
    assert kinds("<a>", "aaa", ()) == "AAA"


def test_marks_count_only_if_the_tokenizer_has_them(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    assert TextTokenizer(model, "none").thinking == []
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens(["<|channel|>", "<|message|>", "<|end|>", "[THINK]"])
    tokenizer.save(str(model / "tokenizer.json"))
    (think, channel) = TextTokenizer(model, "none").thinking
    names = tokenizer.get_vocab()
    assert think == ([names["<think>"]], [names["</think>"]])
    assert channel[1] == [names["<|end|>"]] and len(channel[0]) == 2 + len("analysis")
    assert json.loads((model / "tokenizer_config.json").read_text()) and len(MARKS) == 5
