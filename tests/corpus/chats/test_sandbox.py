"""Hostile templates: no side effect, one clear error, and no character without its owner."""

import time

import pytest

from spile.core.errors import InputError, SpileError
from spile.corpus.chats.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"}]
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}"


def render(template: str) -> str:
    return ChatTemplate(template, "m/chat_template.jinja").render(CHAT).text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}{{ messages[0]['__class__'].x }}",
        "{{ messages[0].content.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ ('{0.__class__.__mro__}').format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages|attr('__class__')).mro }}",
        "{{ [messages]|map(attribute='__class__')|list|first|attr('x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
        "{{ messages|random }}",
    ],
)
def test_escapes_and_what_is_random_are_refused_in_one_line(template: str) -> None:
    with pytest.raises(InputError, match=r"^m/chat_template.jinja: [^\n]+$"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a < 0 %}{% endfor %}" * 9,
        "{% for a in range(9999) %}{% set b = range(99999)|list %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(64) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        DOUBLING.replace("EXPRESSION", "ns.x ~ ns.x") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "ns.x + ns.x") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "ns.x.replace('a', ns.x)") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "ns.x|replace('a', ns.x)") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "ns.x.join(['a', ns.x, 'b'])") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]|join(ns.x)") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]") + "{% endfor %}{{ ns.x }}",
        DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]") + "{% endfor %}{{ ns.x|tojson }}",
        DOUBLING.replace("'ab'", "7").replace("EXPRESSION", "ns.x * ns.x") + "{% endfor %}",
        DOUBLING.replace("EXPRESSION", "ns.x") + "{{ ns.x * 9999999 }}{% endfor %}",
        "{% set x %}{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
        "{{ messages|tojson(indent=10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999d}'.format(1) }}",
        "{{ 'a'.center(9999999)|length }}",
        "{{ 'a'['ljust'](9999999)|length }}",
        "{{ (5).to_bytes(9999999, 'big')|length }}",
        "{{ 'a'|center(999999999) }}",
        "{{ 1.5|round(999999999, 'ceil') }}",
    ],
)
def test_what_has_no_end_or_is_huge_is_refused_soon(template: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"^m/chat_template.jinja: [^\n]+$"):
        render(template)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ not " * 3000,
    ],
)
def test_deep_nesting_is_refused(template: str) -> None:
    with pytest.raises(InputError, match=r"^m/chat_template.jinja: [^\n]+$"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'unclosed ",
        "{% endfor %}",
        "{{ nothing.of.this }}",
        "{{ messages|nofilter }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('line one\nline two\x1b[31m') }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_errors_of_templates_are_one_printable_line(template: str) -> None:
    with pytest.raises(InputError, match=r"^m/chat_template.jinja: [^\n\x1b]+$"):
        render(template)


@pytest.mark.parametrize(
    "expression",
    [
        "m.content * 2",
        "'%s' % m.content",
        "'{}'.format(m.content)",
        "m.content.format()",
        "m.content.center(9)",
        "m.content|title",
        "m.content|escape",
        "m.content|indent",
        "namespace(a=m.content)",
        "messages",
        "messages|tojson",
        "('so: ' + m.content)|tojson",
        "m.items()",
        "messages|join(attribute='content')",
        "('<'|safe) + m.content + '<'",
    ],
)
def test_a_text_that_cannot_be_followed_never_reaches_the_template(
    expression: str,
) -> None:
    with pytest.raises(SpileError):
        render("{% for m in messages %}{{ " + expression + " }}{% endfor %}")


def test_autoescape_is_refused() -> None:
    with pytest.raises(InputError, match="autoescape"):
        render("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("m.content", "Hello"),
        ("m['content']", "Hello"),
        ("m.get('content')", "Hello"),
        ("m.content|trim", "Hello"),
        ("m.content|string|upper", "HELLO"),
        ("m.content|default('x')", "Hello"),
        ("m.content|safe", "Hello"),
        ("m.content[1:]", "ello"),
        ("m.content[0]", "H"),
        ("m.content|first", "H"),
        ("m.content|reverse", "olleH"),
        ("m.content|list|join", "Hello"),
        ("m.content.split('l')|last", "o"),
        ("m.content|replace('Hel', '')", "lo"),
        ("m.content.replace('Hel', '')", "lo"),
        ("'<' ~ m.content ~ '>'", "Hello"),
        ("'<' + m.content + '>'", "Hello"),
        ("'-'.join([m.content])", "Hello"),
        ("[m.content]|join('-')", "Hello"),
        ("'<x>'.replace('x', m.content)", "Hello"),
        ("'<x>'|replace('x', m.content)", "Hello"),
        ("[m]|map(attribute='content')|join", "Hello"),
        ("[m]|map(attribute='content')|map('trim')|list|first", "Hello"),
        ("m.content|tojson", '"Hello"'),
        ("[m.content]|tojson", '["Hello"]'),
        ("[m.content]", "['Hello']"),
        ("joiner(m.content)", None),
        ("('<'|safe) + m.content", "Hello"),
    ],
)
def test_a_text_is_followed_through_every_way_of_writing_it(
    expression: str, said: str | None
) -> None:
    template = "{% set m = messages[0] %}[{{ " + expression + " }}]Hello"
    if said is None:
        with pytest.raises(InputError, match="cannot be followed"):
            render(template)
        return
    rendered = ChatTemplate(template).render(CHAT)
    assert [(rendered.text[a:b], role) for a, b, role in rendered.roles] == [(said, "user")]


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0].content) }}",
        "{% macro say() %}<{{ caller() }}>{% endmacro %}"
        "{% call say() %}{{ messages[0].content }}{% endcall %}",
        "{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}",
        "{% filter trim %} <{{ messages[0].content }}> {% endfilter %}",
        "{% set ns = namespace(x='<') %}{% set ns.x = ns.x + messages[0].content %}{{ ns.x }}>",
        "{% block a %}<{{ messages[0].content }}>{% endblock %}",
        "{% for c in messages[0].content %}{{ '<' if loop.first }}{{ c }}{% endfor %}>",
        "{% with x = messages[0].content %}<{{ x }}>{% endwith %}",
    ],
)
def test_a_text_is_followed_through_every_block(template: str) -> None:
    rendered = ChatTemplate(template).render(CHAT)
    assert (rendered.text, rendered.roles) == ("<Hello>", ((1, 6, "user"),))
