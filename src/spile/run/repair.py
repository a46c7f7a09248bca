"""`spile verify --repair`: make damaged and missing units again, as they were made before.

It is here, and not beside `verify`, because it runs the model to make units.
"""

import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial as bound
from typing import Any

from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError
from spile.dataset import format as fmt
from spile.dataset.maintain.compact import COMPACTED, recopy
from spile.dataset.maintain.repair import Repair, Repaired, drop_damaged
from spile.dataset.maintain.verify import Report
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass
from spile.dataset.records.table import read_tokenizer
from spile.metrics import Counters
from spile.models.files.checkpoint import model_directory
from spile.objects import Objects
from spile.run.extract import RunOptions, extract
from spile.run.world.devices import devices_here, prepared_device

_log = logging.getLogger("spile.run")


def repair(
    objects: Objects,
    report: Report,
    *,
    recipe: Recipe,
    source: Objects | None,
    partial: bool,
    counters: Counters,
    on_start: Callable[..., None],
    stop: threading.Event | None,
) -> Repaired:
    """Make units again that an audit found damaged or missing, of the dataset and of its passes.

    A pass without a fault is left as it is, even if it is not finished.

    Args:
        recipe: names model and corpus, if they have moved.
        source: for a compacted dataset, the dataset it was compacted from: units are copied again
            instead of computed. Units of passes are computed: no source has them.
        partial: only set damaged records aside, for the next `extract` to make their units.
    """
    run = bound(extract, recipe, counters=counters, on_start=on_start, stop=stop)

    def repaired_as(making: Repair, source: Objects | None = None) -> Repaired:
        if partial:
            making.withdraw()
        else:
            if making.tokenizer:
                making.restore_tokenizer(*_tokenizer_elsewhere(making, recipe, source))
            _make_again(making, source, run)
        making.set_aside_beside()
        if not partial:
            making.ledger.complete(making.table)
        return making.repaired

    repaired = repaired_as(Repair(report, Ledger(objects)), source)
    for name, found in report.passes.items():
        damaged = Pass(Ledger(objects), name)
        if not found.ok and not damaged.is_readable:
            repaired.passes[name] = drop_damaged(damaged)
        elif not found.ok:
            repaired.passes[name] = repaired_as(Repair(found, damaged.ledger))
    return repaired


def _make_again(making: Repair, source: Objects | None, run: Callable[..., object]) -> None:
    """Copy units again from `source`, or `run` the model for them."""
    url, table, made_by = making.objects.url, making.table, making.made_by()
    if not making.units and {fmt.MODEL, fmt.SCALES}.isdisjoint(making.beside):
        return
    if table.recipe.is_crosscoded:
        raise ConfigError(
            f"{url}: its latents were encoded from the rows of other datasets; remove it (`spile "
            "rm`), and run `spile encode` again"
        )
    if table.shuffled:
        raise ConfigError(
            f"{url}: no single unit of a shuffled dataset can be made again, since its "
            "rows come from all over the corpus; `spile shuffle SOURCE DEST --seed "
            f"{table.shuffled['seed']}` makes the whole dataset again"
        )
    if made_by and COMPACTED not in made_by and source is not None:
        raise ConfigError(
            f"--from: {url} has units that `spile extract` made; repair it without --from"
        )
    making.condemn()
    try:
        if source is not None:
            making.copy_beside(source)
            recopy(source, making.ledger, making.units, compress=making.compressed())
        else:
            making.refuse_impossible()
            run(url, _as_it_was(making, made_by), options=RunOptions(ledger=making.ledger))
    finally:
        making.pardon()


def _tokenizer_elsewhere(
    making: Repair, recipe: Recipe, source: Objects | None
) -> tuple[str, Mapping[str, bytes]]:
    """Return where the tokenizer is found, and its files: the model's, or those of `source`."""
    if source is not None:
        return source.url, read_tokenizer(source, Ledger(source).table())
    directory = model_directory(recipe.model or making.table.recipe.model_source)
    paths = {name: directory / name for name in making.tokenizer}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return str(directory), files


def _as_it_was(making: Repair, made_by: Mapping[str, Any]) -> Runtime:
    """Choose the mesh and the batch of the first run, if the devices are the same.

    Steps of the same shape, mesh and kind of device give the same bits.
    """
    runtime = Runtime(compress=making.compressed())
    (made_by, *_) = made_by.get("rows_by") or [
        made_by
    ]  # by whom the rows of merged units were made
    mesh, rows = str(made_by.get("mesh")), made_by.get("batch_rows")
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d{1,6})", mesh)}
    prepared_device()
    _, devices, kind = devices_here()
    was, here = (fmt.shown(made_by.get("device")), math.prod(sizes.values())), (kind, devices)
    if was != here or not fmt.is_count(rows):
        _log.warning(
            "units of %s (%d devices) are made again on %s (%d): rows may differ in the last bits",
            *was,
            *here,
        )
        return runtime
    groups = sizes.get("data", 1) * sizes.get("fsdp", 1)
    tokens = int(rows or 0) // groups * making.table.recipe.seq_len
    return replace(runtime, mesh=mesh if sizes else "auto", batch_tokens=max(1, tokens))
