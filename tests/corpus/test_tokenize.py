"""Token ids equal those of the model's tokenizer in transformers, under each policy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from spile.core.errors import ConfigError, InputError, StoreError
from spile.core.index import BOS, EOS, ROLES, SPECIAL
from spile.corpus.chats.template import Rendered
from spile.corpus.tokenize import TextTokenizer
from spile.models.files.demo import demo_model
from spile.objects import MemoryObjects
from spile.objects.paths import RemotePath
from support import tiny
from support.marks import examples
from support.texts import token_roles

TEXTS = [
    "The capital of France is",
    " leading and trailing  spaces ",
    "tabs\tand\r\nline\n\n\nends",
    "12345 67.89 1e-5 ①②",
    "naïve café Straße ﬁ Å Å",
    "東京タワー مرحبا שלום नमस्ते",
    "🌳👩‍👩‍👧‍👦🏳️‍🌈",
    "def f(x):\n    return x**2  # comment\n",
    "<s> </s> <|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "a" * 300,
    "\u200b\ufeff\x00\x7f",
    "don't I'LL we've",
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path)
    return tmp_path


def settle(directory: Path, **settings: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def encode(directory: Path, policy: str, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in TextTokenizer(directory, policy).encode(texts)]


@pytest.mark.parametrize("add", [True, False])
def test_ids_are_those_of_transformers_on_a_small_tokenizer(add: bool, directory: Path) -> None:
    reference = AutoTokenizer.from_pretrained(directory)
    wanted = reference(TEXTS, add_special_tokens=add)["input_ids"]
    assert encode(directory, "tokenizer" if add else "none", TEXTS) == wanted
    assert all((ids[0] == tiny.BOS) is (add or ids == wanted[8]) for ids in wanted)


@pytest.mark.full
@pytest.mark.parametrize("add", [True, False])
def test_ids_are_those_of_transformers_on_the_demo_model(add: bool) -> None:
    directory = demo_model()
    reference = AutoTokenizer.from_pretrained(directory)
    wanted = reference(TEXTS, add_special_tokens=add)["input_ids"]
    assert encode(directory, "tokenizer" if add else "none", TEXTS) == wanted


def test_the_demo_model_takes_digits_one_by_one() -> None:
    """SmolLM2 was trained this way; a tokenizer derived from its GGUF alone would join them."""
    directory = demo_model()
    tokens = TextTokenizer(directory, "none").encode(["2024", "2", "0", "4"])
    assert tokens[0].tolist() == np.concatenate([tokens[i] for i in (1, 2, 1, 3)]).tolist()


def test_ids_are_int32_in_the_order_of_the_texts(directory: Path) -> None:
    tokenizer = TextTokenizer(directory, "none")
    many = [f"text {i}" for i in range(200)]
    found = tokenizer.encode(many)
    assert {ids.dtype for ids in found} == {np.dtype(np.int32)}
    alone = [tokenizer.encode([text])[0] for text in many]
    assert all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))
    assert tokenizer.encode([]) == []
    assert tokenizer.count(many) == sum(len(ids) for ids in alone)


def test_each_policy_adds_what_it_says(directory: Path) -> None:
    raw = encode(directory, "none", ["ab", ""])
    assert [len(ids) for ids in raw] == [2, 0]
    assert encode(directory, "tokenizer", ["ab", ""]) == [[tiny.BOS, *ids] for ids in raw]
    assert encode(directory, "bos", ["ab", ""]) == [[tiny.BOS, *ids] for ids in raw]


def test_policy_bos_adds_one_where_the_tokenizer_itself_adds_other_things(directory: Path) -> None:
    path = directory / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["post_processor"]["single"] = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ]
    saved["post_processor"]["special_tokens"] = {
        "</s>": {"id": "</s>", "ids": [tiny.EOS], "tokens": ["</s>"]}
    }
    path.write_text(json.dumps(saved))
    (raw,) = encode(directory, "none", ["ab"])
    assert encode(directory, "tokenizer", ["ab"]) == [[*raw, tiny.EOS]]
    assert encode(directory, "bos", ["ab"]) == [[tiny.BOS, *raw]]


def test_policy_bos_without_a_bos_token_is_refused(directory: Path) -> None:
    settle(directory, bos_token=None)
    with pytest.raises(ConfigError, match="--special-tokens bos"):
        TextTokenizer(directory, "bos")
    assert TextTokenizer(directory, "tokenizer").bos is None


def test_a_saved_length_limit_is_ignored(directory: Path) -> None:
    path = str(directory / "tokenizer.json")
    wanted = encode(directory, "tokenizer", TEXTS)
    saved = Tokenizer.from_file(path)
    saved.enable_truncation(4)
    saved.enable_padding(length=64, pad_id=0, pad_token="!")
    assert len(saved.encode("a long enough text").ids) == 64
    saved.save(path)
    assert encode(directory, "tokenizer", TEXTS) == wanted


@pytest.mark.parametrize(
    ("settings", "config", "bos", "eos"),
    [
        ({}, None, tiny.BOS, tiny.EOS),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, None, tiny.BOS, tiny.EOS),
        ({"bos_token": None, "eos_token": None}, None, None, None),
        ({"bos_token": None, "eos_token": None}, {"bos_token_id": 7, "eos_token_id": 9}, 7, 9),
        ({"eos_token": None}, {"bos_token_id": 7, "eos_token_id": [9, 10]}, tiny.BOS, 9),
        ({"bos_token": "no such token"}, {"bos_token_id": 7}, 7, tiny.EOS),
        ({"bos_token": None}, {"bos_token_id": None, "eos_token_id": []}, None, tiny.EOS),
    ],
)
def test_bos_and_eos_come_from_tokenizer_settings_before_the_config(
    settings: dict[str, Any],
    config: dict[str, Any] | None,
    bos: int | None,
    eos: int | None,
    directory: Path,
) -> None:
    settle(directory, **settings)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer(directory, "none")
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


def test_flags_tell_bos_eos_and_other_special_tokens_apart(directory: Path) -> None:
    path = str(directory / "tokenizer.json")
    saved = Tokenizer.from_file(path)
    saved.add_special_tokens(["<|im_start|>"])
    saved.add_tokens(["plain added"])
    saved.save(path)
    other = saved.token_to_id("<|im_start|>")
    plain = saved.token_to_id("plain added")
    flags = TextTokenizer(directory, "none").flags(
        np.array([0, tiny.BOS, 65, tiny.EOS, other, plain, 255], np.int32)
    )
    assert flags.dtype == np.uint16
    assert flags.tolist() == [0, BOS, 0, EOS, SPECIAL, 0, 0]


def test_every_special_token_that_transformers_knows_is_marked(directory: Path) -> None:
    """Special tokens also include some of the vocabulary that were never added."""
    settle(
        directory,
        pad_token="!",
        unk_token={"content": "?", "lstrip": False},
        additional_special_tokens=["#", {"content": "%", "special": True}, "no such token"],
        extra_special_tokens={"image_token": "&"},
        audio_token="*",
        add_bos_token=True,
    )
    path = directory / "tokenizer.json"
    saved = Tokenizer.from_file(str(path))
    named = {saved.token_to_id(text) for text in "!?#%&*"}
    every = np.arange(tiny.EOS + 1, dtype=np.int32)
    tokenizer = TextTokenizer(directory, "none")
    (marked,) = np.nonzero(tokenizer.flags(every))
    assert {*marked.tolist()} == {*named, tiny.BOS, tiny.EOS}
    assert tokenizer.flags(np.array([tiny.BOS, tiny.EOS])).tolist() == [BOS, EOS]
    settle(directory, additional_special_tokens=["#", "%"], unk_token="?")
    theirs = AutoTokenizer.from_pretrained(directory).all_special_ids
    assert {*theirs} <= {*np.flatnonzero(TextTokenizer(directory, "none").flags(every)).tolist()}


def test_tokens_that_the_tokenizer_puts_around_a_text_are_marked(directory: Path) -> None:
    path = directory / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["post_processor"]["single"].append({"SpecialToken": {"id": "!", "type_id": 0}})
    saved["post_processor"]["special_tokens"]["!"] = {"id": "!", "ids": [0], "tokens": ["!"]}
    path.write_text(json.dumps(saved))
    tokenizer = TextTokenizer(directory, "tokenizer")
    (ids,) = tokenizer.encode(["ab"])
    assert tokenizer.flags(ids).tolist() == [BOS, 0, 0, SPECIAL]


def test_a_token_that_is_both_bos_and_eos_has_both_flags(directory: Path) -> None:
    settle(directory, eos_token="<s>")
    flags = TextTokenizer(directory, "none").flags(np.array([tiny.BOS, tiny.EOS], np.int32))
    assert flags.tolist() == [BOS | EOS, SPECIAL]


def test_ids_with_holes_between_them_keep_their_own_flags(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1000, "<x>": 500}
    saved = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    saved.add_special_tokens(["<x>"])
    saved.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path, "none")
    assert tokenizer.max_id == 1000
    assert tokenizer.flags(np.array([0, 500, 1000], np.int32)).tolist() == [0, SPECIAL, 0]


def test_the_largest_id_counts_added_tokens(directory: Path) -> None:
    assert TextTokenizer(directory, "none").max_id == tiny.EOS


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"model": {"type": "Oracle"}}'])
def test_a_tokenizer_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json: not a usable tokenizer"):
        TextTokenizer(tmp_path, "tokenizer")


def test_a_bucket_that_refuses_is_not_mistaken_for_a_broken_tokenizer() -> None:
    class Refusing(MemoryObjects):
        def get(self, key: str) -> bytes:
            raise StoreError(f"reading {key}: no rights")

    with pytest.raises(StoreError, match="^reading model/tokenizer.json: no rights$"):
        TextTokenizer(RemotePath(Refusing(), "model"), "tokenizer")


def test_broken_settings_are_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not valid JSON"):
        TextTokenizer(directory, "tokenizer")


def test_settings_are_optional(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    tokenizer = TextTokenizer(directory, "tokenizer")
    assert (tokenizer.bos, tokenizer.eos) == (None, None)
    assert tokenizer.encode(["a"])[0][0] == tiny.BOS


ENGLISH = "the assistant said that the user said hello there, and then the other one said so too"


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are words and parts of them."""
    folder = tmp_path_factory.mktemp("merging")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([ENGLISH] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@examples(200)
@given(
    cuts=st.lists(st.integers(0, len(ENGLISH)), max_size=8),
    said=st.lists(st.sampled_from([*ROLES]), min_size=9, max_size=9),
)
def test_flags_of_tokens_are_those_of_the_definition(
    merging: Path, cuts: list[int], said: list[str]
) -> None:
    """Speakers may change in the middle of a token."""
    ends = sorted({0, *cuts, len(ENGLISH)})
    ranges = list(zip(ends, ends[1:], said, strict=False))
    tokenizer = TextTokenizer(merging, "none")
    roles = tuple((start, stop, ROLES[role]) for start, stop, role in ranges)
    (ids,), (flags,) = tokenizer.encode_roles([ENGLISH], [roles])
    encoding = Tokenizer.from_file(str(merging / "tokenizer.json")).encode(ENGLISH)
    spoken = tuple(each for each in ranges if each[2] != "template")
    wanted = token_roles(encoding.offsets, Rendered(ENGLISH, spoken))
    assert ids.tolist() == encoding.ids and len(ids) < len(ENGLISH) / 2
    assert flags.tolist() == [ROLES[role] for role in wanted]


@pytest.mark.parametrize("before", [None, "7"])
def test_threads_are_started_and_the_environment_is_as_before(before: str | None) -> None:
    """Runs in a new process, since each process has one pool of threads."""
    script = (
        "import os\nfrom spile.corpus.tokenize import use_threads\n"
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "was, environment = threads(), dict(os.environ)\nuse_threads(3)\n"
        "assert threads() == was + 3, threads()\n"
        "use_threads(2)\n"  # the pool keeps its size
        "assert threads() == was + 3 and dict(os.environ) == environment\n"
    )
    environment = {key: value for key, value in os.environ.items() if "RAYON" not in key}
    environment |= {"RAYON_NUM_THREADS": before} if before else {}
    environment.pop("TOKENIZERS_PARALLELISM", None)  # whoever sets it decides
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
