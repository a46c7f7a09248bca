"""Chats: the model's own chat template, and the speaker of each part of the text it makes.

A template is rendered twice: once plainly, which gives the text, and once with messages whose texts
are tracked, which gives the roles. The two must agree. Nothing is searched for, so the contents of
messages and repetitions in them do not matter.

The same chat gives the same text on every day. A template that asks for today's date gets the date
the user chose, or none (Llama's template then uses a default date).
"""

import datetime
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from spile.core.errors import ConfigError, InputError, SpileError, printable
from spile.corpus.chats.provenance import OwnedText, Owner, OwnerRuns, owned, owned_whole
from spile.objects.paths import AnyPath, path_of, read_json, size_of

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
_UNOWNED = frozenset({"role", "name", "tool_call_id"})  # fields that are not said by the speaker
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same field
_MAX_BYTES = 16 << 20  # largest template file
_MAX_DEPTH = 32  # deepest message


class TemplateLimit(InputError):
    """A template exceeded a limit of a rendering: steps, characters, memory, processor time."""


@dataclass(frozen=True)
class Rendered:
    """A chat as text.

    Attributes:
        text: the text the model reads; the template has added the special tokens.
        roles: ranges of characters (start, stop, role), in order, none empty, none overlapping;
            characters outside all ranges came from the template.
    """

    text: str
    roles: tuple[tuple[int, int, str], ...]
    turns: tuple[int, ...] = ()  # the message of each range, counted as they appear


class ChatTemplate:
    """A template and the special tokens it may name.

    It is an untrusted program: `pool.py` compiles and renders it in processes with limits.

    Attributes:
        text: the template itself.
        where: the file it came from.
        tokens: special tokens by their names, e.g. `bos_token`.
        system: a system message put before chats that do not begin with one; None for none.
        generation_prompt: whether the text ends where the assistant would begin to speak.
        date: the date the template gets when it asks for today's.
    """

    def __init__(
        self,
        text: str,
        where: str = "the chat template",
        *,
        tokens: Mapping[str, str] | None = None,
        system: str | None = None,
        generation_prompt: bool = False,
        date: datetime.date | None = None,
    ) -> None:
        self.text, self.tokens, self.date = text, dict(tokens or {}), date
        self.system, self.generation_prompt = system, generation_prompt
        self.where = where
        try:
            self._sandbox = importlib.import_module("spile.corpus.chats.sandbox")
        except ImportError:
            raise ConfigError(
                "chats need jinja2, 3.1.6 or newer: pip install 'spile[chat]'"
            ) from None

    def compile(self) -> None:
        """Compile the template; raise InputError if it is invalid."""
        _ = self._program

    @cached_property
    def _program(self) -> Any:
        try:
            return self._sandbox.CompiledTemplate(self.text, self.date)
        except Exception as error:  # an untrusted program may raise anything
            raise self._failure(error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered:
        """Return the text that `transformers` renders, plus the role of each range of it.

        Text between two pieces of one assistant message (the end of its reasoning, the syntax of
        its tool calls) also belongs to the assistant. If the template itself marks the assistant's
        text, by `{% generation %}`, its marks are used.

        Raises:
            InputError: if the messages are invalid, or the template refuses them or cannot be
                tracked.
            TemplateLimit: if the template exceeds a limit.
        """
        program, chat = self._program, plain_messages(messages)
        added = self.system is not None and (not chat or _role(chat[0]) != "system")
        if added:
            chat.insert(0, {"role": "system", "content": self.system})
        if not chat:
            raise InputError("a chat without messages")
        roles = [_role(message) for message in chat]
        variables = self.tokens | {
            "messages": chat,
            "tools": _plain(tools, "the tools"),
            "documents": _plain(documents, "the documents"),
            "add_generation_prompt": self.generation_prompt,
        }
        size = len(str(variables))
        try:
            text = program.render(variables, size, following=False)
            variables["messages"] = _owned(chat)
            followed = program.render(variables, size, following=True)
        except Exception as error:  # as above
            raise self._failure(error) from None
        if followed != text:
            raise InputError(
                f"{self.where}: cannot determine which message each character came from"
            )
        runs = followed.runs if isinstance(followed, OwnedText) else ()
        ranges, turns = self._ranges(runs, roles)
        if (
            added
            and chat[0]["content"].strip()
            and not any(role == "system" for *_, role in ranges)
        ):
            raise InputError(f"{self.where}: it does not show the system message of --system")
        return Rendered(text, ranges, turns)

    def _ranges(
        self, runs: OwnerRuns, roles: Sequence[str]
    ) -> tuple[tuple[tuple[int, int, str], ...], tuple[int, ...]]:
        ranges: list[tuple[int, int, str]] = []
        turns: list[int] = []
        numbers: dict[int | Owner, int] = {}  # of messages, and of what the template marks
        last: int | None = None  # the message of the last range
        named: set[Owner] = set()  # calls whose name was written: the second time it is a quotation
        for start, stop, owner in runs:
            message, part = owner
            turn: int | Owner = message
            if owner == self._sandbox.GENERATED:
                ranges.append((start, stop, "assistant"))
                turn = start, stop
            elif roles[message] != "assistant":
                ranges.append((start, stop, roles[message]))
            elif self._program.marks_assistant or owner in named:
                continue
            else:
                ranges.append((ranges.pop()[0] if message == last else start, stop, "assistant"))
                named |= {owner} if part else set()
            last = message
            number = numbers.setdefault(turn, len(numbers))
            turns += [number] * (len(ranges) - len(turns))
        return tuple(ranges), tuple(turns)

    def _failure(self, error: Exception) -> InputError:
        kind = InputError
        if isinstance(error, SpileError):
            reason = error.message
            kind = TemplateLimit if isinstance(error, TemplateLimit) else InputError
        elif isinstance(error, RecursionError | MemoryError):
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else "it takes more memory than it may"
            kind = TemplateLimit
        else:
            reason = " ".join(str(error)[:2000].split()) or type(error).__name__
        return kind(printable(f"{self.where}: {reason[:500]}"))


def read_template(
    directory: AnyPath,
    file: str | None,
    *,
    system: str | None = None,
    generation_prompt: bool = False,
) -> ChatTemplate:
    """Read a model's chat template, or the one in a given file.

    As in `transformers`, `chat_template.jinja` takes precedence over `tokenizer_config.json`; among
    several named templates the default is used.

    Raises:
        InputError: if there is no template, or it is invalid.
    """
    settings = _read_object(directory / "tokenizer_config.json")
    where, text = _find_template(directory, file, settings)
    if "added_tokens_decoder" not in settings:  # an old format, in which this file was used
        settings = settings | _read_object(directory / "special_tokens_map.json")
    return ChatTemplate(
        text,
        str(where),
        tokens=_special_tokens(settings),
        system=system,
        generation_prompt=generation_prompt,
    )


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat as templates expect it.

    Raises:
        InputError: if it holds anything but messages of JSON's types.
    """
    return [_message(message, f"message {i}") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message as templates expect it: only JSON's types, and no null fields."""
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: not an object with role and content, but {message!r:.80}")
    plain = _plain(message, where)
    # A Parquet struct has the fields of all messages; templates test whether a field exists.
    plain = {key: plain[key] for key in plain if plain[key] is not None or key == "content"}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
    role = plain.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InputError(f"{where}: its role is {role!r:.80}, expected one of {', '.join(_ROLES)}")
    return plain


def _role(message: Mapping[str, Any]) -> str:
    return _ROLES[message["role"]]


def _owned(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(chat):
        said = {key: value for key, value in message.items() if key not in _UNOWNED}
        said = dict(message) | {key: owned(value, (i, 0)) for key, value in said.items()}
        calls: Any = said.get("tool_calls")
        for number, call in enumerate(cast(list[Any], calls) if isinstance(calls, list) else (), 1):
            _number_name(call, (i, number))
        messages.append(said)
    return messages


def _number_name(call: Any, owner: Owner) -> None:
    """Give a call's name its own owner: templates write it again before the result."""
    if isinstance(call, dict):
        fields = cast(dict[str, Any], call)
        if isinstance(fields.get("name"), str):
            fields["name"] = owned_whole(fields["name"], owner)
        _number_name(fields.get("function"), owner)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise InputError(f"{where}: nested too deeply: {_MAX_DEPTH} levels at most")
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        if not all(type(key) is str for key, _ in items):
            raise InputError(f"{where}: has a field whose name is not a text")
        return {key: _plain(item, where, depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in cast(Sequence[Any], value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise InputError(f"{where}: holds a {type(value).__name__}, which is not a JSON type")


def _find_template(
    directory: AnyPath, file: str | None, settings: Mapping[str, Any]
) -> tuple[AnyPath, str]:
    if file is not None:
        if (text := _read_text(path_of(file))) is None:
            raise InputError(f"--template: {file}: no such file")
        return path_of(file), text
    path = directory / "chat_template.jinja"
    if (text := _read_text(path)) is not None:
        return path, text
    path = directory / "tokenizer_config.json"
    template = settings.get("chat_template")
    if template is None:
        path = directory / "chat_template.json"
        template = _read_object(path).get("chat_template")
    if isinstance(template, list):
        named = [cast(Any, each) for each in cast(list[Any], template) if isinstance(each, dict)]
        template = {each.get("name"): each.get("template") for each in named}
    if isinstance(template, dict):
        template = cast(dict[Any, Any], template).get("default")
    if template is None:
        raise InputError(f"{directory}: this model has no chat template; give one with --template")
    if not isinstance(template, str):
        raise InputError(f"{path}: its chat_template is not a text")
    return path, template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = settings.get("extra_special_tokens")
    extra = cast(dict[str, Any], named) if isinstance(named, dict) else {}
    tokens: dict[str, str] = {}
    for name, token in {**settings, **extra}.items():
        if name.endswith("_token") or name in extra:
            text = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _read_object(path: AnyPath) -> dict[str, Any]:
    return read_json(path, max_bytes=_MAX_BYTES, missing_ok=True)


def _read_text(path: AnyPath) -> str | None:
    """Return the contents of a file; None if it does not exist."""
    try:
        if size_of(path) > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES} bytes")
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
