"""`--baseline`: the values that attributions are differences from. No jax.

zero             nothing is subtracted
DATASET          the rows of another dataset: of the same document, at the same token
DATASET[:LABEL]  a mean for each tap, of a dataset that --reduce made
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from spile.core.config import Recipe
from spile.core.errors import ConfigError, InputError, StoreError
from spile.core.humanize import size
from spile.core.options import listed
from spile.core.pool import JACOBIAN, Pool
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.models.config.arch import Arch
from spile.models.splices import digest
from spile.models.taps import Tap, sites_on_paths
from spile.objects.paths import path_of
from spile.plan.tapped import writers_of

ZERO = "zero"
MEANS, ROWS = "mean", "rows"  # the kinds of baselines that are stored
AT_ONCE = 512 << 20  # bytes of another dataset's rows that a unit should hold
_MOST_BYTES = 8 << 30  # that a unit may hold


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """What the values of taps are compared with.

    Attributes:
        given: the option's value.
        identity: what it is, without paths: part of the recipe.
        means: by tap, in the shape of a row; empty if there are rows.
        dataset: the one whose rows are the baseline, if it is no mean.
        columns: the taps whose rows stand beside each token, in this order, and their shapes.
            (Taps here are of all heads.)
    """

    given: str
    identity: str
    means: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    dataset: Dataset | None = field(default=None, repr=False)
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @property
    def kind(self) -> str:
        return ROWS if self.dataset is not None else MEANS

    @property
    def width(self) -> int:
        """Values beside each token."""
        return sum(map(math.prod, self.columns.values())) if self.dataset is not None else 0

    def of_tap(self, tap: Tap) -> np.ndarray:
        """Return the mean of the heads of a tap, or the columns of its values beside each token."""
        name = replace(tap, heads=()).name
        if self.dataset is None:
            return self.means[name][list(tap.heads)] if tap.heads else self.means[name]
        names = [*self.columns]
        before = names[: names.index(name)]
        first = sum(math.prod(self.columns[each]) for each in before)
        shape = self.columns[name]
        places = first + np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        return (places[list(tap.heads)] if tap.heads else places).reshape(-1)

    def arrays(
        self, taps: Sequence[Tap], writers: Sequence[Tap], steps: int | None
    ) -> dict[str, np.ndarray]:
        """Return what a step reads, by tap, as `of_tap` returns it: see `Extras.baselines`.

        Args:
            taps: those that are stored.
            writers: that edges come from.
            steps: of integrated gradients, whose paths begin here.
        """
        found = {tap.name: self.of_tap(tap.source) for tap in taps if tap.kind.summed}
        for whole in dict.fromkeys(replace(tap, heads=()) for tap in writers):
            found[whole.name] = self.of_tap(whole)
        for place, some in sites_on_paths(taps).items() if steps else ():
            found[place.name] = self.of_tap(replace(some[0].source, heads=()))
        return found

    def beside(self, index: np.ndarray, needed: np.ndarray) -> np.ndarray:
        """Return the values beside tokens [tokens, width] in float32; zero where none is needed.

        Args:
            index: the entries of all tokens of some documents.
            needed: which of them.

        Raises:
            InputError: if the dataset's documents are not as long, or lack a token.
        """
        assert self.dataset is not None
        found = np.zeros((len(index), self.width), np.float32)
        places: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        for doc in np.unique(index["doc"][needed]).tolist():
            own = np.flatnonzero((index["doc"] == doc) & needed)
            tokens = int(index["offset"][index["doc"] == doc].max()) + 1
            rows.append(self._rows_of(doc, index["offset"][own], tokens))
            places.append(own)
        if not rows:
            return found
        at, number = np.concatenate(places), np.concatenate(rows)
        order = np.argsort(number, kind="stable")
        first = 0
        for name, shape in self.columns.items():
            width = math.prod(shape)
            read = self.dataset.read_at(name, number[order])
            found[at[order], first : first + width] = read.reshape(len(order), width)
            first += width
        return found

    def of_context(self, doc: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return what a document's tokens are compared with, by tap: [tokens, ...] or a row.

        Zero where the dataset has no row.
        """
        if self.dataset is None:
            return self.means
        document = self.dataset.document(doc)
        offsets = document.index["offset"]
        inside = (offsets >= start) & (offsets < stop)
        found: dict[str, np.ndarray] = {}
        for name, shape in self.columns.items():
            found[name] = np.zeros((stop - start, *shape), np.float32)
            found[name][offsets[inside] - start] = document.read(name)[inside]
        return found

    def refuse_large(self, tokens: int, unit: int) -> None:
        """Raise if the rows beside a unit's tokens would fill the memory."""
        if (held := 4 * tokens * self.width) > _MOST_BYTES:
            most = max(1, AT_ONCE // (4 * self.width))
            raise ConfigError(
                f"--baseline {self.given}: unit {unit} would hold {size(held)} of its rows; give "
                f"--unit-tokens {most}"
            )

    def _rows_of(self, doc: int, offsets: np.ndarray, tokens: int) -> np.ndarray:
        """Return the row of each token of a document.

        Args:
            tokens: that the document has here.
        """
        assert self.dataset is not None
        told = f"--baseline {self.given}: document {doc}"
        there = self._tokens.get(doc)
        if there != tokens:
            has = "is not in that dataset" if there is None else f"has {there} tokens there"
            raise InputError(
                f"{told} {has}, and {tokens} here; pair documents of equal lengths, in one order"
            )
        try:
            document = self.dataset.document(doc)
        except StoreError:
            raise InputError(f"{told} has no rows there; make it without --where") from None
        known = document.index["offset"]
        at = np.searchsorted(known, offsets)
        missing = at == len(known)
        missing |= known[np.minimum(at, len(known) - 1)] != offsets
        if missing.any():
            raise InputError(
                f"{told} has no row of token {int(offsets[missing][0])} there; make that dataset "
                "without --where and --every, or give both the same"
            )
        return document.rows[at]

    @cached_property
    def _tokens(self) -> dict[int, int]:
        """How many tokens each document has there."""
        assert self.dataset is not None
        table = self.dataset.documents(["doc", "tokens"])
        return dict(zip(table["doc"].to_pylist(), table["tokens"].to_pylist(), strict=True))


def baseline_source(given: str | None, change: Callable[[str], str]) -> str | None:
    """Return `--baseline` with its path changed."""
    if given in (None, ZERO):
        return None
    where, label = _parted(given)
    return change(where) + ("" if label is None else f":{label}")


def find_baseline(
    recipe: Recipe,
    taps: Sequence[Tap],
    arch: Arch,
    seq_len: int,
    model: Callable[[], Mapping[str, str]] | None = None,
) -> Baseline | None:
    """Return the baseline of a recipe; None if it is zero. Opens its dataset.

    Args:
        model: returns what identifies the model, which must have made the baseline (it reads some
            of the weights); None: any that fits.

    Raises:
        ConfigError: if no tap is compared with it, or the dataset does not fit.
    """
    given, steps = recipe.baseline, recipe.steps
    if steps and not any(tap.kind.of for tap in taps):
        raise ConfigError(f"--steps {steps}: no tap holds a gradient; add e.g. resid_post_attr:4")
    if given is None:
        return None
    writers = writers_of(recipe, taps, arch)
    made = (tap.source for tap in taps if tap.kind.summed or (steps and tap.kind.of))
    wanted = [*dict.fromkeys(replace(tap, heads=()) for tap in (*made, *writers))]
    if not wanted:
        raise ConfigError(
            f"--baseline {given}: no tap holds an attribution; add e.g. resid_post_attr:4"
        )
    if given == ZERO:
        return None
    where, label = _parted(given)
    told = f"--baseline {given}"
    try:
        dataset = open_dataset(where)
    except (ConfigError, StoreError) as error:
        raise ConfigError(f"--baseline: {error.message}") from None
    if model is not None and dataset.recipe.model != model():
        raise ConfigError(f"{told}: was made by another model; make one with this --model")
    for tap in wanted:
        if tap.name not in {*dataset.taps}:
            raise ConfigError(f"{told}: has no {tap.name}; it has {listed(dataset.taps)}")
    pool = Pool.parse(dataset.recipe.pool) if dataset.recipe.pool else None
    if pool is None:
        if label is not None:
            raise ConfigError(f"{told}: has rows, and no label {label!r}; leave :{label} out")
        if dataset.recipe.seq_len != seq_len:
            raise ConfigError(
                f"{told}: its contexts have {dataset.recipe.seq_len} tokens, and these "
                f"{seq_len}; give --seq-len {dataset.recipe.seq_len}"
            )
        passes = (dataset.pass_of(tap.name) for tap in wanted)
        identity = " ".join(dict.fromkeys((ROWS, dataset.fingerprint, *filter(None, passes))))
        columns = {tap.name: tap.shape(arch, 1) for tap in wanted}
        return Baseline(given=given, identity=identity, dataset=dataset, columns=columns)
    if pool.labels is None or pool.by == JACOBIAN:
        raise ConfigError(
            f"{told}: was made with {pool.flag}, and a baseline needs rows of tokens, or "
            "--reduce mean"
        )
    means = {tap.name: _mean(told, dataset, tap, label) for tap in wanted}
    flat = np.concatenate([mean.reshape(-1) for mean in means.values()])
    return Baseline(given=given, identity=f"{MEANS} {digest(flat)}", means=means)


def _parted(given: str) -> tuple[str, str | None]:
    """Return the dataset, and the label if one is named."""
    where, colon, label = given.rpartition(":")
    if not colon or "/" in label or not where or path_of(given).is_dir():
        return given, None
    return where, label


def _mean(told: str, dataset: Dataset, tap: Tap, label: str | None) -> np.ndarray:
    """Return the mean of a tap over the tokens of one label, in float32."""
    reduced = dataset.reduced(tap.name)
    spelled = [_spelled(each) for each in reduced.labels]
    if label is None and len(spelled) == 1:
        place = 0
    elif label in spelled:
        place = spelled.index(label)
    else:
        asked = "name one of its labels" if label is None else f"has no label {label!r}"
        raise ConfigError(f"{told}: {asked}: {dataset.url}:LABEL, of {listed(spelled)}")
    return reduced.means[place].astype(np.float32)


def _spelled(label: object) -> str:
    several = cast(tuple[object, ...], label) if isinstance(label, tuple) else (label,)
    return ",".join(map(str, several))
