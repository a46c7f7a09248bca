"""The verb `rollouts`: an engine's answers to prompts, as a corpus."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from spile.cli.flags import Verbs, add_options, count_of
from spile.core.config import PROMPT_OPTIONS, Recipe
from spile.core.errors import ConfigError
from spile.core.humanize import plural
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.rollouts.run import RolloutCounts

_HELP = """\
Ask an OpenAI-compatible server (vLLM, SGLang, llama.cpp) to answer every prompt of a corpus, and
keep its answers with their token ids and log-probabilities: a corpus for `spile extract`.
The same command resumes after any interruption; finished units are not asked for again.

  spile rollouts --model ./Qwen3-8B --corpus prompts.jsonl --server http://127.0.0.1:8000 \\
                 --per-prompt 4 --answer-tokens 4096 --out rollouts/qwen
"""


def add_rollouts(verbs: Verbs) -> None:

    sub = verbs.add(
        "rollouts",
        rollouts,
        "let an engine answer prompts, as a corpus",
        usage="spile rollouts --model X --corpus X --server URL --out DIR [more flags]",
        description=_HELP,
    )
    sub.add("--out", "where the rollouts go: a directory, or URL of a bucket", "DIR")
    sub.switch("--quiet", "print only errors")
    engine = sub.group("engine")
    engine.many("--server", "URL", "address of the server; several times for equal servers")
    engine.add("--served-model", "the model's name there [the first that it lists]", "NAME")
    engine.add("--concurrency", "requests at a time [64]", "N")
    engine.number("--timeout", "longest wait for one answer [600]", 600.0, unit="SECONDS")
    answers = sub.group("answers")
    answers.add(
        "--api",
        "chat: the server renders chats; completions: it gets token ids [chat for chats]",
        "X",
        choices=("chat", "completions"),
    )
    answers.add("--per-prompt", "answers to each prompt [1]", "N")
    answers.add("--answer-tokens", "most tokens of an answer [1024]", "N")
    answers.add("--temperature", "0 takes the likeliest token [1.0]", "X", type=float)
    answers.add("--top-p", "sample from this share of the probability [1.0]", "X", type=float)
    answers.add("--top-k", "sample from so many tokens [all]", "N")
    answers.add("--seed", "seed of all answers; each gets its own from it [0]", "N")
    answers.add("--request", "more fields of each request, which win", "JSON")
    add_options(sub, "prompts", Recipe, only=PROMPT_OPTIONS)
    sub.add("--unit-prompts", "prompts in a unit, which is made as a whole [64]", "N")


def rollouts(arguments: argparse.Namespace) -> int:
    from spile.rollouts.run import RolloutOptions
    from spile.rollouts.run import rollouts as make

    if not arguments.out:
        raise ConfigError("--out is missing; it says where the rollouts go")
    if not arguments.server:
        raise ConfigError("--server is missing; e.g. --server http://127.0.0.1:8000")
    options = RolloutOptions(
        servers=arguments.server,
        served_model=arguments.served_model,
        concurrency=_count(arguments, "concurrency") or 64,
        timeout=arguments.timeout,
    )
    sampling: dict[str, Any] = {
        name: _count(arguments, name) for name in ("per_prompt", "answer_tokens", "top_k", "seed")
    }
    for name, flag in (("api", "api"), ("temperature",) * 2, ("top_p",) * 2, ("more", "request")):
        sampling[name] = getattr(arguments, flag)
    given = {name: getattr(arguments, name) for name in PROMPT_OPTIONS}
    counts = make(
        Recipe(**{name: value for name, value in given.items() if value is not None}),
        {name: value for name, value in sampling.items() if value is not None},
        open_objects(arguments.out),
        options,
        _count(arguments, "unit_prompts"),
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(counts)))
    elif not arguments.quiet:
        print(_summary(arguments.out, counts))
    return 0


def _count(arguments: argparse.Namespace, name: str) -> int | None:
    text = getattr(arguments, name)
    return None if text is None else count_of("--" + name.replace("_", "-"), text, "a number")


def _summary(out: str, counts: "RolloutCounts") -> str:
    lines = [
        f"{out}: {plural(counts.answers, 'answer')} of {plural(counts.tokens, 'token')} to "
        f"{plural(counts.prompts, 'prompt')} in {plural(counts.units, 'unit')}; "
        f"{plural(counts.units_total, 'unit')} in all"
    ]
    lines += [f"{plural(n, 'request')} refused: {why}" for why, n in counts.errors.most_common(3)]
    if counts.recovered:
        lines.append(
            f"{plural(counts.recovered, 'answer')} came without token ids, which were made by "
            "tokenizing: they need not be those that were sampled"
        )
    lines.append(f"  read    spile extract --corpus {out} --where assistant …")
    return "\n".join(lines)
