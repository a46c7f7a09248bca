"""Spans of documents: of roles, and of labels."""

import numpy as np
import pytest

from spile.core.index import ROLES
from spile.core.pool import Pool
from spile.corpus.documents import CorpusDocument, Documents
from spile.corpus.tokenize import TextTokenizer
from spile.plan.pooling import spans_of
from support import tiny

USER, ASSISTANT, TEMPLATE = ROLES["user"], ROLES["assistant"], ROLES["template"]
FLAGS = [
    np.array([TEMPLATE, USER, USER, ASSISTANT], np.uint16),
    np.array([USER, TEMPLATE, ASSISTANT, 0], np.uint16),
    np.array([ASSISTANT, ASSISTANT, USER, 0], np.uint16),
]
TOKENS = [np.arange(4, dtype=np.int32)] * 3
DOCUMENTS = [
    CorpusDocument("a", columns={"label": "x", "year": 1}),
    CorpusDocument("b", columns={"label": None, "year": 2}),
    CorpusDocument("c", columns={"label": "x", "year": 2}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(directory)
    return TextTokenizer(directory, "tokenizer")


def spans(tokenizer: TextTokenizer, pool: Pool | None) -> list[list[int]]:
    given = Documents(DOCUMENTS, ("label", "year"))
    return [each.tolist() for each in spans_of(pool, tokenizer, given, TOKENS, FLAGS)]


def test_documents_need_no_spans(tokenizer: TextTokenizer) -> None:
    assert spans(tokenizer, None) == spans(tokenizer, Pool("mean")) == []


def test_a_roles_tokens_are_one_span_of_each_document(tokenizer: TextTokenizer) -> None:
    assert spans(tokenizer, Pool("max", "user")) == [
        [-1, 0, 0, -1],
        [0, -1, -1, -1],
        [-1, -1, 0, -1],
    ]


def test_labels_are_numbered_through_the_unit(tokenizer: TextTokenizer) -> None:
    assert spans(tokenizer, Pool("mean", labels=())) == [[0] * 4] * 3
    assert spans(tokenizer, Pool("mean", labels=("label",))) == [[0] * 4, [-1] * 4, [0] * 4]
    assert spans(tokenizer, Pool("mean", labels=("label", "year"))) == [[0] * 4, [-1] * 4, [1] * 4]


def test_a_speaker_is_a_label_beside_columns(tokenizer: TextTokenizer) -> None:
    assert spans(tokenizer, Pool("mean", labels=("role",))) == [
        [-1, 0, 0, 1], [0, -1, 1, -1], [1, 1, 0, -1],
    ]  # fmt: skip
    assert spans(tokenizer, Pool("mean", labels=("year", "role"))) == [
        [-1, 0, 0, 1], [2, -1, 3, -1], [3, 3, 2, -1],
    ]  # fmt: skip
