"""Templates that would run forever or fill the memory end soon, with an error of one line."""

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from spile.core.errors import InputError, Interrupted
from spile.core.limited_process import ProcessLimits
from spile.core.threads import cancelled_by
from spile.corpus.chats.pool import RenderPool
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
from support import tiny, zygote
from support.marks import some
from support.stops import StopAtLook

WHERE = "m/chat_template.jinja"
LIMITS = ProcessLimits(seconds=0.3, memory=256 << 20)

# Two lists (or tuples) that are equal, and of which it takes 2**60 comparisons to see that.
DEEP = (
    "{% set ns = namespace(a=START, b=START) %}{% for i in range(60) %}"
    "{% set ns.a = LEFT ns.a, ns.a RIGHT %}{% set ns.b = LEFT ns.b, ns.b RIGHT %}{% endfor %}"
)
LISTS = DEEP.replace("START", "[1]").replace("LEFT", "[").replace("RIGHT", "]")
TUPLES = DEEP.replace("START", "(1,)").replace("LEFT", "(").replace("RIGHT", ")")
# A long text, and anything done to it very often.
LONG = "{% set x = 'ab' * 9999999 %}{% for i in range(99999) %}{% set y = EXPRESSION %}{% endfor %}"
SLOW = {
    "lists compared": LISTS + "{{ ns.a == ns.b }}",
    "lists ordered": LISTS + "{{ ns.a < ns.b }}",
    "lists looked for": LISTS + "{{ ns.a in [ns.b] }}",
    "lists sorted": LISTS + "{% set y = [ns.a, ns.b]|sort %}",
    "lists, the largest": LISTS + "{% set y = [ns.a, ns.b]|max %}",
    "lists counted": LISTS + "{{ [ns.b].count(ns.a) }}",
    "tuples hashed": TUPLES + "{% set y = {ns.a: 1} %}",
    "tuples, unique": TUPLES + "{% set y = [ns.a, ns.b]|unique|list %}",
    "texts in capitals": LONG.replace("EXPRESSION", "x|upper"),
    "texts in capitals, by their method": LONG.replace("EXPRESSION", "x.upper()"),
    # (A text that has nothing to be trimmed is returned as it is.)
    "texts trimmed": LONG.replace("'ab'", "' a'").replace("EXPRESSION", "x|trim"),
    "texts cut": LONG.replace("EXPRESSION", "x[1:]"),
    "texts cut in steps": LONG.replace("EXPRESSION", "x[::3]"),
    "texts searched": LONG.replace("EXPRESSION", "x.find('c')"),
    "texts searched by in": LONG.replace("EXPRESSION", "'c' in x"),
    "texts counted": LONG.replace("EXPRESSION", "x.count('a')"),
    "texts compared": "{% set z = 'ab' * 9999999 %}" + LONG.replace("EXPRESSION", "x == z"),
    "texts reversed": LONG.replace("EXPRESSION", "x|reverse"),
    "texts as numbers": LONG.replace("EXPRESSION", "x|float"),
}
LARGE = {
    "texts split": "{% set y = ('abcd' * 9999999).split('a') %}",
    "texts as lists": "{% set x = 'äb' * 29999999 %}{% set y = x|list %}",
    "texts as lists, compiled": "{{ ('äb' * 29999999)|list }}",
    "cuts that are kept": (
        "{% set ns = namespace(y=[]) %}{% set x = 'ab' * 9999999 %}{% for i in range(99999) %}"
        "{% set ns.y = [ns.y, x[1:]] %}{% endfor %}"
    ),
    "capitals that are kept": (
        "{% set ns = namespace(y=[]) %}{% set x = 'ab' * 9999999 %}{% for i in range(99999) %}"
        "{% set ns.y = [ns.y, x|upper] %}{% endfor %}"
    ),
    "wide characters": "{% set x = '🌳' * 60000000 %}{% set y = x|upper %}{% set z = x[1:] %}",
}
COUNTED = {
    "numbers": "{{ 10 ** (10 ** 8) }}",
    "a repeated text": "{{ 'a' * 10 ** 10 }}",
    "a long text": "{{ 'a' * 3000000 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


# Hangs at chats whose first message asks for it.
SOMETIMES = "{% if messages[0].content == 'hang' %}" + SLOW["lists compared"] + "{% endif %}ok"


def chats(*contents: str) -> Iterator[CorpusDocument]:
    for n, content in enumerate(contents):
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "World"}]
        yield CorpusDocument(chat=chat, where=f"f line {n}")


@contextmanager
def pool_of(template: str, limits: ProcessLimits = LIMITS) -> Iterator[RenderPool]:
    with closing(RenderPool(ChatTemplate(template, WHERE), limits=limits)) as pool:
        yield pool


def fault(template: str, *contents: str, limits: ProcessLimits = LIMITS) -> str:
    with pool_of(template, limits) as pool, pytest.raises(InputError) as caught:
        list(pool.documents(chats(*contents)))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("kind", some(SLOW, "lists compared", "texts in capitals", "texts cut"))
def test_a_template_that_takes_forever_is_ended(kind: str) -> None:
    said = f"f line 0: {WHERE}: rendering this chat takes more than 0.3 s of processor time; give"
    assert fault(SLOW[kind], "Hello").startswith(said)


@pytest.mark.parametrize("kind", some(LARGE, "cuts that are kept"))
def test_a_template_that_fills_memory_is_ended(kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    said = fault(LARGE[kind], "Hello", limits=ProcessLimits(seconds=60, memory=256 << 20))
    assert "more memory than it may" in said or "more than 256 MiB of memory" in said
    assert WHERE in said
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert most == before or most < 400 << 10  # KiB


@pytest.mark.parametrize("kind", some(COUNTED, "a macro that calls itself"))
def test_a_template_that_does_too_much_is_ended_where_it_did(kind: str) -> None:
    assert fault(COUNTED[kind], "Hello").startswith(f"f line 0: {WHERE}: it ")


def test_the_chat_at_fault_is_named() -> None:
    said = fault(SOMETIMES, *["Hello"] * 150, "hang", *["Hello"] * 99)
    assert said.startswith(f"f line 150: {WHERE}: rendering this chat takes more than 0.3 s")
    assert "leave the document out" in said


def test_a_pool_goes_on_after_a_chat_that_was_ended() -> None:
    with pool_of(SOMETIMES) as pool:
        for _ in range(2):
            with pytest.raises(InputError, match="f line 1: "):
                list(pool.documents(chats("Hello", "hang")))
        assert [document.text for document in pool.documents(chats("a", "b"))] == ["ok", "ok"]


def test_a_template_that_takes_forever_to_compile_is_ended() -> None:
    text = "{{ ('a' * 9999999)|upper|length }}" * 5000
    said = fault(text, "Hello", limits=ProcessLimits(seconds=0.3))
    assert said.startswith(f"{WHERE}: compiling it takes more than 0.3 s of processor time; give")


def test_a_template_that_is_none_is_refused_by_its_file() -> None:
    assert fault("{% if %}", "Hello").startswith(f"{WHERE}: ")


def test_a_large_chat_is_rendered_within_the_usual_limits() -> None:
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    said = "Grüße 🌳" * 1_000_000
    with pool_of(text, ProcessLimits()) as pool:
        (document,) = pool.documents(chats(said))
    assert document.text == f"<user>{said}</s><assistant>World</s>"


def test_texts_that_grow_without_measure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spile.corpus.chats.pool._CHARACTERS", 1 << 20)
    said = fault("{{ 'a' * 100000 }}", *["Hello"] * 500)
    assert WHERE in said and "characters of" in said and "--unit-tokens" in said


def test_whoever_waits_may_end_it() -> None:
    hanging = ChatTemplate(SLOW["lists compared"], WHERE)
    pool = RenderPool(hanging, limits=ProcessLimits(seconds=600))
    with closing(pool), cancelled_by(StopAtLook(2)), pytest.raises(Interrupted):
        list(pool.documents(chats("Hello")))
    assert pool._idle == []


WAITING = """
import sys
from spile.corpus.chats.pool import RenderPool
from spile.core.limited_process import ProcessLimits
from spile.corpus.chats.renderer import Renderer
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
ask = Renderer.ask
def asked(renderer, *given):
    ask(renderer, *given)
    print(renderer.pid, flush=True)
Renderer.ask = asked
pool = RenderPool(ChatTemplate(sys.argv[1]), limits=ProcessLimits(seconds=1))
list(pool.documents([CorpusDocument(chat=[{"role": "user", "content": "x"}])]))
"""


def test_a_process_that_hangs_ends_although_whoever_asked_was_killed() -> None:
    asking = zygote.Popen(
        [sys.executable, "-c", WAITING, SLOW["lists compared"]], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=tiny.environment(),
    )  # fmt: skip
    with asking:
        assert asking.stdout
        child = int(asking.stdout.readline())
        assert is_alive(child)
        asking.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(child)
