"""Chats: the text and the assistant's tokens are those of transformers, for published templates."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from spile.core.errors import InputError
from spile.corpus.chats.template import (
    ChatTemplate,
    Rendered,
    read_template,
)
from support.marks import examples, some
from support.texts import token_roles

FIXTURES = Path(__file__).parents[2] / "fixtures" / "templates"
PUBLISHED: dict[str, dict[str, str]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*.json"))
}
# The reference: the published template, with `generation` put around what the assistant says.
SAID = (
    "{%- if message['role'] == 'assistant' -%}{%- generation -%}{{- CONTENT -}}"
    "{%- endgeneration -%}{%- else -%}{{- CONTENT -}}{%- endif -%}"
)
MARKED = {
    "Llama-3.2-Instruct": (
        "'+ message['content'] | trim + '<|eot_id|>' }}",
        "' }}" + SAID.replace("CONTENT", "message['content'] | trim") + "{{- '<|eot_id|>' }}",
    ),
    "Mistral-Nemo-Instruct-2407": (
        '{{- message["content"] + eos_token}}',
        '{%- generation %}{{- message["content"] }}{%- endgeneration %}{{- eos_token }}',
    ),
    "Qwen2.5-Instruct": (
        "'\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- elif",
        "'\\n' }}"
        + SAID.replace("CONTENT", "message.content")
        + "{{- '<|im_end|>' + '\\n' }}\n    {%- elif",
    ),
    "Qwen3": (
        "'\\n' + content }}",
        "'\\n' }}{%- generation %}{{- content }}{%- endgeneration %}",
    ),
    "SmolLM2-135M-Instruct": (
        "' + message['content'] + '<|im_end|>' + '\n'}}",
        "'}}" + SAID.replace("CONTENT", "message['content']") + "{{ '<|im_end|>' + '\n'}}",
    ),
    "gemma-3-it": (
        "{{ message['content'] | trim }}",
        SAID.replace("CONTENT", "message['content'] | trim"),
    ),
}
REASONING = (
    "'\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' "
    "+ content.lstrip('\\n') }}",
    "'\\n<think>\\n' }}{%- if reasoning_content.strip('\\n') %}{%- generation %}"
    "{{- reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- endgeneration %}{%- else %}{{- '\\n</think>\\n\\n' }}{%- generation %}"
    "{{- content.lstrip('\\n') }}{%- endgeneration %}{%- endif %}",
)
TRIMS = {"Llama-3.2-Instruct", "gemma-3-it"}
CONTENTS = {
    "several turns": ["Hello there.", "Hi, how are you?", "Fine. 2 + 2?", "It is 4.", "Ok", "Bye"],
    "the same again": ["user", "user", "user", "user", "assistant", "system"],
    "all of Unicode": [
        "Grüße, 東京 👩‍👩‍👧",
        "naïve \u200b\ufeff مرحبا.",
        "🌳🌳 e\u0301",
        "🏳️‍🌈 yes",
    ],
    "special tokens": [
        "<|im_end|>\n<|im_start|>assistant\nno",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nno",
        "<end_of_turn>\n<start_of_turn>model\nno",
        "</s>[INST] no [/INST]<s>",
    ],
    "Jinja": ["{{ 7 * 7 }}{% raw %}", "{% generation %}{{ messages }}", "{# no #}", "{{ '{{' }}"],
    "white space": ["\n  a b \t\n", " \n c\n\n", "d\u3000", "\re\r\n "],
    "empty": ["", "", "x", ""],
    "private use": ["\ue000\ue001", "\U000f0000a\U000f0001", "\ue000", "\ue001."],
}
WORDS = ["user", "assistant", "\n", " ", "<|im_end|>", "</think>", "<think>", "é", "👋", "{{ x }}"]


def chat(contents: Sequence[str], system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [*([{"role": "system", "content": system}] if system is not None else []), *turns]


def special_tokens(name: str) -> dict[str, str]:
    return {key: value for key, value in PUBLISHED[name].items() if key.endswith("_token")}


def marked(name: str) -> str:
    """Replace a part of the reference template; the part must exist."""
    template = PUBLISHED[name]["chat_template"]
    for old, new in (MARKED[name], *([REASONING] if name == "Qwen3" else [])):
        assert old in template
        template = template.replace(old, new)
    return template


def said(rendered: Rendered) -> list[tuple[str, str]]:
    return [(role, rendered.text[start:stop]) for start, stop, role in rendered.roles]


def by_transformers(name: str, template: str, messages: Any, **options: Any) -> Any:
    """Return the text, and the ranges of characters that the assistant wrote."""
    render: Any = render_jinja_template
    options |= special_tokens(name)
    texts, ranges = render([messages], chat_template=template, **options)
    return texts[0], ranges[0] if ranges else None


def today(name: str, **options: Any) -> ChatTemplate:
    """A published template, with the date at which transformers renders it."""
    return ChatTemplate(
        PUBLISHED[name]["chat_template"],
        name,
        tokens=special_tokens(name),
        date=datetime.datetime.now().date(),
        **options,
    )


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    """Byte-level BPE, as in most families, with all their special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = "<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> "
    special += "<|eot_id|> <bos> <start_of_turn> <end_of_turn> <s> </s> [INST] [/INST] <unk> <pad>"
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=special.split(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [text for contents in CONTENTS.values() for text in contents]
    tokenizer.train_from_iterator([*texts * 3, "assistant\nuser\n\nsystem.\n" * 9], trainer)
    return tokenizer


def reference(backend: Tokenizer, name: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(name))


def test_four_families_and_more_are_here() -> None:
    assert set(PUBLISHED) == set(MARKED) and len(MARKED) == 6


@pytest.mark.parametrize(
    ("kind", "system"),
    some(
        product(CONTENTS, [None, " Be brief.\n"]),
        ("several turns", None),
        *((kind, " Be brief.\n") for kind in list(CONTENTS)[1:]),
    ),
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_text_and_assistant_tokens_are_those_of_transformers(
    name: str, kind: str, system: str | None, backend: Tokenizer
) -> None:
    contents = CONTENTS[kind]
    tokenizer = reference(backend, name)
    messages = chat(contents, system)
    for prompt in (False, True):
        rendered = today(name, generation_prompt=prompt).render(messages)
        template, options = PUBLISHED[name]["chat_template"], {"add_generation_prompt": prompt}
        assert rendered.text == tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )
        wanted = tokenizer.apply_chat_template(
            messages,
            chat_template=marked(name),
            return_assistant_tokens_mask=True,
            return_dict=True,
            **options,
        )
        encoding = backend.encode(rendered.text, add_special_tokens=False)
        assert encoding.ids == wanted["input_ids"]
        roles = token_roles(encoding.offsets, rendered)
        assert [int(role == "assistant") for role in roles] == wanted["assistant_masks"]
        assert 1 in wanted["assistant_masks"] or not any(contents[1::2])


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("name", PUBLISHED)
def test_ranges_are_exactly_what_the_messages_say(name: str, contents: list[str]) -> None:
    messages = chat(contents, "\tBe brief. ")
    if name.startswith("Mistral"):
        messages = messages[:-1]  # it shows the system message only before a last user's
    wanted = [
        (message["role"], message["content"].strip() if name in TRIMS else message["content"])
        for message in messages
    ]
    if name == "gemma-3-it":
        wanted[0] = ("system", "\tBe brief. ")
    elif name == "Qwen3":
        wanted[-1] = (wanted[-1][0], wanted[-1][1].lstrip("\n"))
    elif name.startswith("Mistral"):
        wanted.insert(-1, wanted.pop(0))
    rendered = today(name).render(messages)
    assert said(rendered) == [each for each in wanted if each[1]]


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map("".join), min_size=1, max_size=5),
)
def test_character_by_character_as_transformers_whatever_is_said(
    name: str, contents: list[str]
) -> None:
    messages = chat(contents)
    assume(name != "Qwen3" or not any(text.rstrip().endswith("</think>") for text in contents))
    rendered = today(name).render(messages)
    text, wanted = by_transformers(name, marked(name), messages, return_assistant_tokens_mask=True)
    assert rendered.text == text
    found = [(a, b) for a, b, role in rendered.roles if role == "assistant"]
    assert found == [(a, b) for a, b in wanted if a < b]


def test_text_a_template_adds_after_an_unanswered_thought_has_no_speaker() -> None:
    rendered = today("Qwen3").render(chat(["", "hm</think>"]))
    assert "<think>\nhm\n</think>" in rendered.text
    assert said(rendered) == [("assistant", "hm")]


def test_a_character_of_several_tokens_is_whole_the_assistants(backend: Tokenizer) -> None:
    """Return where transformers' mask ends at the first of these."""
    messages = chat(["Hi", "ends with 𓆉"])
    rendered = today("Qwen2.5-Instruct").render(messages)
    encoding = backend.encode(rendered.text, add_special_tokens=False)
    wanted = reference(backend, "Qwen2.5-Instruct").apply_chat_template(
        messages,
        chat_template=marked("Qwen2.5-Instruct"),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )["assistant_masks"]
    roles = token_roles(encoding.offsets, rendered)
    assert roles.count("assistant") == sum(wanted) + 3
    mine = [i for i, role in enumerate(roles) if role == "assistant"]
    assert backend.decode([encoding.ids[i] for i in mine]) == "ends with 𓆉"


def test_reasoning_is_the_assistants_where_the_template_shows_it() -> None:
    messages = chat(["a?", "<think>\nhm\n</think>\n\nb.", "c?", "<think>\nso\n</think>\n\nd."])
    assert said(today("Qwen3").render(messages)) == [
        ("user", "a?"),
        ("assistant", "b."),
        ("user", "c?"),
        ("assistant", "so\n</think>\n\nd."),
    ]
    apart: list[dict[str, Any]] = chat(["c?", "d."])
    for key in ("reasoning_content", "thinking", "reasoning"):
        apart[1] = {"role": "assistant", "content": "d.", key: "so"}
        rendered = today("Qwen3").render(apart)
        assert said(rendered)[1] == ("assistant", "so\n</think>\n\nd.")
        template = PUBLISHED["Qwen3"]["chat_template"]
        assert rendered.text == by_transformers("Qwen3", template, apart)[0]


CALL = {"name": "add", "arguments": {"a": 1, "b": "due"}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + due?"},
    {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "function": CALL}], "content": ""},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"},
    {"role": "assistant", "content": "3."},
]


@pytest.mark.parametrize(
    ("name", "call", "result"),
    [
        ("Qwen2.5-Instruct", 'add", "arguments": {"a": 1, "b": "due"}', "3"),
        ("Qwen3", 'add", "arguments": {"a": 1, "b": "due"}', "3"),
        ("Llama-3.2-Instruct", 'add", "parameters": {"a": 1, "b": "due"}', '"3"'),
        (
            "Mistral-Nemo-Instruct-2407",
            '{"name": "add", "arguments": {"a": 1, "b": "due"}, "id": "abcdefghi',
            "3",
        ),
    ],
)
def test_tool_calls_are_the_assistants_and_results_the_tools(
    name: str, call: str, result: str
) -> None:
    rendered = today(name).render(CALLING, tools=TOOLS)
    template = PUBLISHED[name]["chat_template"]
    assert rendered.text == by_transformers(name, template, CALLING, tools=TOOLS)[0]
    assert said(rendered) == [
        ("user", "1 + due?"),
        ("assistant", call),
        ("tool", result),
        ("assistant", "3."),
    ]


def test_a_calls_name_before_its_result_is_the_templates() -> None:
    """As in gpt-oss: the text between the two names does not belong to the assistant."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls %}"
        "to={{ c.function.name }} {{ c.function.arguments|tojson }};{% endfor %}"
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name }}: "
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    two = [{"function": CALL}, {"function": {**CALL, "name": "add"}}]
    rendered = ChatTemplate(template).render(
        [CALLING[0], {**CALLING[1], "tool_calls": two}, CALLING[2]]
    )
    assert rendered.text.endswith("<tool>add: 3")
    call = 'add {"a": 1, "b": "due"}'
    assert said(rendered)[1:] == [("assistant", f"{call};to={call}"), ("tool", "3")]


def test_contents_in_parts_are_followed_where_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "image"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ]
    rendered = today("gemma-3-it").render(messages)
    assert "one<start_of_image>two" in rendered.text
    assert said(rendered) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("user", "two"),
        ("assistant", "three"),
    ]
    with pytest.raises(InputError, match="^Qwen2.5-Instruct: "):
        today("Qwen2.5-Instruct").render(messages)


def test_a_template_that_marks_the_assistant_is_believed() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and loop.last %}"
        "{% generation %} {{ m.content }};{% endgeneration %}{% else %} {{ m.content }};{% endif %}"
        "{% endfor %}"
    )
    rendered = ChatTemplate(template).render(chat(["a", "b", "c", "d"]))
    assert rendered.text == "user: a;assistant: b;user: c;assistant: d;"
    assert said(rendered) == [("user", "a"), ("user", "c"), ("assistant", " d;")]


def test_the_system_message_comes_first_unless_there_is_one() -> None:
    template = today("Qwen2.5-Instruct", system="Be brief.")
    assert said(template.render(chat(["a"]))) == [("system", "Be brief."), ("user", "a")]
    assert said(template.render(chat(["a"], "Be long."))) == [("system", "Be long."), ("user", "a")]
    developer = [{"role": "developer", "content": "x"}, *chat(["a"])]
    assert "Be brief." not in template.render(developer).text
    with pytest.raises(InputError, match="does not show the system message"):
        ChatTemplate("{{ messages[-1].content }}", system="Be brief.").render(chat(["a"]))


def test_the_date_is_the_one_chosen_or_the_templates_own() -> None:
    published = PUBLISHED["Llama-3.2-Instruct"]["chat_template"]
    chosen = ChatTemplate(published, date=datetime.date(2025, 3, 1)).render(chat(["a"]))
    assert "Today Date: 01 Mar 2025\n" in chosen.text
    assert "Today Date: 26 Jul 2024\n" in ChatTemplate(published).render(chat(["a"])).text


def test_roles_by_other_names_are_known_and_unknown_ones_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    names = {"developer": "system", "function": "tool", "ipython": "tool"}
    rendered = template.render([{"role": name, "content": "x"} for name in names])
    assert rendered.text == "developer=x;function=x;ipython=x;"
    assert [role for *_, role in rendered.roles] == list(names.values())
    for role in ("gpt", None, 3, ["user"]):
        with pytest.raises(InputError, match="message 1: its role is"):
            template.render([*chat(["a"]), {"role": role, "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "without messages"),
        (["Hi"], "message 0: not an object"),
        ([{"role": "user", "content": b"Hi"}], "message 0: holds a bytes"),
        ([{"role": "user", "content": {1: 2}}], "message 0: has a field whose name is not a text"),
        ([{"role": "user", "content": datetime.date(2025, 3, 1)}], "message 0: holds a date"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        today("Qwen3").render(messages)


def test_a_message_without_end_is_refused() -> None:
    endless: dict[str, Any] = {"role": "user"}
    endless["content"] = [endless]
    with pytest.raises(InputError, match="nested too deeply"):
        today("Qwen3").render([endless])


def test_what_a_template_refuses_is_said_with_its_place() -> None:
    with pytest.raises(InputError, match="^gemma-3-it: Conversation roles must alternate"):
        today("gemma-3-it").render([*chat(["a"]), *chat(["b"])])


def test_null_fields_are_as_if_absent() -> None:
    """In Parquet, every message of a column has the fields of all messages."""
    nulls = [{**message, "tool_calls": None, "name": None} for message in chat(["a", "b"])]
    for name in PUBLISHED:
        assert today(name).render(nulls) == today(name).render(chat(["a", "b"]))


def test_long_chats_are_rendered() -> None:
    contents = ["word " * 2000] * 400
    rendered = today("Qwen3").render(chat(contents))
    assert sum(stop - start for start, stop, _ in rendered.roles) == 400 * 10_000


def test_a_token_across_a_border_is_the_assistants_or_of_its_first_owner() -> None:
    rendered = Rendered("..uuaass..", ((2, 4, "user"), (4, 6, "assistant"), (6, 8, "system")))
    offsets = [(0, 0), (0, 2), (1, 3), (3, 5), (5, 7), (2, 8), (6, 9), (8, 10), (4, 4), (10, 10)]
    assert token_roles(offsets, rendered) == [
        "template",
        "template",
        "user",
        "assistant",
        "assistant",
        "assistant",
        "system",
        "template",
        "template",
        "template",
    ]


def write(directory: Path, name: str, value: Mapping[str, Any] | str) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text, encoding="utf-8")


def text_of(directory: Path) -> str:
    return read_template(directory, None).render(chat(["a"])).text


def test_a_template_is_read_from_where_transformers_reads_it(
    tmp_path: Path, backend: Tokenizer
) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no chat template; give one with --template"):
        read_template(tmp_path, None)
    write(tmp_path, "chat_template.json", {"chat_template": "processor"})
    assert text_of(tmp_path) == "processor"
    content = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
    settings = {"bos_token": {**content, "__type": "AddedToken"}, "eos_token": "</s>"}
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}named{{ eos_token }}{{ pad_token }}"},
    ]
    write(tmp_path, "tokenizer_config.json", {**settings, "chat_template": named})
    assert text_of(tmp_path) == "<s>named</s>"
    write(tmp_path, "special_tokens_map.json", {"pad_token": {"content": "<pad>"}})
    for step in ("named", "single", "file"):
        if step == "single":
            single = {**settings, "chat_template": "{{ bos_token }}single{{ pad_token }}\n"}
            write(tmp_path, "tokenizer_config.json", single)
        if step == "file":
            write(tmp_path, "chat_template.jinja", "{{ bos_token }}file é\r\n{{ eos_token }}\n")
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert step in text_of(tmp_path)
        assert text_of(tmp_path) == loaded.apply_chat_template(chat(["a"]), tokenize=False)
    write(tmp_path, "mine.jinja", "mine {{ bos_token }}")
    mine = read_template(tmp_path, str(tmp_path / "mine.jinja"), system="s")
    assert (mine.text, mine.tokens["bos_token"], mine.system) == (
        "mine {{ bos_token }}",
        "<s>",
        "s",
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("tokenizer_config.json", b"[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "its chat_template is not a text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}, 3]}', "no chat template"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", b"{% if %}", "chat_template.jinja: "),
    ],
)
def test_what_is_no_template_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_template(tmp_path, None).compile()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--template: .*none.jinja: no such file"):
        read_template(tmp_path, str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("version", [None, "3.1.5"])
def test_without_jinja_or_with_a_leaky_one_chats_are_refused(
    version: str | None, tmp_path: Path
) -> None:
    if version is None:
        write(tmp_path, "jinja2.py", "raise ImportError")
    else:
        (tmp_path / f"jinja2-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: jinja2\nVersion: {version}\n"
        write(tmp_path / f"jinja2-{version}.dist-info", "METADATA", metadata)
    program = "from spile.corpus.chats.template import ChatTemplate as C; C('{{ messages }}')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert "ConfigError: chats need jinja2, 3.1.6 or newer" in ended.stderr


def test_each_message_is_a_turn_whatever_its_pieces() -> None:
    """A message that the template shows in two pieces is one turn; equal messages are several."""
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content[:2] }}|{{ m.content[2:] }}{% endfor %}"
    )
    rendered = template.render(chat(["hello", "hello", "hello"]))
    texts = [rendered.text[start:stop] for start, stop, _ in rendered.roles]
    shown = [*zip(rendered.turns, texts, strict=True)]
    assert shown == [(0, "he"), (0, "llo"), (1, "he|llo"), (2, "he"), (2, "llo")]


def test_what_the_template_marks_as_the_assistants_are_turns() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}>{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    rendered = template.render(chat(["a", "b", "c", "d"]))
    assert said(rendered) == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert rendered.turns == (0, 1, 2, 3)
