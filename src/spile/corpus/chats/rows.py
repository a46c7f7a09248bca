"""How a row of the corpus becomes a document: what a template makes of a chat, and who said what.

A plain text needs none of this; its column is read as it stands (`corpus.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import xxhash

from spile.core.config import Recipe, canonical_json, flag_of
from spile.core.errors import ConfigError, InputError
from spile.core.index import ROLES
from spile.corpus.chats.template import ChatTemplate, read_template
from spile.corpus.programs.program import ProgramDocument
from spile.objects.paths import AnyPath

_log = logging.getLogger("spile")

# Ranges of characters and the flag of whoever said them, in order.
Roles = tuple[tuple[int, int, int], ...]


class Unusable(Exception):
    """A row that is left out and counted, by this reason."""


@dataclass(frozen=True)
class Text:
    """What the model will read of a document, and whose words they are."""

    text: str
    roles: Roles = ()
    ids: np.ndarray | None = None  # where it came as token ids, in int32: it has no text then

    @property
    def content(self) -> bytes:
        """What documents are told apart by."""
        return self.text.encode() if self.ids is None else self.ids.tobytes()


class Reading(Protocol):
    """Makes documents of rows."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def flag(self) -> str:
        """What names the columns."""
        ...

    def document(self, row: Mapping[str, Any]) -> Text:
        """Raises Unusable, or ValueError for what can be no document of this kind."""
        ...


@dataclass(frozen=True)
class Chats:
    """A column of messages, through a chat template."""

    column: str
    template: ChatTemplate
    flag: str = "--messages"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def document(self, row: Mapping[str, Any]) -> Text:
        value = row.get(self.column)
        if value is None:
            raise Unusable("null")
        if not isinstance(value, list) or not all(
            isinstance(message, dict) for message in cast(list[Any], value)
        ):
            raise ValueError(f"{self.column!r} holds no list of messages; choose with --messages")
        messages = cast(list[dict[str, Any]], value)
        if not messages:
            raise Unusable("empty")
        return _rendered(self.template, messages)


@dataclass(frozen=True)
class Pairs:
    """Columns of prompts and responses, through a chat template or just joined."""

    prompt: str
    response: str | None
    prefix: str
    suffix: str
    template: ChatTemplate | None
    flag: str = "--prompt-column and --response-column"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.response) if self.response else (self.prompt,)

    def document(self, row: Mapping[str, Any]) -> Text:
        values = [row.get(column) for column in self.columns]
        if any(value is None for value in values):
            raise Unusable("null")
        for column, value in zip(self.columns, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(
                    f"{column!r} holds {type(value).__name__}, not text; choose others"
                )
        if not any(str(value).strip() for value in values):
            raise Unusable("empty")
        prompt, response = str(values[0]), str(values[1]) if self.response else ""
        if self.template:
            messages = [{"role": "user", "content": self.prefix + prompt + self.suffix}]
            messages += [{"role": "assistant", "content": response}] * bool(self.response)
            return _rendered(self.template, messages)
        pieces = (("template", self.prefix), ("user", prompt), ("template", self.suffix),
                  ("assistant", response))  # fmt: skip
        return joined(pieces)


def joined(pieces: tuple[tuple[str, str], ...]) -> Text:
    """A document of pieces by whoever said them."""
    text, roles = "", list[tuple[int, int, int]]()
    for role, piece in pieces:
        if piece:
            roles.append((len(text), len(text) + len(piece), ROLES[role]))
            text += piece
    return Text(text, tuple(roles))


def of_program(document: ProgramDocument, reading: "Reading | None") -> Text:
    """Raises Unusable, or ValueError where a template is needed and none is known."""
    if document.messages:
        if not isinstance(reading, Chats):
            raise ValueError("holds messages, not text: read them with --messages messages")
        return _rendered(reading.template, [dict(message) for message in document.messages])
    if document.text is None:
        raise Unusable("null")
    if not document.text.strip():
        raise Unusable("empty")
    return joined(document.segments) if document.segments else Text(document.text)


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> Text:
    try:
        rendered = template.render(messages)
    except InputError as error:
        _log.debug("%s", error)
        raise Unusable("refused by the chat template") from error
    roles: list[tuple[int, int, int]] = []
    reached = 0
    for start, stop, role in rendered.roles:
        if start > reached:
            roles.append((reached, start, ROLES["template"]))
        roles.append((start, stop, ROLES[role]))
        reached = stop
    if reached < len(rendered.text):
        roles.append((reached, len(rendered.text), ROLES["template"]))
    return Text(rendered.text, tuple(roles))


def read_as(recipe: Recipe, directory: AnyPath) -> tuple[Reading | None, str | None]:
    """How a recipe's rows become documents, and the hash of the template that is used."""
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
        return Chats(recipe.messages, template), digest
    assert recipe.prompt_column
    pairs = Pairs(
        recipe.prompt_column, recipe.response_column, recipe.prompt_prefix or "",
        recipe.prompt_suffix or "", template,
    )  # fmt: skip
    return pairs, digest


def of_value(value: bytes | str | None) -> Text | str:
    """Of Parquet: bytes, nothing, or why they are not read."""
    if value is None:
        return "null"
    return value if isinstance(value, str) else decoded(value)


def decoded(data: bytes) -> Text | str:
    try:
        return usable(data.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return "not UTF-8"


def usable(text: str | None) -> Text | str:
    """A document of a plain text, or why there is none."""
    if text is None:
        return "null"
    if not text.strip():
        return "empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can spell
        return "not UTF-8"
    return Text(text)
