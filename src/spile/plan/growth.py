"""Growth: the documents that a dataset's corpus has gained become units that follow its own.

A dataset keeps the files of its corpus in one order: those of its table, then those of each
generation. Files are identified by their content, not by their path. A file that is gone or has
changed is refused, even with --more, because its rows could not be made again. A file whose content
the dataset has already, under whatever name, is not added.

--more continues where the last cut ended: after the last file, or after the last document if a
limit (--max-docs, --max-tokens) ended it. The recipe selects documents as before:

* A limit counts the documents, or tokens, of all generations; a larger one may be given.
* --dedupe leaves out texts that occurred in any generation, so the whole corpus is read once more.
* With --shuffle-docs, new units are permuted among themselves. With --shuffle-docs and a limit, the
  dataset is a sample of the whole corpus, and nothing can be added to it.
* --fraction, --holdout, --filter and limits on lengths look only at the document itself.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spile.core.config import Recipe
from spile.core.errors import ConfigError, StoreError
from spile.core.humanize import plural
from spile.core.recipe import ResolvedRecipe
from spile.core.units import Unit
from spile.corpus.files import lasting
from spile.corpus.formats.contract import CorpusFile
from spile.corpus.programs.program import is_program
from spile.corpus.units import CutSoFar
from spile.dataset.records.generations import Generation
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns

_log = logging.getLogger("spile.plan")

_LIMITS = ("max_docs", "max_tokens")
_SHOWN = 3  # files that a message names
Cut = Callable[..., tuple[list[Unit], float]]


@dataclass(frozen=True)
class Growth:
    """A request to add documents.

    Attributes:
        url: the dataset.
        added: another corpus, if one is given.
    """

    url: str
    added: str | None

    @property
    def flag(self) -> str:
        return "--add-corpus" if self.added else "--more"

    def adding(self, sources: tuple[str, ...], source: str) -> tuple[str, ...]:
        """Return the sources of files, with `source` added unless it is among them."""
        known = [lasting(each) for each in sources]
        return sources if lasting(source) in known else (*sources, source)

    def say_known(self, known: int, new: int) -> None:
        """Say how many files are not added, because the dataset has their content already."""
        if known:
            which = f"{known} of {plural(known + new, 'file')} {'is' if known == 1 else 'are'}"
            _log.info("%s: %s in the dataset already; %d added", self.flag, which, new)

    def kept(self, resolved: ResolvedRecipe, stored: Table) -> ResolvedRecipe:
        """Return a recipe with the stored files and limits, the two things that growth changes."""
        was = stored.whole_recipe
        corpus = resolved.corpus[: len(was.corpus)]
        return dataclasses.replace(
            resolved, corpus=corpus, max_docs=was.max_docs, max_tokens=was.max_tokens
        )

    def grown(
        self,
        stored: Table,
        sources: tuple[str, ...],
        files: list[CorpusFile],
        resolved: ResolvedRecipe,
        cut: Cut,
    ) -> Table:
        """Return the table with a further generation; the same table if there is nothing to add.

        Args:
            files: the dataset's files in their order, then the new ones.
            resolved: the recipe, with the requested limits.
            cut: cuts the files.
        """
        self._refuse_shorter(stored, resolved)
        limited = any(getattr(stored.whole_recipe, name) is not None for name in _LIMITS)
        limits = {name: getattr(resolved, name) for name in _LIMITS}
        if resolved.shuffle_docs is not None and (limited or any(limits.values())):
            raise ConfigError(
                f"{self.flag}: with --shuffle-docs and a limit, {self.url} is a sample of its "
                "whole corpus, to which nothing can be added; choose another --out"
            )
        if stored.made_of and (limited or any(limits.values())):
            raise ConfigError(
                f"{self.flag}: {self.url} was copied or merged from datasets with a limit on "
                "documents; add to those, then copy or merge them again"
            )
        new = files[len(stored.files) :]
        if not new and not limited:
            _log.info("%s: nothing new: %s has every file of the corpus", self.flag, self.url)
            return stored
        so_far = _so_far(stored, limited=limited)
        before = stored.units[:] if resolved.dedupe else ()
        units, _ = cut(files, so_far=so_far, before=before)
        if not units:
            told = " and ".join(
                f"--{name.replace('_', '-')} {limit:,}" for name, limit in limits.items() if limit
            )
            why = f"{told} holds for all documents together" if told else "the new files are empty"
            _log.info("%s: nothing new: %s", self.flag, why)
            return stored
        generation = Generation(
            before=len(stored.units),
            files=tuple(
                {"path": str(file.path), "identity": identity}
                for file, identity in zip(new, resolved.corpus[len(stored.files) :], strict=True)
            ),
            sources=(lasting(sources[0]), *map(lasting, sources[len(stored.sources) :])),
            max_docs=resolved.max_docs,
            max_tokens=resolved.max_tokens,
        )
        _log.info(
            "generation %d: %s more, about %s, in %s",
            len(stored.generations) + 1,
            plural(sum(unit.num_docs for unit in units), "document"),
            plural(sum(unit.tokens for unit in units), "token"),
            plural(len(units), "unit"),
        )
        columns = UnitColumns.of(units, len(stored.units))
        return stored.grown((generation, columns))

    def _refuse_shorter(self, stored: Table, resolved: ResolvedRecipe) -> None:
        docs, tokens = int(stored.units.num_docs.sum()), int(stored.units.tokens.sum())
        if resolved.max_docs is not None and resolved.max_docs < docs:
            raise ConfigError(
                f"{self.flag}: --max-docs {resolved.max_docs:,} is less than the {docs:,} "
                f"documents that {self.url} has; --more never removes any"
            )
        was = stored.whole_recipe.max_tokens
        if resolved.max_tokens is not None and resolved.max_tokens < (was or tokens):
            raise ConfigError(
                f"{self.flag}: --max-tokens {resolved.max_tokens:,} is less than the "
                f"{was or tokens:,} of {self.url}; --more never removes any"
            )


def growth_of(recipe: Recipe, stored: Table | None, url: str) -> Growth | None:
    """Return the growth that a recipe asks for; None if it asks for none.

    Raises:
        ConfigError: if nothing can be added there.
    """
    if not recipe.more and recipe.add_corpus is None:
        return None
    growth = Growth(url, recipe.add_corpus)
    if stored is None:
        raise ConfigError(f"{growth.flag}: no dataset at {url} yet; leave the flag out to make one")
    if stored.shuffled:
        raise ConfigError(
            f"{growth.flag}: {url} was shuffled; add to the dataset that it was made from, and "
            "shuffle that"
        )
    for source in (*stored.sources, recipe.add_corpus or ""):
        if is_program(source):
            raise ConfigError(
                f"{growth.flag}: {source} is a program, which cannot be read in parts; let it "
                "write files, or choose another --out"
            )
    return growth


def _so_far(stored: Table, *, limited: bool) -> CutSoFar:
    """Return where the cut into units ended: after the last file, unless a limit ended it."""
    _, first, count = stored.units.doc_runs
    held = {
        "docs": int((first + count).max()),
        "units": len(stored.units),
        "tokens": int(stored.units.tokens.sum()),
    }
    if not limited:
        return CutSoFar(file=len(stored.files), **held)
    last = stored.units[-1].spans[-1]
    return CutSoFar(last.file, last.first + last.count, last.stop, **held)


def in_stored_order(
    stored: Table, files: Sequence[CorpusFile], identities: Sequence[str]
) -> tuple[list[CorpusFile], tuple[str, ...]]:
    """Return files and identities in the dataset's order, followed by the new ones.

    A new file has a content that neither the dataset nor a file before it has. If one of the
    dataset's files is missing, return all in the given order.
    """
    places: dict[str, list[int]] = {}
    for place, identity in enumerate(identities):
        places.setdefault(identity, []).append(place)
    try:
        known = [places[file["identity"]].pop(0) for file in stored.files]
    except (KeyError, IndexError):
        return list(files), tuple(identities)
    order, seen = known, {identities[place] for place in known}
    for place in sorted({*range(len(files))}.difference(known)):
        if identities[place] not in seen:
            seen.add(identities[place])
            order.append(place)
    return [files[place] for place in order], tuple(identities[place] for place in order)


def changed_files(
    stored: Table, files: Sequence[CorpusFile], identities: Sequence[str]
) -> dict[str, tuple[object, object]]:
    """Return the files of a corpus that differ from the dataset's, as (stored, now)."""
    there, known = {*identities}, {file["identity"] for file in stored.files}
    lost = [file for file in stored.files if file["identity"] not in there]
    new = [
        (str(file.path), identity)
        for file, identity in zip(files, identities, strict=True)
        if identity not in known
    ]
    if lost and len(files) == len(stored.files) and len(lost) == len(new):
        pairs = zip(lost, new, strict=True)
        return {f"corpus file {path}": (file["identity"], now) for file, (path, now) in pairs}
    if 0 < len(lost) <= _SHOWN:
        now = dict(new)
        return {
            f"corpus file {file['path']}": (file["identity"], now.get(file["path"], "missing"))
            for file in lost
        }
    return {"corpus": (plural(len(stored.files), "file"), plural(len(files), "file"))}


def can_grow(
    old: Mapping[str, Any], new: Mapping[str, Any], differences: Mapping[str, object]
) -> bool:
    """Return whether all differences are files or limits that --more would add."""
    larger = {"corpus"} if not {*old["corpus"]} - {*new["corpus"]} else set[str]()
    larger |= {
        name
        for name in _LIMITS
        if new[name] is not None and (old[name] is None or old[name] < new[name])
    }
    return bool(differences) and larger.issuperset(differences)


def refuse_other_growth(url: str, wanted: Table, stored: Table) -> None:
    """Refuse to continue if another process has added other documents meanwhile."""
    same = stored.files == wanted.files and stored.units == wanted.units
    if not same:
        raise StoreError(
            f"{url}: another process has added other documents meanwhile "
            f"({len(stored.units):,} units and {len(stored.files):,} files there, "
            f"{len(wanted.units):,} and {len(wanted.files):,} here); run the same command again"
        )
