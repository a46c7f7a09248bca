"""Corpora that already are token ids: columns of lists, and flat arrays.

Ids are read unchanged: nothing is added or removed, and each must be in the model's vocabulary. The
files do not say which tokenizer made the ids; it must have been the model's.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from spile.core.config import MAX_DOC_BYTES, Recipe, flag_of
from spile.core.errors import ConfigError, InputError
from spile.core.index import ROLES
from spile.core.options import listed
from spile.core.recipe import ResolvedRecipe
from spile.core.units import Span
from spile.corpus.chats.pool import made_at
from spile.corpus.documents import CorpusDocument, can_be_named
from spile.corpus.formats.byte_files import SAMPLE_BYTES, ByteFormat, documents_in
from spile.corpus.formats.columns import kinds_of
from spile.corpus.formats.contract import CorpusFile, ReadContext, UnitBuilder
from spile.corpus.rollout_columns import COLUMNS, KEPT, LOGPROBS, ROLE_FLAGS, TOKEN_IDS
from spile.corpus.select import TOO_LARGE
from spile.corpus.tokenize import TextTokenizer
from spile.objects.paths import AnyPath, size_of

_COLUMNS = ("input_ids", "tokens")  # if none is named
_WIDTHS = {"uint16": "<u2", "uint32": "<u4"}
_HEAD = 1 << 16
_ROUNDED = 1e-3  # most that a logarithm may lie above 0
LEAST_LOGPROB = -1e4  # stands for minus infinity
_FEWEST = 32  # numbers needed to tell widths apart


@dataclass(frozen=True)
class FlatArray:
    """The layout of a file that holds only ids.

    Attributes:
        dtype: of each id, little-endian.
        separator: the id that ends or begins a document; None: every `window` ids are a document.
        leads: whether the separator begins a document.
    """

    dtype: np.dtype[Any]
    separator: int | None
    leads: bool
    window: int

    def ends(self, data: bytes, position: int) -> np.ndarray:
        """Return the file offsets of document ends in a piece that begins at `position`."""
        each = self.dtype.itemsize
        if self.separator is None:
            step = self.window * each
            return np.arange((position // step + 1) * step, position + len(data) + 1, step)
        places = np.flatnonzero(np.frombuffer(data, self.dtype) == self.separator)
        ends = position + (places if self.leads else places + 1) * each
        return ends[ends > 0]

    def checked(self, path: AnyPath, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Check that pieces hold whole numbers; refuse a file that ends within one."""
        for data in pieces:
            if len(data) % self.dtype.itemsize:
                raise InputError(
                    f"{path}: its size is not a multiple of {self.dtype.itemsize} bytes, the size "
                    f"of {self.dtype.name}; give --tokens-dtype"
                )
            yield data

    def refuse_endless(self, path: AnyPath, documents: int) -> None:
        """Refuse a large array that is one document: this separator did not cut it."""
        if self.separator is not None and documents == 1 and size_of(path) > MAX_DOC_BYTES:
            raise InputError(
                f"{path}: is one document, since token {self.separator} is not in it; give the "
                "separator with --doc-separator, or none"
            )

    def documents(
        self, pieces: Iterable[bytes], start: int, most: int
    ) -> Iterator[np.ndarray | None]:
        """Yield the documents in a run of bytes that begins with one.

        A document of more than `most` bytes is never held; None stands in its place.
        """

        def ends(data: bytes, position: int) -> np.ndarray:
            found = self.ends(data, position)
            return found[found > start]  # a separator that leads ends no document before the first

        for _, found in documents_in(pieces, ends, most, start):
            yield None if found is None else np.frombuffer(found, self.dtype)


@dataclass(frozen=True)
class TokenIds:
    """Makes documents from ids.

    Attributes:
        column: the column of ids, or several joined by +.
        roles: the column of their speakers.
        logprobs: the column of an engine's log-probabilities of them.
    """

    vocabulary: int
    column: str | None = None
    roles: str | None = None
    logprobs: str | None = None
    flat: FlatArray | None = None
    flag: str = "--tokens-column"

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The columns of ids, one after the other; the last of several is the assistant's."""
        return tuple(self.column.split("+")) if self.column else ()

    @property
    def columns(self) -> tuple[str, ...]:
        beside = (name for name in (self.roles, self.logprobs) if name)
        return tuple(dict.fromkeys((*self.tokens, *beside)))

    def document(self, row: Mapping[str, Any]) -> CorpusDocument:
        values = [row.get(column) for column in self.tokens]
        if any(value is None for value in values):
            return CorpusDocument(skipped="null")
        parts = [np.asarray(value) for value in values]
        for column, part in zip(self.tokens, parts, strict=True):
            if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
                raise ValueError(
                    f"{column!r} holds no list of token ids; choose with --tokens-column"
                )
        if not sum(map(len, parts)):
            return CorpusDocument(skipped="empty")
        counts = [len(part) for part in parts]
        count = sum(counts)
        document = self.of_ids(np.concatenate([part.astype(np.int64) for part in parts]))
        if self.roles is not None:
            document.said = said_in(self.roles, row.get(self.roles), count)
        elif len(parts) > 1:
            speakers = [ROLES["user"]] * (len(parts) - 1) + [ROLES["assistant"]]
            document.said = np.repeat(np.array(speakers, np.uint16), counts)
        if self.logprobs is not None:
            document.logprobs = logprobs_in(self.logprobs, row.get(self.logprobs), count)
        return document

    def of_ids(self, ids: np.ndarray) -> CorpusDocument:
        """Make a document; raise ValueError if an id is not in the vocabulary."""
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            place = int(np.flatnonzero((ids < 0) | (ids >= self.vocabulary))[0])
            width = f", or are not {self.flat.dtype.name}: --tokens-dtype" if self.flat else ""
            raise ValueError(
                f"token {place} is {ids[place]}, and the model's ids go from 0 to "
                f"{self.vocabulary - 1}; these come from another tokenizer{width}"
            )
        return CorpusDocument(ids=ids.astype("<i4"))


def said_in(column: str, value: Any, count: int) -> np.ndarray:
    """Return the flag of each token's speaker, from any of the three spellings.

    Raises:
        ValueError: if the value does not say one speaker for each token.
    """
    given: list[Any] = [*value] if isinstance(value, np.ndarray | list) else []
    if len(given) != count:
        raise ValueError(f"{column!r} has {len(given)} entries for {count} tokens")
    if any(isinstance(each, str) for each in given):
        known = {None: 0, "": 0, **ROLES}
        wrong = next((each for each in given if each not in known), None)
        if wrong is not None:
            raise ValueError(
                f"{column!r} names a role {wrong!r:.80}; the roles are {', '.join(ROLES)}"
            )
        return np.array([known[each] for each in given], np.uint16)
    flags = np.asarray(given)
    if flags.dtype.kind == "b" or (flags.dtype.kind in "iuf" and np.isin(flags, (0, 1)).all()):
        return np.where(flags == 1, ROLES["assistant"], 0).astype(np.uint16)
    if flags.dtype.kind not in "iu" or not np.isin(flags, (0, *ROLES.values())).all():
        raise ValueError(
            f"{column!r} holds neither names of roles, nor flags of them, nor a loss mask of 0 "
            "and 1; choose with --roles-column"
        )
    return flags.astype(np.uint16)


def logprobs_in(column: str, value: Any, count: int) -> np.ndarray:
    """Return the log-probability of each token, NaN where there is none.

    A shorter list is of the last tokens, and a missing one of none.

    Raises:
        ValueError: if the value is no such list.
    """
    found = np.full(count, np.nan, np.float32)
    if value is None:
        return found
    given = np.asarray([np.nan if each is None else each for each in value])
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise ValueError(f"{column!r} holds no list of numbers; choose with --logprobs-column")
    if len(given) > count:
        raise ValueError(f"{column!r} has {len(given)} entries for {count} tokens")
    if (given > _ROUNDED).any():
        raise ValueError(f"{column!r} holds {given[given > _ROUNDED][0]:g}: logarithms are below 0")
    found[count - len(given) :] = np.clip(given, LEAST_LOGPROB, 0.0)
    return found


class TokenArrayFormat(ByteFormat):
    """Flat arrays of token ids."""

    title = "token ids"
    suffixes = (".bin",)
    compressible = False
    gives_way = 1
    has_columns = False
    holds_ids = True
    is_text = False

    @property
    def _ids(self) -> TokenIds:
        assert isinstance(self.context.rows, TokenIds)
        return self.context.rows

    @property
    def _flat(self) -> FlatArray:
        assert self._ids.flat
        return self._ids.flat

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        docs, path = builder.docs, self.file.path
        chunks = self._flat.checked(path, self.chunks())
        self.cut_bytes(builder, chunks, self._flat.ends, first, byte)
        self._flat.refuse_endless(path, builder.docs - docs)

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        return self._documents(self.bytes_of(span), span.start, span.first)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        with self.file.open() as stream:
            data = self.file.read(stream, SAMPLE_BYTES)
        return self._documents([data], 0, 0), len(data)

    def _documents(
        self, pieces: Iterable[bytes], start: int, first: int
    ) -> Iterator[CorpusDocument]:
        whole = self._flat.checked(self.file.path, pieces)
        documents = self._flat.documents(whole, start, self.options.max_doc_bytes)
        for number, ids in enumerate(documents, first):
            if ids is None:
                yield CorpusDocument(skipped=TOO_LARGE)
                continue
            where = f"{self.file.path} document {number}"
            yield made_at(where, partial(self._ids.of_ids, ids))


def settle_ids(recipe: Recipe, files: list[CorpusFile], vocabulary: int) -> Recipe:
    """Settle the options about ids; return the recipe unchanged if the corpus is of texts."""
    recipe = _settled_rollouts(recipe, files)
    for name in ("roles_column", "logprobs_column"):
        if getattr(recipe, name) not in (None, "none") and not recipe.tokens_column:
            raise ConfigError(f"{flag_of(name)} says something of token ids: give --tokens-column")
    flat = [file for file in files if file.format.holds_ids]
    if flat and len(flat) < len(files):
        other = next(file.path for file in files if not file.format.holds_ids)
        raise InputError(
            f"{flat[0].path} holds token ids, {other} does not; give files of one kind"
        )
    if not flat:
        for name in ("tokens_dtype", "doc_separator"):
            if getattr(recipe, name):
                raise ConfigError(f"{flag_of(name)} is for .bin files; {files[0].path} is not one")
        recipe = replace(recipe, tokens_column=recipe.tokens_column or _found(recipe, files))
        if recipe.tokens_column is None:
            return recipe
    elif recipe.tokens_column:
        raise ConfigError(f"--tokens-column: {flat[0].path} is an array and has no columns")
    for name in ("text_column", "messages", "prompt_column"):
        if getattr(recipe, name):
            raise ConfigError(f"{flag_of(name)} is for texts, and the corpus is of token ids")
    if recipe.text_documents == "file":
        raise ConfigError("--text-documents file is for texts, and the corpus is of token ids")
    if recipe.special_tokens not in (None, "none"):
        raise ConfigError(
            f"--special-tokens {recipe.special_tokens}: token ids are read as they are, and none "
            "are added; leave it out"
        )
    recipe = replace(recipe, special_tokens="none")
    if not flat:
        return recipe
    width = "uint16" if vocabulary <= 1 << 16 else "uint32"
    if not recipe.tokens_dtype and width == "uint16":
        _refuse_wider(flat[0])
    return replace(
        recipe,
        tokens_dtype=recipe.tokens_dtype or width,
        doc_separator=recipe.doc_separator or "eos",
    )


def _settled_rollouts(recipe: Recipe, files: list[CorpusFile]) -> Recipe:
    """Return the recipe with the columns of rollouts, if that is what the corpus is."""
    given = ("text_column", "messages", "prompt_column", "tokens_column")
    table = next((file for file in files if file.format.has_schema), None)
    if table is None or any(getattr(recipe, name) for name in given):
        return recipe
    names: list[str] = table.format(table, 0, ReadContext()).schema().names
    if not {*COLUMNS}.issubset(names):
        return recipe
    own = [name for name in names if name not in COLUMNS and can_be_named(name)]
    return replace(
        recipe,
        tokens_column=TOKEN_IDS,
        roles_column=recipe.roles_column or ROLE_FLAGS,
        logprobs_column=recipe.logprobs_column or LOGPROBS,
        keep=recipe.keep or ",".join((*KEPT, *own)),
    )


def read_ids(recipe: ResolvedRecipe, tokenizer: TextTokenizer, vocabulary: int) -> TokenIds | None:
    """Return the reader of a settled recipe's ids; None if the corpus is of texts."""
    if recipe.tokens_column:
        named = (recipe.roles_column, recipe.logprobs_column)
        roles, logprobs = (None if name == "none" else name for name in named)
        return TokenIds(vocabulary, recipe.tokens_column, roles, logprobs)
    if not (recipe.tokens_dtype and recipe.doc_separator):
        return None
    separator = _separator(recipe.doc_separator, tokenizer, vocabulary)
    leads = recipe.doc_separator == "bos"
    dtype = np.dtype(_WIDTHS[recipe.tokens_dtype])
    flat = FlatArray(dtype, separator, leads, recipe.seq_len)
    return TokenIds(vocabulary, flat=flat, flag="--tokens-dtype")


def _separator(given: str, tokenizer: TextTokenizer, vocabulary: int) -> int | None:
    if given == "none":
        return None
    if given in ("eos", "bos"):
        found = tokenizer.eos if given == "eos" else tokenizer.bos
        if found is None:
            raise ConfigError(
                f"--doc-separator {given}: this model's tokenizer has no {given.upper()} token; "
                "give an id, or none"
            )
        return found
    if not (given.isascii() and given.isdigit()) or int(given) >= vocabulary:
        raise ConfigError(
            f"--doc-separator must be eos, bos, none or an id below {vocabulary}, got {given!r}"
        )
    return int(given)


def _found(recipe: Recipe, files: list[CorpusFile]) -> str | None:
    """Return the column of ids in the first table, if only that can be the corpus."""
    table = next((file for file in files if file.format.has_schema), None)
    if table is None or recipe.text_column or recipe.messages or recipe.prompt_column:
        return None
    strings, lists = kinds_of(table.format(table, 0, ReadContext()).schema())
    lists = [name for name in lists if name in _COLUMNS]
    if not lists or "text" in strings:
        return None
    if strings or len(lists) > 1:
        raise InputError(
            f"{table.path}: which column is the corpus? Choose token ids with --tokens-column "
            f"({listed(lists)}) or a text with --text-column ({listed(strings)})"
        )
    return lists[0]


def _refuse_wider(file: CorpusFile) -> None:
    with file.open() as stream:
        head = file.read(stream, _HEAD)
    ids = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    if len(ids) >= _FEWEST and not ids[1::2].any():
        raise InputError(f"{file.path}: every other number is 0, as in uint32; give --tokens-dtype")
