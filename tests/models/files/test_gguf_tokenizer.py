"""Tokenizers of GGUF files give the ids of those they came from, or are refused."""

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, pre_tokenizers, trainers

from spile.core.errors import InputError
from spile.models.files.gguf import convert
from support.ggufs import VOCAB, WIDTH, byte_tokens, write_case
from support.marks import some

# How published tokenizer.json files cut text, copied from them.
WORDS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
NEMO = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def byte_level(**more: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **more}


def regex(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    parts = [{**split, "invert": False}, byte_level(use_regex=False)]
    return {"type": "Sequence", "pretokenizers": parts}


DIGITS = {"type": "Digits", "individual_digits": True}
# name: normalizer, pre-tokenizer, ignore_merges, whether a BOS is added
PUBLISHED: dict[str, tuple[Any, Any, bool, bool]] = {
    "gpt-2": (None, byte_level(use_regex=True), False, False),
    "llama-bpe": (None, regex(WORDS % "{1,3}"), True, True),
    "qwen2": ({"type": "NFC"}, regex(WORDS % ""), False, False),
    "smollm": (None, {"type": "Sequence", "pretokenizers": [DIGITS, byte_level(use_regex=True)]},
               False, False),
    "tekken": (None, regex(NEMO), True, True),
}  # fmt: skip
TEXTS = [
    "", " ", "\n", "Hello world", "  two  spaces ", "a\tb\r\n\r\nc\n\n\nd   \n", "I'LL don't 'S'x",
    "0123456789 12 1234567 ١٢٣ Ⅷ ½", "naïve café cafe\u0301 e\u0301\u0301", "'ſ it'ſ",
    "Sabc Sabc Sabc 'Sabc it'Sabc",
    "日本語のテキスト 한국어 ภาษาไทย ગુજરાતી", "🙂👩‍👩‍👧‍👦 🏳️‍🌈", "\u200b\u00ad\u2028\ufeff\x00\x7f",
    "HTMLParser camelCase XMLHttpRequest ǅ", "--==//\\\\ ....... !!!??? ((()))", "…—“”‘’«»",
    "<s>a</s> <user> b", "[PAD259] <s>", "def f(x):\n    return x  # done\n", "aaaaaaaaaaaaa " * 3,
]  # fmt: skip


@cache
def published_tokenizer(pre: str) -> Tokenizer:
    normalizer, cut, ignore, bos = PUBLISHED[pre]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(alphabet)}, "merges": []}
    form = {"version": "1.0", "normalizer": normalizer, "pre_tokenizer": cut, "added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps({**form, "model": model}))
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["model"]["ignore_merges"] = ignore
    # A whole word without merges: only `ignore_merges` can reach it.
    size = len(trained["model"]["vocab"])
    trained["model"]["vocab"] |= {"Ġworldly": size}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    trained["added_tokens"] = [
        {"id": size + 1 + i, "content": token, **flags, "special": token != "<user>"}
        for i, token in enumerate(["<s>", "</s>", "<user>"])
    ]
    if bos:
        ids = {"<s>": {"id": "<s>", "ids": [size + 1], "tokens": ["<s>"]}}
        first, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"id": "A", "type_id": 0}
        second = [{"SpecialToken": {"id": "<s>", "type_id": 1}}]
        second.append({"Sequence": {"id": "B", "type_id": 1}})
        single = [first, {"Sequence": text}]
        trained["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *second],
            "special_tokens": ids,
        }
    return Tokenizer.from_str(json.dumps(trained))


def tokenizer_meta(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The converter's fields for a byte-level tokenizer; some rows have no token."""
    size = tokenizer.get_vocab_size()
    tokens = [str(tokenizer.id_to_token(i)) for i in range(size)]
    types = [1] * (size - 3) + [3, 3, 4]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    # The second padding as old converters marked it.
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, f"[PAD{size}]", f"[PAD{size + 1}]"],
        "tokenizer.ggml.token_type": [*types, 5, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": size - 3,
        "tokenizer.ggml.eos_token_id": size - 2,
    }


def convert_tokenizer(folder: Path, meta: dict[str, Any], case: str = "llama") -> Path:
    rows = len(meta["tokenizer.ggml.tokens"])
    embed = np.zeros((rows, WIDTH), np.float32)
    tensors: dict[str, np.ndarray | None] = {"token_embd.weight": embed, "output.weight": None}
    sizes = {"vocab_size": None, **dict.fromkeys(byte_tokens())}
    path = write_case(folder / "m.gguf", case, meta={**sizes, **meta}, tensors=tensors)
    convert(path, folder / "out")
    return folder / "out"


def assert_same_ids(dest: Path, reference: Callable[[str], list[int]]) -> None:
    """Compare Spile's reading of the file with transformers'."""
    plain = Tokenizer.from_file(str(dest / "tokenizer.json"))
    hugging = transformers.AutoTokenizer.from_pretrained(dest)
    unused = [f"[PAD{plain.get_vocab_size() - back}]" for back in (1, 2)]
    for text in [*TEXTS, "worldly worldly", "x worldly", *unused]:
        assert plain.encode(text).ids == reference(text), text
        assert hugging(text)["input_ids"] == reference(text), text


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_byte_level_tokenizer_gives_the_published_ids(pre: str, tmp_path: Path) -> None:
    published = published_tokenizer(pre)
    meta = tokenizer_meta(published, pre)
    dest = convert_tokenizer(tmp_path, meta)
    assert_same_ids(dest, lambda text: published.encode(text).ids)
    rebuilt = Tokenizer.from_file(str(dest / "tokenizer.json"))
    assert rebuilt.encode("a", "b").ids == published.encode("a", "b").ids
    assert rebuilt.encode("a", "b").type_ids == published.encode("a", "b").type_ids
    for text in TEXTS:
        ids = published.encode(text, add_special_tokens=False).ids
        assert rebuilt.decode(ids) == Tokenizer.decode(with_decoder(published), ids)


def with_decoder(tokenizer: Tokenizer) -> Tokenizer:
    form = json.loads(tokenizer.to_str())
    form["decoder"] = byte_level(use_regex=True)
    return Tokenizer.from_str(json.dumps(form))


@pytest.mark.parametrize(
    ("pre", "bos", "eos"),
    some(
        itertools.product(["qwen2", "llama-bpe"], [None, False, True], [None, False, True]),
        *(("qwen2", None, None), ("qwen2", True, True), ("llama-bpe", None, True)),
        *(("llama-bpe", False, False), ("llama-bpe", True, None)),
    ),
)
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    meta = tokenizer_meta(published_tokenizer(pre), pre)
    flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    dest = convert_tokenizer(tmp_path, {**meta, **flags})
    ids = transformers.AutoTokenizer.from_pretrained(dest)("Hello")["input_ids"]
    begins = bos if bos is not None else pre == "llama-bpe"
    assert (ids[0] == meta["tokenizer.ggml.bos_token_id"]) == begins
    assert (ids[-1] == meta["tokenizer.ggml.eos_token_id"]) == bool(eos)


PIECES = ["▁t", "he", "in", "▁the", "er", "an", "▁a", "aa", "aaa", "aaaa", "an▁", "and", "▁and",
          "er▁", "--", "----", "ing", "▁▁", "▁▁▁▁", "▁in", "hein", "ther", "the"]  # fmt: skip


def sentencepiece_meta(space_prefix: bool) -> dict[str, Any]:
    letters = sorted({*"".join(PIECES), *"abcdefghijklmnopqrstuvwxyz.,-"})
    runs = [] if space_prefix else ["  ", "   "]
    normal = [*(p for p in PIECES if space_prefix or p.strip("▁")), *letters]
    control = ["<unk>", "<s>", "</s>"]
    tokens = [*control, *(f"<0x{i:02X}>" for i in range(256)), *normal]
    types = [2, 3, 3] + [6] * 256 + [1] * len(normal)
    scores = [0.0] * 259 + [-1.0 - i for i in range(len(normal))]
    if not space_prefix:  # Gemma: runs of spaces and a tag, as the converter writes them
        tokens, types = [*tokens, *runs, "<b>"], [*types, 4, 4, 4]
        scores += [-1000.0] * 3
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **({} if space_prefix else {"tokenizer.ggml.add_space_prefix": False}),
    }


def sentencepiece_ids(meta: dict[str, Any], text: str, space_prefix: bool) -> list[int]:
    """SentencePiece's algorithm: merge the best-scored neighbours first, the leftmost of equals."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    scores = {
        token.replace(" ", "▁"): 0.5 if kind == 4 else score
        for token, kind, score in zip(tokens, types, meta["tokenizer.ggml.scores"], strict=True)
        if kind in (1, 4)
    }
    marked = ("▁" if space_prefix and text else "") + text.replace(" ", "▁")
    parts = list(marked)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
                 if a + b in scores]  # fmt: skip
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = [1]
    for part in parts:
        bytes_ = [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [ids[part]] if part in ids else bytes_
    return found


@pytest.mark.parametrize("space_prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(space_prefix: bool, tmp_path: Path) -> None:
    meta = sentencepiece_meta(space_prefix)
    dest = convert_tokenizer(tmp_path, meta)
    plain = Tokenizer.from_file(str(dest / "tokenizer.json"))
    hugging = transformers.AutoTokenizer.from_pretrained(dest)
    rng = np.random.default_rng(0)
    letters = list("theinganrd -a") + ["é", "日", "\n"]
    texts = ["".join(rng.choice(letters, rng.integers(0, 40))) for _ in range(150)]
    for text in [*texts, "the the", "aaaaaaaaaaa", "---------", "an and " * 4]:
        expected = sentencepiece_ids(meta, text, space_prefix)
        assert plain.encode(text).ids == expected, text
        assert hugging(text)["input_ids"] == expected, text
        assert plain.decode(expected) == text


def test_user_defined_pieces_are_matched_before_all_others(tmp_path: Path) -> None:
    meta = sentencepiece_meta(space_prefix=False)
    tokenizer = Tokenizer.from_file(str(convert_tokenizer(tmp_path, meta) / "tokenizer.json"))
    tag = meta["tokenizer.ggml.tokens"].index("<b>")
    assert tokenizer.encode("<b>the<b>").ids.count(tag) == 2
    assert tokenizer.encode("the   the").tokens == ["<s>", "the", "▁▁▁", "the"]


def changed(meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**meta, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def refused_tokenizers() -> dict[str, tuple[dict[str, Any], str]]:
    spm, bpe = sentencepiece_meta(space_prefix=True), byte_tokens()
    tokens, types = spm["tokenizer.ggml.tokens"], spm["tokenizer.ggml.token_type"]
    scores = spm["tokenizer.ggml.scores"]
    more = changed(spm, tokens=[*tokens, "[INST]"], token_type=[*types, 3], scores=[*scores, 0.0])
    return {
        "splitting": (changed(bpe, pre="default"), "'gpt2' with splitting 'default'"),
        "no splitting": (changed(bpe, pre=None), "'gpt2' with splitting None"),
        "kind": (changed(bpe, model="bert"), "'bert' with splitting"),
        "charsmap": (changed(spm, precompiled_charsmap=[1]), "precompiled_charsmap"),
        "whitespace": (changed(spm, remove_extra_whitespaces=True), "remove_extra_whitespaces"),
        "prefix": (changed(bpe, add_space_prefix=True), "add_space_prefix"),
        "twice": (changed(bpe, tokens=["a"] * VOCAB), "twice the same"),
        "types": (changed(bpe, token_type=[1] * 256 + [3, 3, 4, 6]), r"types \[6\]"),
        "merge": (changed(bpe, merges=["a b"]), "merge of 'a' and 'b'"),
        "bos": (changed(bpe, add_bos_token=True, bos_token_id=None), "none is named"),
        "bos id": (changed(bpe, bos_token_id=10**6), "1000000 is not a token"),
        "no tokens": (changed(bpe, token_type=None), "lacks 'tokenizer.ggml.token_type'"),
        "spaces after": (more, r"'\[INST\]' and 0 more tokens treat spaces"),
        "no ranks": (changed(spm, scores=[-1000.0] * len(scores)), "do not rank"),
        "bytes": (changed(spm, token_type=[2, 3, 3] + [1] * (len(types) - 3)), "all bytes"),
    }


@pytest.mark.parametrize("name", refused_tokenizers())
def test_a_tokenizer_that_cannot_be_exact_is_refused(name: str, tmp_path: Path) -> None:
    meta, message = refused_tokenizers()[name]
    with pytest.raises(InputError, match=message) as caught:
        convert_tokenizer(tmp_path, meta)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_phi3_pieces_are_refused_as_their_spaces_are_not_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model's own tokenizer\.json"):
        convert_tokenizer(tmp_path, sentencepiece_meta(space_prefix=True), "phi3")


def test_the_models_own_tokenizer_can_be_given(tmp_path: Path) -> None:
    given = tmp_path / "own"
    given.mkdir()
    own = published_tokenizer("qwen2")
    own.save(str(given / "tokenizer.json"))
    path = tmp_path / "m.gguf"
    meta = changed(tokenizer_meta(own, "qwen2"), pre="default")
    rows = len(meta["tokenizer.ggml.tokens"])
    embed = {"token_embd.weight": np.zeros((rows, WIDTH), np.float32), "output.weight": None}
    write_case(path, meta={"vocab_size": None, **meta}, tensors=embed)
    with pytest.raises(InputError, match=r"no tokenizer_config\.json there"):
        convert(path, tmp_path / "out", tokenizer=given)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    (given / "tokenizer_config.json").write_text(settings)
    convert(path, tmp_path / "out", tokenizer=given)
    assert_same_ids(tmp_path / "out", lambda text: own.encode(text).ids)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == settings
    published_tokenizer("gpt-2").save(str(given / "tokenizer.json"))
    with pytest.raises(InputError, match="not the tokenizer of"):
        convert(path, tmp_path / "other", tokenizer=given)
    (given / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"own/tokenizer\.json"):
        convert(path, tmp_path / "other", tokenizer=given)
