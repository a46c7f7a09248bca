"""Prompts: the documents of a corpus, as an engine is asked to continue them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from spile.core.config import MAX_DOC_BYTES, PROMPT_OPTIONS, Recipe
from spile.core.errors import ConfigError, InputError
from spile.core.expressions import DocumentFilter
from spile.core.index import ROLES
from spile.core.units import Unit
from spile.corpus.chat_layouts import settle_chats
from spile.corpus.chats.messages import role_of
from spile.corpus.chats.pool import RenderPool
from spile.corpus.chats.rows import RowReader, read_as, template_of, unrendered
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files, lasting
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.named_columns import refuse_missing_columns, settled_columns
from spile.corpus.reader import CorpusReader
from spile.corpus.rollout_columns import COLUMNS
from spile.corpus.select import Selection
from spile.corpus.tokenize import TextTokenizer
from spile.corpus.units import CutOptions, make_units, sampled_files, without_duplicates
from spile.models.files.checkpoint import model_directory
from spile.objects.paths import AnyPath
from spile.plan.resolve import corpus_identity, pinned_recipe

UNANSWERABLE = "ends with no message to answer"


@dataclass(frozen=True)
class EnginePrompt:
    """A document to be continued, or the reason it is skipped.

    Attributes:
        text: what the model reads first: of a chat, as the template renders it.
        ids: its token ids.
        roles: the flag of each token's speaker.
        chat: its messages, if it is a chat.
        tools: descriptions of the tools that the chat may call.
        columns: the kept columns of its row.
    """

    ordinal: int
    skipped: str | None = None
    text: str = ""
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    roles: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))
    chat: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


class PromptCorpus:
    """The prompts of a corpus, cut into units."""

    def __init__(self, recipe: Recipe, unit_prompts: int, cache: str | None = None) -> None:
        """Find the corpus and settle how it is read.

        Args:
            recipe: only `PROMPT_OPTIONS` are used.
            unit_prompts: about how many prompts to put into a unit.
        """
        for name in ("model", "corpus"):
            if getattr(recipe, name) is None:
                raise ConfigError(f"--{name} is missing")
        recipe = pinned_recipe(recipe)
        assert recipe.model and recipe.corpus
        self._directory: AnyPath = model_directory(recipe.model)
        self._files = find_files(recipe.corpus, cache)
        if any(file.format.holds_ids for file in self._files):
            raise ConfigError(f"--corpus {recipe.corpus}: holds token ids; prompts must be texts")
        recipe = settle_chats(recipe, self._files)
        recipe = replace(recipe, generation_prompt=bool(recipe.messages or recipe.prompt_column))
        if recipe.response_column:  # a layout with answers: those are to be made anew
            recipe = replace(recipe, response_column=None)
        if recipe.prompt_column and recipe.template == "none":
            recipe = replace(recipe, generation_prompt=None)
        reading, digest = read_as(recipe, self._directory)
        self._reading: RowReader | None = unrendered(reading)
        self._template: ChatTemplate | None = template_of(reading)
        self.are_chats = self._template is not None
        keep = settled_columns(recipe.keep, self._files, recipe.text_column, self._reading)
        taken = [name for name in keep if name in COLUMNS]
        if taken and recipe.keep:
            raise ConfigError(f"--keep {taken[0]}: rollouts have a column of that name")
        self._keep = tuple(name for name in keep if name not in COLUMNS)
        self.recipe = recipe
        self._unit_prompts = unit_prompts
        self.tokenizer = TextTokenizer(
            self._directory, "none" if self.are_chats else recipe.special_tokens or "tokenizer"
        )
        self.files = tuple(
            {"path": str(file.path), "identity": identity}
            for file, identity in zip(
                self._files, corpus_identity(recipe, self._files, self._reading), strict=True
            )
        )
        self._digest = digest

    def identity(self) -> dict[str, Any]:
        """Return what defines the prompts, as JSON values."""
        told = {name: getattr(self.recipe, name) for name in PROMPT_OPTIONS}
        for name in ("model", "corpus", "template"):
            told[name] = lasting(told[name]) if told[name] else None
        kept = ",".join(self._keep) or "none"
        return {**told, "keep": kept, "unit_prompts": self._unit_prompts}

    @property
    def template_digest(self) -> str | None:
        return self._digest

    def open(self) -> "PromptReader":
        reader = CorpusReader(self._files, self._options(), reading=self._reading)
        return PromptReader(reader, self.tokenizer, self._template)

    def cut(self) -> tuple[list[Unit], dict[str, str]]:
        """Return the units of the corpus, and the type of each kept column."""
        recipe = self.recipe
        with closing(CorpusReader(self._files, self._options(), reading=self._reading)) as reader:
            refuse_missing_columns(reader, self._keep if recipe.keep else ())
            sampled, size = list[CorpusDocument](), 0
            for file in sampled_files(reader):
                documents, taken = reader.sample(file)
                sampled += documents.every
                size += taken
            each = max(1, size // max(1, len(sampled)))
            # (One "token" a byte: a unit is to hold so many prompts of the mean size.)
            options = CutOptions(
                unit_tokens=each * self._unit_prompts, density=1.0, keep=self._keep
                if recipe.keep else (), max_docs=recipe.max_docs, shuffle=recipe.shuffle_docs,
            )  # fmt: skip
            units = make_units(reader, options)
            units = without_duplicates(units, reader) if recipe.dedupe else units
            first = [document.columns or {} for document in sampled]
            return units, {name: _kind(row.get(name) for row in first) for name in self._keep}

    def _options(self) -> ReadOptions:
        recipe = self.recipe
        return ReadOptions(
            text_column=recipe.text_column,
            text_documents=recipe.text_documents or "line",
            filter=DocumentFilter(recipe.filter) if recipe.filter else None,
            selection=Selection(recipe.fraction, recipe.holdout, recipe.part or "rest"),
            max_doc_bytes=recipe.max_doc_bytes or MAX_DOC_BYTES,
            keep=self._keep,
        )


class PromptReader:
    """Reads the prompts of units; used by one thread at a time."""

    def __init__(
        self, reader: CorpusReader, tokenizer: TextTokenizer, template: ChatTemplate | None
    ) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self._pool = RenderPool(template) if template else None

    def read(self, unit: Unit) -> list[EnginePrompt]:
        """Return every document of a unit, in order, skipped or not."""
        documents = self._reader.read(unit.spans, unit.first_doc, unit.skip).every
        chats = [self._answerable(document) for document in documents]
        said = {
            document.ordinal: (document.chat, document.tools)
            for document in chats
            if document.chat is not None
        }
        rendered = [*self._pool.documents(chats)] if self._pool else chats
        usable = [document for document in rendered if document.skipped is None]
        user = ROLES["user"]
        ids, roles = self._tokenizer.encode_roles(
            [document.text for document in usable],
            [document.roles or ((0, len(document.text), user),) for document in usable],
        )
        tokens = {
            d.ordinal: both for d, both in zip(usable, zip(ids, roles, strict=True), strict=True)
        }
        return [_prompt(document, said, tokens) for document in rendered]

    def close(self) -> None:
        self._reader.close()
        if self._pool:
            self._pool.close()

    def _answerable(self, document: CorpusDocument) -> CorpusDocument:
        """Leave out an answer that a chat ends with: it is to be made anew."""
        if document.chat is None:
            return document
        chat = [_without_nulls(message) for message in document.chat]
        while chat and role_of(chat[-1]) == "assistant":
            chat.pop()
        if not chat or role_of(chat[-1]) == "system":
            document.skip(UNANSWERABLE)
            return document
        tools = [_without_nulls(tool) for tool in document.tools or ()] or None
        if self._pool is None:
            raise InputError(f"{document.where}: is a chat, and the others are texts")
        document.chat, document.tools = chat, tools
        return document


def _prompt(
    document: CorpusDocument,
    said: Mapping[int, Any],
    tokens: Mapping[int, tuple[np.ndarray, np.ndarray]],
) -> EnginePrompt:
    columns = document.columns or {}
    if document.skipped is not None:
        return EnginePrompt(document.ordinal, document.refusal or document.skipped, columns=columns)
    chat, tools = said.get(document.ordinal, (None, None))
    ids, roles = tokens[document.ordinal]
    if not len(ids):
        return EnginePrompt(document.ordinal, "no tokens", columns=columns)
    return EnginePrompt(document.ordinal, None, document.text, ids, roles, chat, tools, columns)


def _without_nulls(value: Any) -> Any:
    """Leave out fields without a value: a Parquet struct has the fields of all messages."""
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: _without_nulls(each) for key, each in items if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in cast(list[Any], value)]
    return value


def _kind(values: Iterable[Any]) -> str:
    """Return the type of a column in Parquet, from its first values."""
    kinds: set[type[Any]] = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    return "float64" if kinds and kinds <= {int, float} else "string"
