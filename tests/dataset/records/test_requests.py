"""The requests that one unit costs on a bucket, counted before a real S3 server."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from simulator.preemptible import WEIGHTS, MadeFiles, UnitIds, table_of
from spile.core.system import system
from spile.dataset import format as fmt
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.dataset.write.unit_writer import Attempt
from spile.objects import open_objects
from spile.plan.estimate import Budget
from spile.plan.prices import UNIT_REQUESTS, requests_of
from spile.run.pipeline.pickers import StorePicker
from support import servers


def requests_for(units: int, proxy: str) -> dict[str, int]:
    """Requests of a worker that does all units, from its first look to the manifest."""
    ledger = Ledger(open_objects(servers.new_s3_store()))
    table = ledger.create_table(table_of(units))
    ledger.check_weights(WEIGHTS)
    job: Any = SimpleNamespace(units=UnitIds(units), table=table)
    presence = Presence(ledger.objects, 30, ledger.layout)
    budget = Budget(table, ledger, None)
    picker = StorePicker(job, ledger, presence, budget, threading.Event())
    before = servers.kinds(proxy)
    while (unit := picker.take()[0]) is not None:
        files = MadeFiles(cast(Any, ledger.objects), table, unit.id, system().token(8))
        with Attempt(ledger, cast(Any, files)) as attempt:
            assert attempt.commit(files.finish())
        picker.done(unit.id)
    assert ledger.complete(table)
    after = servers.kinds(proxy)
    return {kind: count - before.get(kind, 0) for kind, count in after.items()}


def test_requests_for_each_unit_are_few_and_do_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 4)
    with servers.failing("s3", 0.0, seed=0) as proxy:
        few, many = requests_for(4, proxy), requests_for(12, proxy)
    more = {kind: (many[kind] - few[kind]) / 8 for kind in many}
    # A quarter of a segment belongs to each unit here, and of the look for the next group.
    table = table_of(1)
    planned = requests_of(table.units.tokens, table.taps, 1 << 30)
    assert planned.creates == UNIT_REQUESTS.creates + 1
    assert planned.creates <= more["create"] <= planned.creates + 0.5
    assert planned.lists <= more["list"] <= planned.lists + 1
    assert planned.reads <= more["read"] <= planned.reads + 1
    assert more["delete"] <= 1  # the heartbeat that showed the unit before; it costs nothing
    assert sum(few.values()) / 4 < 1.5 * sum(many.values()) / 12
