"""Make rollouts: ask engines about every prompt of every unit that is not there yet.

Units are read a few ahead, so that the engines always have `concurrency` requests; what is held in
memory is those units and their answers. A unit is stored once all of its prompts are answered.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from spile.core.config import PROMPT_OPTIONS, Recipe, flag_of
from spile.core.errors import ConfigError, SpileError, StoreError
from spile.core.humanize import clock, lasting, plural, short
from spile.core.identity import full_digest
from spile.core.system import system
from spile.core.units import Unit
from spile.dataset.format import TOKENIZER_FILES
from spile.dataset.records.unit_table import UnitColumns
from spile.models.files.checkpoint import model_directory
from spile.objects import Objects
from spile.plan.resolve import refuse_own_program
from spile.rollouts.client import Engines, GivenUpError, Refusal
from spile.rollouts.exchange import (
    CHAT,
    COMPLETIONS,
    PATHS,
    SampledAnswer,
    Sampling,
    parse_answer,
    request,
)
from spile.rollouts.prompts import EnginePrompt, PromptCorpus, PromptReader
from spile.rollouts.store import AnswerRow, RolloutStore, RolloutTable, encode_unit
from spile.rollouts.tokens import TOKENIZER, answered

T = TypeVar("T")

_log = logging.getLogger("spile.rollouts")
_UNIT_PROMPTS = 64
_CONCURRENCY = 64
_TELL_SECONDS = 10.0
_REFUSED_AT_FIRST = 8  # refusals before any answer: then the request is wrong, not the prompts
_FAILED = 16  # units that may fail before the run ends


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are made; none of it changes what they are.

    Attributes:
        servers: addresses of equal servers.
        served_model: the name to ask for; None: the first that the server lists.
        concurrency: requests at a time.
        timeout: seconds for one answer.
        patience: seconds without any answer after which to give up; None: the usual.
    """

    servers: Sequence[str]
    served_model: str | None = None
    concurrency: int = _CONCURRENCY
    timeout: float = 600.0
    patience: float | None = None
    cache: str | None = None


@dataclass
class RolloutCounts:
    """What a run has done so far."""

    prompts: int = 0
    answers: int = 0
    tokens: int = 0
    units: int = 0
    recovered: int = 0  # answers whose ids were made by tokenizing
    errors: Counter[str] = field(default_factory=Counter[str])
    units_total: int = 0
    prompts_total: int = 0
    prompts_before: int = 0  # that earlier runs had done

    def line(self, seconds: float, per_prompt: int) -> str:
        """Describe the progress, and what is left by the rate so far."""
        wanted = (self.prompts_total - self.prompts_before) * per_prompt
        rate = self.answers / seconds if seconds > 0 else 0.0
        left = f", {clock((wanted - self.answers) / rate)} left" if rate else ""
        return (
            f"{self.answers:,} of {wanted:,} answers, {short(self.tokens)} tokens, "
            f"{short(self.tokens / seconds if seconds > 0 else 0)} tok/s{left}"
        )


def rollouts(
    recipe: Recipe,
    sampling: dict[str, Any],
    objects: Objects,
    options: RolloutOptions,
    unit_prompts: int | None = None,
) -> RolloutCounts:
    """Make a directory of rollouts, or continue it; return what this run did.

    Args:
        recipe: says what the prompts are.
        sampling: the fields of `Sampling` that were given.
    """
    store = RolloutStore(objects)
    stored = store.read()
    if stored:
        given = {name: getattr(recipe, name) for name in PROMPT_OPTIONS}
        told = {name: value for name, value in given.items() if value is not None}
        before = {name: stored.prompts.get(name) for name in PROMPT_OPTIONS}
        if "corpus" not in told:
            refuse_own_program(str(before["corpus"]))
        recipe = Recipe(**{**before, **told})
        unit_prompts = unit_prompts or stored.prompts.get("unit_prompts")
        sampling = {**stored.sampling, **sampling}
    corpus = PromptCorpus(recipe, unit_prompts or _UNIT_PROMPTS, options.cache)
    asked: dict[str, Any] = {"api": CHAT if corpus.are_chats else COMPLETIONS, **sampling}
    settled = Sampling(**asked)
    if settled.api == CHAT and not corpus.are_chats:
        raise ConfigError("--api chat: the prompts are texts; --api completions continues them")
    table = _table_of(corpus, settled, stored)
    if stored is None:
        stored = store.create(table)
    _refuse_other(objects, stored, table)
    run = _Run(corpus, settled, store, stored, options)
    return asyncio.run(run.work())


def _table_of(
    corpus: PromptCorpus, sampling: Sampling, stored: RolloutTable | None
) -> RolloutTable:
    units, kept = (stored.units, stored.kept) if stored else corpus.cut()
    directory = model_directory(corpus.recipe.model or "")
    files = [directory / name for name in TOKENIZER_FILES]
    made_with = {
        "tokenizer": full_digest(*(path for path in files if path.is_file())),
        "chat template": corpus.template_digest,
    }
    return RolloutTable(
        prompts=corpus.identity(),
        sampling=sampling.identity(),
        files=corpus.files,
        made_with=made_with,
        kept=kept,
        units=UnitColumns.of(units),
    )


def _refuse_other(objects: Objects, stored: RolloutTable, table: RolloutTable) -> None:
    found = stored.differences(table)
    if found:
        told = "; ".join(
            f"{flag_of(name) if ' ' not in name else name} is {was!r} there, {now!r} here"
            for name, (was, now) in sorted(found.items())
        )
        raise ConfigError(
            f"{objects.url}: holds rollouts of other prompts or settings: {told}; leave these "
            "options out to continue them, or choose another --out"
        )


class _Run:
    """One run: the units to do, and the requests under way."""

    def __init__(
        self,
        corpus: PromptCorpus,
        sampling: Sampling,
        store: RolloutStore,
        table: RolloutTable,
        options: RolloutOptions,
    ) -> None:
        self._corpus, self._sampling, self._store = corpus, sampling, store
        self._table, self._options = table, options
        self._vocabulary = corpus.tokenizer.max_id + 1
        self._room = asyncio.Semaphore(options.concurrency)
        self._counts = RolloutCounts(units_total=len(table.units))
        self._model = self._engine = ""
        self._failures: list[SpileError] = []
        self._began = system().monotonic()
        self._refused = 0

    async def work(self) -> RolloutCounts:
        """Do every unit that is not there yet."""
        counts, units = self._counts, self._table.units
        done = self._store.done()
        counts.prompts_total = int(units.num_docs.sum())
        counts.prompts_before = sum(int(units.num_docs[unit]) for unit in done)
        todo = [unit for unit in range(len(units)) if unit not in done]
        if not todo:
            return counts
        options = self._options
        patience = {} if options.patience is None else {
            "patience": options.patience, "patience_at_first": options.patience,
        }  # fmt: skip
        engines = Engines(
            options.servers, key=os.environ.get("OPENAI_API_KEY"), timeout=options.timeout,
            **patience,
        )  # fmt: skip
        # One thread reads prompts, one stores units: neither may hold up the answers.
        with (
            closing(self._corpus.open()) as reader,
            system().pool(1, "prompts") as reading,
            system().pool(1, "commit") as storing,
        ):
            async with engines:
                self._model, self._engine = await engines.model(options.served_model)
                self._began = system().monotonic()
                _log.info(
                    "%s: %s to do, by model %s%s", self._store.objects.url,
                    plural(len(todo), "unit"), self._model,
                    f" of {self._engine}" if self._engine else "",
                )  # fmt: skip
                await self._every_unit(todo, engines, reader, reading, storing)
        if self._failures:
            first = self._failures[0]
            raise StoreError(
                f"{plural(len(self._failures), 'unit')} of {len(units)} could not be made: "
                f"{first.message}; the others are stored: run the same command again"
            )
        return counts

    async def _every_unit(
        self,
        todo: Sequence[int],
        engines: Engines,
        reader: PromptReader,
        reading: Any,
        storing: Any,
    ) -> None:
        mean = max(1.0, float(self._table.units.num_docs.mean()))
        ahead = 2 + int(self._options.concurrency / (mean * self._sampling.per_prompt))
        window = asyncio.Semaphore(ahead)
        telling = asyncio.create_task(self._tell())
        loop = asyncio.get_running_loop()

        async def one(number: int) -> None:
            try:
                unit = self._table.units[number]
                prompts = await loop.run_in_executor(reading, reader.read, unit)
                await self._unit(unit, prompts, engines, partial(loop.run_in_executor, storing))
            except GivenUpError as error:
                _log.warning("unit %d: %s", number, error)
                self._failures.append(error)
                if len(self._failures) >= _FAILED:
                    raise
            finally:
                window.release()

        try:
            async with asyncio.TaskGroup() as group:
                for number in todo:
                    await window.acquire()
                    group.create_task(one(number))
        except* SpileError as errors:
            raise _first_of(errors) from None
        finally:
            telling.cancel()

    async def _unit(
        self,
        unit: Unit,
        prompts: Sequence[EnginePrompt],
        engines: Engines,
        in_thread: Callable[..., Any],
    ) -> None:
        rows = [AnswerRow(prompt, 0, error=prompt.skipped) for prompt in prompts if prompt.skipped]
        numbers = range(self._sampling.per_prompt)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._answer(prompt, number, engines))
                for prompt in prompts if prompt.skipped is None for number in numbers
            ]  # fmt: skip
        rows += [task.result() for task in asked]
        rows.sort(key=lambda row: (row.prompt.ordinal, row.number))
        data = await in_thread(encode_unit, rows, self._sampling, self._engine, self._table.kept)
        if not await in_thread(self._store.commit, unit.id, data):
            _log.info("unit %d was made by another process first", unit.id)
        self._counts.units += 1
        self._counts.prompts += len(prompts)

    async def _answer(self, prompt: EnginePrompt, number: int, engines: Engines) -> AnswerRow:
        sampling, counts = self._sampling, self._counts
        async with self._room:
            body = request(
                sampling, prompt, number, model=self._model, engine=self._engine,
                system=self._corpus.recipe.system,
            )  # fmt: skip
            found = await engines.ask(
                "POST", PATHS[sampling.api], body,
                partial(parse_answer, sampling=sampling, vocabulary=self._vocabulary),
                most=sampling.most_bytes,
            )  # fmt: skip
        if isinstance(found, Refusal):
            self._refuse(found)
            return AnswerRow(prompt, number, error=f"refused, {found.reason}")
        assert isinstance(found, SampledAnswer)
        tokens = answered(prompt, found, sampling, self._corpus.tokenizer)
        counts.answers += 1
        counts.tokens += len(tokens.ids) - tokens.prompt
        counts.recovered += tokens.answer_from == TOKENIZER
        if counts.answers == 1:
            _log.info("the first answer came after %s", lasting(self._seconds))
        return AnswerRow(prompt, number, found, tokens)

    def _refuse(self, refusal: Refusal) -> None:
        """Count a refusal; raise if nothing but refusals came."""
        self._counts.errors[refusal.reason] += 1
        refused = self._counts.errors.total()
        if not self._counts.answers and refused >= min(
            _REFUSED_AT_FIRST, self._counts.prompts_total * self._sampling.per_prompt
        ):
            raise ConfigError(
                f"the server refuses every request: {refusal.reason}; see --request and --api"
            )

    @property
    def _seconds(self) -> float:
        return system().monotonic() - self._began

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            _log.info("%s", self._counts.line(self._seconds, self._sampling.per_prompt))


def _first_of(errors: BaseExceptionGroup[SpileError]) -> SpileError:
    """Return the first error of a group of groups."""
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
