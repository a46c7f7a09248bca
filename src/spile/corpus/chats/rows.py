"""Turn a row of the corpus into a document, or into a chat for a template to render.

A plain text needs none of this: `reader.py` reads its column directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import xxhash

from spile.core.config import Recipe, canonical_json, flag_of
from spile.core.errors import ConfigError
from spile.core.index import ROLES
from spile.corpus.chats.messages import SYSTEM, TOOLS, messages_in, role_of, tools_in
from spile.corpus.chats.template import ChatTemplate, read_template
from spile.corpus.documents import CorpusDocument, value_at
from spile.corpus.programs.program import ProgramDocument
from spile.corpus.select import BLANK, EMPTY
from spile.objects.paths import AnyPath


class RowReader(Protocol):
    """Makes documents from rows."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def flag(self) -> str:
        """The flag that names the columns."""
        ...

    def document(self, row: Mapping[str, Any]) -> CorpusDocument:
        """Return a document, or one whose `chat` is still to be rendered.

        Raises:
            ValueError: if the row cannot be a document of this kind.
        """
        ...


@dataclass(frozen=True)
class Chats:
    """Columns of messages, joined in their order and rendered by a chat template.

    Without a template chats stay messages.
    """

    columns: tuple[str, ...]
    template: ChatTemplate | None
    flag: str = "--messages"

    @classmethod
    def parse(cls, messages: str, template: ChatTemplate) -> Self:
        """Parse `--messages`: columns joined by +."""
        columns = tuple(messages.split("+"))
        if not all(columns):
            raise ConfigError(
                f"--messages {messages!r}: columns are joined by +, as in system+conversations"
            )
        return cls(columns, template)

    def document(self, row: Mapping[str, Any]) -> CorpusDocument:
        messages, system, tools = list[dict[str, Any]](), "", None
        for column in self.columns:
            value = value_at(row, column)
            if column == TOOLS:
                tools = tools_in(value)
            elif column == SYSTEM and (value is None or isinstance(value, str)):
                system = value or ""
            elif value is None:
                return CorpusDocument(skipped="null")
            else:
                messages += messages_in(column, value)
        if not messages:
            return CorpusDocument(skipped=EMPTY)
        if system.strip() and role_of(messages[0]) != SYSTEM:
            messages.insert(0, {"role": SYSTEM, "content": system})
        return CorpusDocument(chat=messages, tools=tools)


@dataclass(frozen=True)
class Pairs:
    """Columns of prompts and responses, rendered by a chat template or joined.

    Attributes:
        as_chats: whether they are chats that stay messages, if there is no template.
    """

    prompt: str
    response: str | None
    prefix: str
    suffix: str
    template: ChatTemplate | None
    as_chats: bool = False
    flag: str = "--prompt-column and --response-column"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.response) if self.response else (self.prompt,)

    def document(self, row: Mapping[str, Any]) -> CorpusDocument:
        values = [value_at(row, column) for column in self.columns]
        if any(value is None for value in values):
            return CorpusDocument(skipped="null")
        for column, value in zip(self.columns, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(
                    f"{column!r} holds {type(value).__name__}, not text; choose others"
                )
        if not any(str(value).strip() for value in values):
            return CorpusDocument(skipped=BLANK if any(values) else EMPTY)
        prompt, response = str(values[0]), str(values[1]) if self.response else ""
        if self.template or self.as_chats:
            messages = [{"role": "user", "content": self.prefix + prompt + self.suffix}]
            messages += [{"role": "assistant", "content": response}] * bool(self.response)
            return CorpusDocument(chat=messages)
        pieces = (("template", self.prefix), ("user", prompt), ("template", self.suffix),
                  ("assistant", response))  # fmt: skip
        return joined(pieces)


def joined(pieces: tuple[tuple[str, str], ...]) -> CorpusDocument:
    """Make a document from pieces, each with the role of its speaker."""
    text, roles, turns = "", list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for role, piece in pieces:
        if piece:
            roles.append((len(text), len(text) + len(piece), ROLES[role]))
            if role != "template":
                turns.append((len(text), len(text) + len(piece), len(turns)))
            text += piece
    return CorpusDocument(text, tuple(roles), tuple(turns))


def of_program(document: ProgramDocument, reading: "RowReader | None") -> CorpusDocument:
    """Make a document from a program's; raise ValueError if it needs a template and has none."""
    if isinstance(reading, Pairs):
        return reading.document(document.pair)
    if document.messages:
        if not isinstance(reading, Chats):
            raise ValueError("holds messages, not text: read them with --messages messages")
        return CorpusDocument(chat=[dict(message) for message in document.messages])
    if document.text is None:
        return CorpusDocument(skipped="null")
    if not document.text.strip():
        return CorpusDocument(skipped=BLANK if document.text else EMPTY)
    return joined(document.segments) if document.segments else CorpusDocument(document.text)


def template_of(reading: RowReader | None) -> ChatTemplate | None:
    """Return the template that a reader uses, or None."""
    return reading.template if isinstance(reading, Chats | Pairs) else None


def unrendered(reading: RowReader | None) -> RowReader | None:
    """Return a reader whose chats stay messages, for a server that renders them itself."""
    if isinstance(reading, Pairs):
        return replace(reading, template=None, as_chats=reading.template is not None)
    return replace(reading, template=None) if isinstance(reading, Chats) else reading


def read_as(recipe: Recipe, directory: AnyPath) -> tuple[RowReader | None, str | None]:
    """Return the reader for a recipe's rows, and the hash of its template."""
    if recipe.messages and recipe.prompt_column:
        raise ConfigError("--messages and --prompt-column both say where the chats are; choose one")
    if recipe.response_column and not recipe.prompt_column:
        raise ConfigError("--response-column needs --prompt-column")
    if not (recipe.messages or recipe.prompt_column):
        for name in ("prompt_prefix", "prompt_suffix", "system", "template", "generation_prompt"):
            if getattr(recipe, name):
                raise ConfigError(f"{flag_of(name)} needs --messages or --prompt-column")
        return None, None
    if recipe.text_column:
        raise ConfigError("--text-column is for plain texts; chats have columns of their own")
    template = None
    if recipe.template != "none":
        template = read_template(
            directory, recipe.template, system=recipe.system,
            generation_prompt=bool(recipe.generation_prompt),
        )  # fmt: skip
    elif recipe.messages or recipe.system or recipe.generation_prompt:
        raise ConfigError("--template none goes with --prompt-column alone")
    digest = "none"
    if template:
        parts = [template.text, template.tokens]
        digest = xxhash.xxh3_128_hexdigest(canonical_json(parts))
    if recipe.messages:
        assert template
        return Chats.parse(recipe.messages, template), digest
    assert recipe.prompt_column
    pairs = Pairs(
        recipe.prompt_column, recipe.response_column, recipe.prompt_prefix or "",
        recipe.prompt_suffix or "", template,
    )  # fmt: skip
    return pairs, digest
