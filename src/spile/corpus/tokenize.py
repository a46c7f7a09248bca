"""Convert text to token ids with the model's own tokenizer (the Rust library, batched)."""

import os
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from spile.core.errors import ConfigError, InputError, SpileError
from spile.core.index import BOS, EOS, ROLES, SPECIAL
from spile.core.panics import without_panic
from spile.corpus.documents import Documents
from spile.corpus.thinking import BRACKETS, MARKS, ThinkingMarks, thinking_flags
from spile.objects.paths import AnyPath, read_json

# Keys of `tokenizer_config.json` that name special tokens, besides those that end in `_token`.
_SPECIALS = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
_MOST_IDS = 1 << 24  # most ids in a vocabulary
_POOL_SIZE = "RAYON_NUM_THREADS"
_starting = threading.Lock()


def use_threads(asked: int | None) -> None:
    """Start the threads of the tokenizer library: all cores but one by default.

    The library has one pool for each process. It takes the size from RAYON_NUM_THREADS when the
    first batch is encoded, and has no other setting. So the variable is set for that moment only:
    other libraries and child processes do not see it. A pool that exists keeps its size.
    """
    count = asked or max(1, (os.cpu_count() or 1) - 1)
    with _starting:
        before = os.environ.get(_POOL_SIZE)
        os.environ[_POOL_SIZE] = str(count)
        try:
            Tokenizer(BPE()).encode_batch_fast(["", ""])
        finally:
            if before is None:
                del os.environ[_POOL_SIZE]
            else:
                os.environ[_POOL_SIZE] = before


class TextTokenizer:
    """A model's tokenizer with one policy for special tokens."""

    def __init__(self, directory: AnyPath, special_tokens: str) -> None:
        """Args:
        special_tokens: `tokenizer`, `bos` or `none`: the special tokens to add to each text.
        """
        path = self._path = directory / "tokenizer.json"
        try:
            with without_panic(path):
                self._tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except SpileError:
            raise
        except Exception as error:  # the Rust library raises bare Exception
            raise InputError(f"{path}: not a usable tokenizer ({error})") from error
        # A saved tokenizer may contain the length limits of whoever saved it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_json(directory / "tokenizer_config.json", missing_ok=True)
        config = read_json(directory / "config.json", missing_ok=True)
        self.bos = self._special("bos", settings, config)
        self.eos = self._special("eos", settings, config)
        self._policy = special_tokens
        if special_tokens == "bos" and self.bos is None:
            raise ConfigError("--special-tokens bos: this model's tokenizer has no BOS token")
        added = self._tokenizer.get_added_tokens_decoder()
        self._size = self.max_id + 1  # ids beyond the vocabulary use this entry, which has no flags
        inserted = self._inserted()
        for fault, token in (("has", self.max_id), ("puts around texts", max(inserted, default=0))):
            if token >= (_MOST_IDS if fault == "has" else self._size):
                raise InputError(f"{path}: {fault} token {token}, which no model knows")
        self._flags = np.zeros(self._size + 1, np.uint16)
        special = {token for token, content in added.items() if content.special}
        self._flags[sorted(special | self._named(settings) | inserted)] = SPECIAL
        for token, flag in ((self.bos, BOS), (self.eos, EOS)):
            if token is not None and token < len(self._flags):
                self._flags[token] = (self._flags[token] & ~np.uint16(SPECIAL)) | flag

    def _named(self, settings: dict[str, Any]) -> set[int]:
        """Return the tokens that `tokenizer_config.json` calls special, added or not."""
        names: list[Any] = [each for key, each in settings.items() if key.endswith("_token")]
        for more in map(settings.get, _SPECIALS):
            if isinstance(more, dict | list):
                named = cast(dict[str, Any] | list[Any], more)
                names += named.values() if isinstance(named, dict) else named
        found = (self._tokenizer.token_to_id(text) for text in map(_content, names) if text)
        return {token for token in found if token is not None}

    def _inserted(self) -> set[int]:
        """Return the tokens that the tokenizer inserts around any text."""
        with without_panic(self._path):
            made = self._tokenizer.encode("")
        return {token for token, new in zip(made.ids, made.special_tokens_mask, strict=True) if new}

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as int32."""
        with without_panic(self._path):
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=self._policy == "tokenizer"
            )
        ids = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        if self._policy == "bos":
            head = np.asarray([self.bos], np.int32)
            ids = [np.concatenate([head, tokens]) for tokens in ids]
        return ids

    def encode_plain(self, text: str) -> np.ndarray:
        """Return the token ids of a piece of text, without any that are added to a whole one."""
        with without_panic(self._path):
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: list[int]) -> str:
        """Return token ids as text, including special tokens."""
        with without_panic(self._path):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_roles(
        self, texts: list[str], roles: Sequence[Sequence[tuple[int, int, int]]]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the token ids of each text, and the flag of each token's speaker.

        A token belongs to the speaker of its characters. A token shared with the assistant is the
        assistant's, as in HF transformers; any other shared token belongs to the speaker of its
        first character that has one. The ranges follow one another without gaps.
        """
        ids: list[np.ndarray] = []
        flags: list[np.ndarray] = []
        with without_panic(self._path):
            encodings = self._tokenizer.encode_batch(
                texts, add_special_tokens=self._policy == "tokenizer"
            )
        for encoding, said in zip(encodings, roles, strict=True):
            spans = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
            starts = np.array([start for start, _, _ in said], np.int64)
            flag = np.array([0, *(flag for _, _, flag in said)], np.uint16)
            first = np.searchsorted(starts, spans[:, 0], side="right")
            last = np.searchsorted(starts, spans[:, 1] - 1, side="right")
            found = flag[first]
            for token in np.flatnonzero(first < last):
                owners = flag[first[token] : last[token] + 1]
                someones = owners[owners != ROLES["template"]]
                shared = ROLES["assistant"] in owners
                found[token] = ROLES["assistant"] if shared else [*someones, found[token]][0]
            found[spans[:, 0] == spans[:, 1]] = ROLES["template"]
            head = [self.bos] if self._policy == "bos" else []
            ids.append(np.asarray([*head, *encoding.ids], np.int32))
            flags.append(np.concatenate([np.full(len(head), ROLES["template"], np.uint16), found]))
        return ids, flags

    def offsets(self, texts: list[str]) -> list[np.ndarray]:
        """Return the characters [start, stop) of each token that `encode` makes of each text."""
        with without_panic(self._path):
            encodings = self._tokenizer.encode_batch(
                texts, add_special_tokens=self._policy == "tokenizer"
            )
        head = [(0, 0)] if self._policy == "bos" else []
        return [
            np.array([*head, *encoding.offsets], np.int64).reshape(-1, 2) for encoding in encodings
        ]

    def count(self, texts: list[str]) -> int:
        return sum(len(tokens) for tokens in self.encode(texts))

    def flags(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the bos, eos and special bits of each token."""
        return self._flags[np.minimum(token_ids, self._size)]

    @cached_property
    def max_id(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def thinking(self) -> ThinkingMarks:
        """The ids that mark thinking in this tokenizer, if it has tokens for that."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        known = (pair for pair in MARKS if added.issuperset(BRACKETS.findall("".join(pair))))
        return [
            (self.encode_plain(opening).tolist(), self.encode_plain(closing).tolist())
            for opening, closing in known
        ]

    def _special(self, name: str, settings: dict[str, Any], config: dict[str, Any]) -> int | None:
        content = _content(settings.get(f"{name}_token"))
        found = self._tokenizer.token_to_id(content) if content else None
        if found is not None:
            return found
        listed: Any = config.get(f"{name}_token_id")
        if isinstance(listed, list) and listed:
            listed = cast(list[Any], listed)[0]
        return listed if isinstance(listed, int) else None


def _content(token: Any) -> str | None:
    """Return the text of a token in a config, which may be a string or an object."""
    content = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def tokenize(
    tokenizer: TextTokenizer, documents: Documents
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the token ids of each usable document, and the flags of its tokens if it has roles.

    The ids of documents that came as such are returned unchanged.
    """
    if documents.ids:
        said = [document.said for document in documents.usable]
        flags = [
            roles | thinking_flags(ids, roles, tokenizer.thinking)
            for ids, roles in zip(documents.ids, said, strict=True)
            if roles is not None
        ]
        return documents.ids, flags
    roles = [document.roles for document in documents.usable]
    if any(roles):
        return tokenizer.encode_roles(documents.texts, roles)
    return tokenizer.encode(documents.texts), []
