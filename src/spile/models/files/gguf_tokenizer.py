"""Build `tokenizer.json` from the tokenizer that a GGUF file describes.

The file holds pieces and merges (or scores), but only a name for how text is split before merging.
Each name here was compared, id by id, with the published tokenizer.json behind it. Any other name
is refused, because a near miss changes tokens silently; use that model's own files instead.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from spile.core.errors import InputError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's symbol for a space
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_WAY_OUT = "give the directory with the model's own tokenizer.json and tokenizer_config.json"
# `tokenizer.*` metadata beside the roles of single tokens; other keys are refused.
_READ = {
    f"tokenizer.{name}"
    for name in (
        "chat_template", "ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix",
        "ggml.merges", "ggml.model", "ggml.pre", "ggml.scores", "ggml.token_type", "ggml.tokens",
    )
}  # fmt: skip
_MUST_BE_FALSE = {"tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"}
# The roles of single tokens (end of turn, fill in the middle, ...), templates beside the usual one,
# and BERT's segments: none of these changes the ids of a text.
_IGNORED = re.compile(
    r"tokenizer\.(ggml\.\w+_token_id|ggml\.token_type_count|chat_templates|chat_template\..+)"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The patterns of the published tokenizer.json, not those of llama.cpp, which lack `(?i:`: those
# split a long s after an apostrophe differently.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Splitting:
    """The way of splitting that `tokenizer.ggml.pre` names."""

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False  # a whole word that is a token needs no merges
    adds_bos: bool = False  # if the file does not say


_SPLITTINGS = {
    "gpt-2": _Splitting(cut=lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": _Splitting(
        cut=lambda: _split(_WORDS.replace("DIGITS", "{1,3}")), ignore_merges=True, adds_bos=True
    ),
    "qwen2": _Splitting(cut=lambda: _split(_WORDS.replace("DIGITS", "")), nfc=True),
    # The version that transformers derives from a GGUF keeps digits together.
    "smollm": _Splitting(
        cut=lambda: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "tekken": _Splitting(cut=lambda: _split(_TEKKEN), ignore_merges=True, adds_bos=True),
}


def prepare_tokenizer(
    where: str, meta: Mapping[str, Any], given: Path | None
) -> Callable[[Path], None]:
    """Return a function that writes the tokenizer's files into a directory; check everything first.

    Args:
        given: a directory with the model's own tokenizer files, to use instead of the file's.

    Raises:
            InputError: if the tokenizer cannot be rebuilt exactly, or the given one differs.
            KeyError: if the metadata lacks a key that every tokenizer needs.
    """
    if given is not None:
        _check(where, given, meta)
        return lambda dest: _copy(given, dest)
    tokenizer, settings = build_tokenizer(where, meta)

    def write(dest: Path) -> None:
        tokenizer.save(str(dest / "tokenizer.json"))
        write_json(dest / "tokenizer_config.json", settings)

    return write


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON, formatted as Hugging Face does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(where: str, meta: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the contents of `tokenizer.json` and of `tokenizer_config.json`."""
    _refuse_unread(where, meta)
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    tokens, types = _pieces(where, meta)
    if kind == "gpt2" and pre in _SPLITTINGS:
        splitting = _SPLITTINGS[pre]
        space_prefix, adds_bos = False, splitting.adds_bos
        tokenizer = _byte_level(where, meta, tokens, types, splitting)
    elif kind == "llama" and meta["general.architecture"] != "phi3":
        # (Phi-3 strips the spaces after its added tokens; the file does not say so.)
        space_prefix, adds_bos = bool(meta.get("tokenizer.ggml.add_space_prefix", True)), True
        tokenizer = _sentencepiece(where, meta, tokens, types, space_prefix)
    else:
        raise InputError(
            f"{where}: tokenizer {kind!r} with splitting {pre!r} is not supported: {_WAY_OUT}"
        )
    _add_tokens(tokenizer, tokens, types)
    _post_process(where, meta, tokenizer, adds_bos)
    roles = {role: _role(where, meta, name) for role, name in _ROLES.items()}
    template = meta.get("tokenizer.chat_template")
    return tokenizer, {
        "add_prefix_space": space_prefix,
        **{f"{role}_token": tokens[i] for role, i in roles.items() if i is not None},
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta[f"{meta['general.architecture']}.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _check(where: str, given: Path, meta: Mapping[str, Any]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (given / name).is_file():
            raise InputError(f"{given}: no {name} there: {_WAY_OUT}")
    try:
        tokenizer = Tokenizer.from_file(str(given / "tokenizer.json"))
    except Exception as error:  # the package raises nothing more specific
        raise InputError(f"{given}/tokenizer.json: {error}") from error
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    types: list[int] = meta.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        # Added tokens were normalised on their way into the file; pieces were not.
        if kind == _NORMAL and (found := tokenizer.id_to_token(index)) != token:
            raise InputError(
                f"{given}: not the tokenizer of {where}: id {index} is {found!r}, not {token!r}"
            )


def _copy(given: Path, dest: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (given / name).is_file():
            shutil.copyfile(given / name, dest / name)


def _refuse_unread(where: str, meta: Mapping[str, Any]) -> None:
    stated = {name for name in meta if name.startswith("tokenizer.")}
    unread = {name for name in stated - _READ if not _IGNORED.fullmatch(name)}
    unread -= {name for name in unread & _MUST_BE_FALSE if not meta[name]}
    if unread:
        raise InputError(f"{where}: metadata not supported: {', '.join(sorted(unread))}")


def _pieces(where: str, meta: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise InputError(f"{where}: tokens without a type, or twice the same token")
    # Rows of the embedding that no token uses; old converters called them user-defined.
    padding = [token == f"[PAD{index}]" for index, token in enumerate(tokens)]
    return tokens, [
        _UNUSED if kind == _USER_DEFINED and unused else kind
        for kind, unused in zip(types, padding, strict=True)
    ]


def _byte_level(
    where: str,
    meta: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    splitting: _Splitting,
) -> Tokenizer:
    if unknown := set(types) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise InputError(f"{where}: token types {sorted(unknown)} are not supported")
    if meta.get("tokenizer.ggml.add_space_prefix", False):
        raise InputError(f"{where}: tokenizer.ggml.add_space_prefix is not supported")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in
              (merge.partition(" ") for merge in meta["tokenizer.ggml.merges"])]  # fmt: skip
    for left, right in merges:
        if not {left, right, left + right} <= vocab.keys():
            raise InputError(f"{where}: the merge of {left!r} and {right!r} has no token")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.cut()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    where: str,
    meta: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    space_prefix: bool,
) -> Tokenizer:
    unknown = _role(where, meta, "unknown")
    if unknown is None or types.count(_BYTE) != 256:
        raise InputError(f"{where}: a tokenizer without all bytes is not supported: {_WAY_OUT}")
    # The file does not say whether the first word after an added token gets a space, and published
    # tokenizers differ. After BOS it is clear, and EOS ends a text.
    plain = {_role(where, meta, name) for name in _ROLES.values()}
    added = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    if space_prefix and (odd := [tokens[i] for i in added if i not in plain]):
        raise InputError(
            f"{where}: how {odd[0]!r} and {len(odd) - 1} more tokens treat spaces is not in the "
            f"file: {_WAY_OUT}"
        )
    pieces = [_as_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    if "\t\t" in pieces and "\t" not in pieces:
        # As in the published files of Gemma: otherwise its runs of tabs could not be merged.
        pieces[pieces.index("<0x09>")] = "\t"
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise InputError(f"{where}: two tokens differ only in how they write a space")
    merges = _merges(where, vocab, types, meta["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=pieces[unknown], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if space_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps
    )
    return tokenizer


def _as_piece(token: str, kind: int) -> str:
    return token.replace(" ", _SPACE) if kind == _USER_DEFINED else token


def _merges(
    where: str, vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, the best-scored pieces first.

    The published tokenizer.json files were made in that way. Among the ways to make one piece,
    Llama and Mistral put the smaller ids first. Gemma 2 and 3, the only ones with user-defined
    pieces, put the longer halves first.
    """
    if len(scores) != len(vocab):
        raise InputError(f"{where}: {len(vocab)} tokens, but {len(scores)} scores")
    ranked = {score for score, kind in zip(scores, types, strict=True) if kind == _NORMAL}
    if 2 * len(ranked) < types.count(_NORMAL):
        # Converters without the SentencePiece model write the same score everywhere.
        raise InputError(f"{where}: the tokens' scores do not rank them: {_WAY_OUT}")
    longest_first = _USER_DEFINED in types
    found: list[tuple[float, tuple[int, int], str, str]] = []
    for piece, kind, score in zip(vocab, types, scores, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        # SentencePiece scores user-defined pieces 0; converters overwrite that.
        value = 0.0 if kind == _USER_DEFINED else score
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in vocab and b in vocab]
        for a, b in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])):
            lengths = (-len(a), -len(b)) if longest_first else (0, 0)
            found.append((-value, lengths, a, b))
    found.sort(key=lambda entry: entry[:2])
    return [(a, b) for _, _, a, b in found]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    untyped: Any = tokenizer  # (its stubs accept only a bare list)
    for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        added = [
            AddedToken(_as_piece(token, kind), special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
        untyped.add_special_tokens(added) if special else untyped.add_tokens(added)


def _post_process(
    where: str, meta: Mapping[str, Any], tokenizer: Tokenizer, adds_bos: bool
) -> None:
    wanted: dict[str, int] = {}
    for role, default in (("bos", adds_bos), ("eos", False)):
        if meta.get(f"tokenizer.ggml.add_{role}_token", default):
            index = _role(where, meta, role)
            if index is None:
                raise InputError(f"{where}: texts get a {role.upper()} token, but none is named")
            if ":" in meta["tokenizer.ggml.tokens"][index]:  # has a meaning in a template
                raise InputError(f"{where}: a {role.upper()} token with a colon is not supported")
            wanted[role] = index
    if not wanted:
        return
    names = {role: meta["tokenizer.ggml.tokens"][index] for role, index in wanted.items()}
    before, after = ([names[role]] if role in names else [] for role in ("bos", "eos"))
    second = [f"{name}:1" for name in before], [f"{name}:1" for name in after]
    single = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second[0], "$B:1", *second[1]],
        special_tokens=[(names[role], index) for role, index in wanted.items()],
    )


def _role(where: str, meta: Mapping[str, Any], name: str) -> int | None:
    index = meta.get(f"tokenizer.ggml.{name}_token_id")
    if index is not None and index >= len(meta["tokenizer.ggml.tokens"]):
        raise InputError(f"{where}: tokenizer.ggml.{name}_token_id {index} is not a token")
    return index
