"""Chats, pairs and programs become documents whose tokens have their speaker's flag."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import spile
from chaos.harness import (
    Work,
    check_refused,
    content,
    differences,
    extracted,
    launch,
    run,
    said,
    wait_for,
)
from spile.core.index import FLAGS, ROLES
from spile.core.limited_process import ProcessLimits
from spile.corpus.chats.template import read_template
from spile.dataset import format as fmt
from support import tiny
from support.marks import some
from support.texts import token_roles

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS: list[Any] = [
    [{"role": "user", "content": f"what is {n} and {n}?"},
     {"role": "assistant", "content": f"it is {2 * n}, and {n} is half of it"}] * (1 + n % 3)
    for n in range(30)
]  # fmt: skip


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    model = tiny.write_model(tmp_path_factory.mktemp("talking") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said_by(document: Any, role: str, tokenizer: Tokenizer) -> str:
    flags, ids = document.index["flags"], document.index["token_id"]
    return tokenizer.decode(ids[(flags & ROLES[role]) != 0].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("kind", some(["jsonl", "parquet"], "parquet"))
def test_every_token_of_a_chat_knows_who_said_it(kind: str, talking: Path, tmp_path: Path) -> None:
    rows = [{"chat": chat} for chat in CHATS]
    extracted(talking, write(tmp_path / f"c.{kind}", rows), tmp_path / "out", messages="chat")
    dataset = spile.open(str(tmp_path / "out"))
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    template = read_template(talking, None)
    assert dataset.num_documents == len(CHATS)
    for number, chat in enumerate(CHATS):
        rendered = template.render(chat)
        encoding = tokenizer.encode(rendered.text, add_special_tokens=False)
        document = dataset.document(number)
        assert document.index["token_id"].tolist() == encoding.ids
        named = {flag: name for name, flag in ROLES.items()}
        every = sum(ROLES.values())
        found = [named[int(flags) & every] for flags in document.index["flags"]]
        assert found == token_roles(encoding.offsets, rendered)
        assert {"user", "assistant", "template"} == {*found}


def test_rows_of_the_assistant_alone_can_be_kept(talking: Path, tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", [{"chat": chat} for chat in CHATS])
    extracted(talking, corpus, tmp_path / "out", messages="chat", where="assistant")
    dataset = spile.open(str(tmp_path / "out"))
    flags = dataset.index(0, dataset.num_tokens)["flags"]
    assert len(flags) > 100 and (flags & FLAGS["assistant"]).all()


def test_a_system_message_and_a_generation_prompt_are_put_in(talking: Path, tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", [{"chat": chat} for chat in CHATS[:4]])
    extracted(
        talking, corpus, tmp_path / "out", messages="chat", system="Be brief.",
        generation_prompt=True,
    )  # fmt: skip
    dataset = spile.open(str(tmp_path / "out"))
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    text = tokenizer.decode(dataset.document(1).index["token_id"].tolist())
    assert text.startswith("<system>Be brief.</>") and text.endswith("<assistant>")
    assert said_by(dataset.document(1), "system", tokenizer) == "Be brief."


@pytest.mark.parametrize("template", [None, "none"])
def test_pairs_are_a_chat_or_just_joined(
    template: str | None, talking: Path, tmp_path: Path
) -> None:
    rows = [{"q": f"who is {n}?", "a": f"nobody {n}"} for n in range(6)]
    extracted(
        talking, write(tmp_path / "c.jsonl", rows), tmp_path / "out", prompt_column="q",
        response_column="a", prompt_prefix="Q: ", prompt_suffix=" A: ", template=template,
        special_tokens="none",
    )  # fmt: skip
    dataset = spile.open(str(tmp_path / "out"))
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    text = tokenizer.decode(dataset.document(3).index["token_id"].tolist())
    if template:
        assert text == "Q: who is 3? A: nobody 3"
        assert said_by(dataset.document(3), "template", tokenizer).replace(" ", "") == "Q:A:"
    else:
        assert text == "<user>Q: who is 3? A:</>\n<assistant>nobody 3</>\n"
    assert said_by(dataset.document(3), "assistant", tokenizer).strip() == "nobody 3"


def test_another_template_is_another_dataset(talking: Path, tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", [{"chat": chat} for chat in CHATS])
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("<", "["))
    out = tmp_path / "out"
    extracted(talking, corpus, out, messages="chat", template=str(other))
    extracted(talking, corpus, out, messages="chat", template=str(other))
    assert run("extract", "--out", out).code == 0
    other.write_text(TEMPLATE)
    check_refused(run("extract", "--out", out), 2, "template")


def test_chats_that_the_template_refuses_are_counted(talking: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    rows = [{"chat": chat} for chat in (CHATS[0], CHATS[1][1:], [], None, CHATS[2])]
    outcome = extracted(
        talking, write(tmp_path / "c.jsonl", rows), tmp_path / "out", messages="chat",
        template=str(strict),
    )  # fmt: skip
    assert outcome.documents == 2
    assert outcome.skipped == {"refused by the chat template": 1, "empty": 1, "null": 1}


def test_what_holds_no_messages_is_refused_by_its_place(talking: Path, tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", [{"chat": CHATS[0]}, {"chat": "hello"}])
    result = run("extract", "--model", talking, "--corpus", corpus, "--taps", "embed",
                 "--messages", "chat", "--out", tmp_path / "out")  # fmt: skip
    check_refused(result, 2, "c.jsonl line 2", "no list of messages")


# -- layouts of published corpora -----------------------------------------------------------------

SHAREGPT = {"user": "human", "assistant": "gpt"}
SHARED: list[dict[str, Any]] = [
    {
        "system": "Be brief." if n % 3 else None,
        "conversations": [
            {"from": SHAREGPT[message["role"]], "value": message["content"]} for message in chat
        ],
    }
    for n, chat in enumerate(CHATS)
]


@pytest.mark.parametrize("kind", some(["jsonl", "parquet"], "parquet"))
def test_sharegpt_gives_the_rows_of_the_same_messages(
    kind: str, talking: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / f"train-00000-of-00001.{kind}", SHARED)
    system = [{"role": "system", "content": "Be brief."}]
    rows = [{"chat": system * bool(n % 3) + chat} for n, chat in enumerate(CHATS)]
    corpus = write(tmp_path / "same.jsonl", rows)
    extracted(talking, tmp_path / "data", tmp_path / "out")
    extracted(talking, corpus, tmp_path / "same", messages="chat")
    out, same = spile.open(str(tmp_path / "out")), spile.open(str(tmp_path / "same"))
    assert out.recipe.messages == "system+conversations"
    for number in range(len(CHATS)):
        found, other = out.document(number), same.document(number)
        for column in ("token_id", "flags"):
            assert found.index[column].tolist() == other.index[column].tolist()
        assert found["embed"].tobytes() == other["embed"].tobytes()
    flags = out.index(0, out.num_tokens)["flags"]
    counts = {role: int(((flags & FLAGS[role]) != 0).sum()) for role in ROLES}
    assert counts["system"] == 20 * len("Be brief.") and not counts["tool"]
    assert min(counts["user"], counts["assistant"], counts["template"]) > 500


def test_a_dataset_keeps_the_layout_it_was_begun_with(talking: Path, tmp_path: Path) -> None:
    corpus, out = write(tmp_path / "c.jsonl", SHARED[:4]), tmp_path / "out"
    extracted(talking, corpus, out)
    extracted(talking, corpus, out)
    extracted(talking, corpus, out, messages="system+conversations")
    refused = run("extract", "--out", out, "--messages", "conversations")
    check_refused(refused, 2, "messages: stored 'system+conversations', now 'conversations'")


def test_a_grown_dataset_reads_other_spellings_of_its_columns_only(
    talking: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    extracted(talking, write(tmp_path / "c.parquet", SHARED[:4]), out)
    spelled = [{"system": None, "conversations": chat} for chat in CHATS[4:6]]
    spile.extract(spile.Recipe(add_corpus=str(write(tmp_path / "d.parquet", spelled))), out)
    dataset = spile.open(str(out))
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    assert said_by(dataset.document(5), "user", tokenizer) == CHATS[5][0]["content"] * 3
    other = write(tmp_path / "e.jsonl", [{"messages": chat} for chat in CHATS[6:8]])
    refused = run("extract", "--out", out, "--add-corpus", other)
    check_refused(refused, 2, "--add-corpus:", "e.jsonl has no conversations", "it has messages")
    assert spile.open(str(out)).num_documents == 6


def test_tools_reach_the_template_and_one_that_hides_them_is_reported(
    talking: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    corpus = write(tmp_path / "c.jsonl", [{"tools": [{"name": "sub"}], "messages": chat}] * 2)
    command = ["extract", "--model", talking, "--corpus", corpus, "--taps", "embed"]
    hiding = run(*command, "--out", tmp_path / "hiding")
    assert hiding.code == 0
    assert "c.jsonl line 1: the chat template does not show the tool 'sub'" in caplog.text
    caplog.clear()
    showing = tmp_path / "tools.jinja"
    calls = "{% for c in message.tool_calls or [] %}({{ c.function.name }}){% endfor %}</>"
    showing.write_text("[{{ tools[0].name }}]" + TEMPLATE.replace("</>", calls))
    shown = run(*command, "--template", showing, "--out", tmp_path / "out")
    assert shown.code == 0 and "does not show" not in caplog.text
    document = spile.open(str(tmp_path / "out")).document(0)
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    assert tokenizer.decode(document.index["token_id"].tolist()).startswith("[sub]<user>")
    assert said_by(document, "tool", tokenizer) == "3"
    assert said_by(document, "assistant", tokenizer) == "addIt is 3."


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"conversations": [{"who": "a", "text": "x"}]}, "holds objects with text, who"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "its role is 'narrator'"),
        ({"question": "x", "answer": "y"}, "--prompt-column question --response-column answer"),
        ({"turns": CHATS[0]}, "they have turns: --messages turns reads its chats"),
    ],
)
def test_chats_that_cannot_be_mapped_are_refused_before_out_exists(
    record: dict[str, Any], told: str, talking: Path, tmp_path: Path
) -> None:
    corpus = write(tmp_path / "c.jsonl", [record] * 3)
    refused = run("extract", "--model", talking, "--corpus", corpus, "--taps", "embed",
                  "--out", tmp_path / "out", "--quiet")  # fmt: skip
    check_refused(refused, 2, "c.jsonl", told)
    assert not (tmp_path / "out").exists()


# -- programs --------------------------------------------------------------------------------

PROGRAM = """
import random

def create_dataset(count=40, wild=False):
    for number in range(count):
        draw = random.random() if wild else number
        yield {"text": f"document {number} of {count}: {draw}", "number": number}

class Source:
    def __len__(self):
        return 25
    def __getitem__(self, number):
        return {"segments": [["user", f"ask {number}"], ["assistant", f" answer {number}"]]}

def source():
    return Source()

def both():
    return [{"text": "not this", "question": f"who is {n}?", "answer": f"n {n}"} for n in range(4)]
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.py"
    path.write_text(PROGRAM)
    return path


def test_a_program_gives_a_corpus_that_resumes(program: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    corpus = f"{program}:create_dataset(count=30)"
    outcome = extracted(model, corpus, out, unit_tokens=100)
    assert outcome.documents == 30 and outcome.units > 3
    for key in (fmt.MANIFEST, fmt.CURRENT.segment_key(0), fmt.CURRENT.done_key(1)):
        (out / key).unlink()
    again = extracted(model, corpus, out, unit_tokens=100)
    assert again.documents == 30
    check_refused(run("extract", "--out", out), 2, "--corpus", "program")


def test_who_says_what_in_a_programs_segments_is_kept(
    program: Path, model: Path, tmp_path: Path
) -> None:
    outcome = extracted(model, f"{program}:source", tmp_path / "out")
    assert outcome.documents == 25
    dataset = spile.open(str(tmp_path / "out"))
    flags = np.concatenate([dataset.document(n).index["flags"] for n in range(25)])
    assert {int(f) & (ROLES["user"] | ROLES["assistant"]) for f in flags} >= {
        ROLES["user"], ROLES["assistant"],
    }  # fmt: skip


def test_pairs_of_a_program_are_read_and_not_its_text(
    program: Path, model: Path, tmp_path: Path
) -> None:
    columns = {"prompt_column": "question", "template": "none", "special_tokens": "none"}
    corpus, out = f"{program}:both", tmp_path / "out"
    extracted(model, corpus, out, **columns, response_column="answer", filter="answer != 'n 1'")
    dataset = spile.open(str(out))
    assert [dataset.text(doc) for doc in (0, 2, 3)] == [f"who is {n}?n {n}" for n in (0, 2, 3)]
    assert not dataset.has_document(1)
    result = run(
        "extract", "--model", model, "--corpus", corpus, "--taps", "embed", "--prompt-column",
        "question", "--response-column", "reply", "--template", "none", "--out", tmp_path / "no",
    )  # fmt: skip
    check_refused(result, 2, "has no 'reply', which --response-column names", "'answer'")


def test_a_program_that_is_not_the_same_twice_is_refused(
    program: Path, model: Path, tmp_path: Path
) -> None:
    result = run("extract", "--model", model, "--corpus", f"{program}(wild=True)", "--taps",
                 "embed", "--out", tmp_path / "out")  # fmt: skip
    check_refused(result, 3, "corpus.py", "whenever it is called")


def test_a_changed_program_is_another_corpus(program: Path, model: Path, tmp_path: Path) -> None:
    extracted(model, program, tmp_path / "out")
    program.write_text(PROGRAM.replace("document", "text"))
    result = run("extract", "--corpus", program, "--out", tmp_path / "out")
    check_refused(result, 2, "corpus")


# -- ARC -------------------------------------------------------------------------------------

TASKS = Path(__file__).parents[1] / "fixtures" / "arc"


@pytest.mark.parametrize("prompt", some(["plain", "chat"], "plain"))
def test_arc_tasks_become_documents_whose_answers_can_be_kept_alone(
    prompt: str, talking: Path, tmp_path: Path
) -> None:
    folder = next(path for path in TASKS.iterdir() if path.is_dir())
    more = 'predictions=3, augment="rotate", answers=True, encoder="rows+shape"'
    corpus = f'arc:{folder}(prompt="{prompt}", {more})'
    chat = {"messages": "messages"} if prompt == "chat" else {}
    out = tmp_path / "out"
    outcome = extracted(talking, corpus, out, where="assistant", **chat)
    assert outcome.documents >= 9 and 0 < outcome.rows < outcome.tokens
    assert run("extract", "--out", out).code == 0, "it is Spile's own: --out alone is enough"
    dataset = spile.open(str(out))
    tokenizer = Tokenizer.from_file(str(talking / "tokenizer.json"))
    answer = tokenizer.decode(dataset.document(0).index["token_id"].tolist())
    assert all(character in "0123456789x |:\n" for character in answer), answer


@pytest.mark.full
@pytest.mark.parametrize("kind", some(["json", "parquet"], "parquet"))
def test_chats_are_the_same_whoever_renders_them(kind: str, talking: Path, tmp_path: Path) -> None:
    rows = [{"chat": chat if n % 7 else None} for n, chat in enumerate(CHATS * 4)]
    path = tmp_path / f"c.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    else:
        write(path, rows)
    for processes in (1, 2):
        options = {"taps": "embed", "messages": "chat", "seq_len": 128, "unit_tokens": 700}
        work = Work(talking, path, {**options, "render_processes": processes})
        work.extract(tmp_path / str(processes))
    assert not differences(content(tmp_path / "2"), content(tmp_path / "1"))


HANGING = (
    "{% if messages[0].content == 'hang' %}{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% endfor %}{{ ns.a == ns.b }}{% endif %}{{ messages[0].content }}"
)


def hanging(model: Path, corpus: Path, at: int) -> list[str]:
    """A command whose template hangs at that chat; the first 256 chats are the corpus's sample."""
    template = corpus.with_name("hang.jinja")
    template.write_text(HANGING)
    chats = [[{"role": "user", "content": "hang" if n == at else f"so {n}"}] for n in range(300)]
    write(corpus, [{"chat": chat} for chat in chats])
    options = {"taps": "embed", "messages": "chat", "template": template, "unit_tokens": 700}
    return ["extract", *Work(model, corpus, options).flags(corpus.with_name("out"))]


@pytest.mark.parametrize("at", some([3, 290]), ids=["sampled", "read"])
def test_a_template_that_never_ends_is_refused_with_the_chat(
    at: int, talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ProcessLimits(seconds=0.3)
    monkeypatch.setattr("spile.corpus.chats.pool.ProcessLimits", lambda: quick)
    result = run("extract", "--quiet", *hanging(talking, tmp_path / "c.parquet", at)[1:])
    check_refused(
        result, 2, tmp_path / f"c.parquet row {at}", tmp_path / "hang.jinja", "more than 0.3 s of"
    )


def renderer_of(process: int) -> list[Path]:
    """Its rendering processes that have run for a while, because they hang."""
    found: list[Path] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, fields = stat.read_text().rsplit(")", 1)
            ours = fields.split()[1] == str(process)
            busy = int(fields.split()[11]) / os.sysconf("SC_CLK_TCK")
            if ours and busy > 1 and b"chats.renderer" in (stat.parent / "cmdline").read_bytes():
                found.append(stat.parent)
    return found


@pytest.mark.parametrize("at", some([3, 290]), ids=["sampled", "read"])
def test_an_interrupt_is_heeded_while_a_template_hangs(
    at: int, talking: Path, tmp_path: Path
) -> None:
    process = launch({}, *hanging(talking, tmp_path / "c.parquet", at))
    wait_for(lambda: renderer_of(process.pid), process)
    (renderer,) = renderer_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err  # 2 if it had waited for the limit
    assert said(err)[-1].startswith("spile: interrupted") and "Traceback" not in err
    assert not renderer.exists()
