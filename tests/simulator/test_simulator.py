"""A fleet under every fault of a bucket, in simulated time: nothing is lost, whatever the seed.

A seed that fails is repeated by `Simulation(SEED).run()`, step for step.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from obstore import exceptions

from simulator import fleet
from simulator.fleet import Plan, Simulation, Violation
from simulator.store import Faults
from spile.dataset.format import Done
from spile.dataset.records.ledger import Ledger
from spile.dataset.write.unit_writer import Attempt
from spile.objects.bucket import BucketObjects
from spile.plan.estimate import Budget
from support import tiny

SUITE = 6  # seeds
FULL, CHUNK = 3000, 100

ROUGH = Faults(refused=0.1, lost=0.03, late=0.02, twice=0.02, echoed=0.02, latency=0.1, cut=0.003)


@pytest.mark.parametrize("seed", range(SUITE))
def test_nothing_is_lost_under_faults_that_a_seed_draws(seed: int) -> None:
    done = Simulation(seed).run()
    assert done.exits.count(("extract", 0)) == done.plan.workers
    assert done.exits.count(("compact", 0)) == done.plan.compactors


@pytest.mark.full
@pytest.mark.parametrize("first", range(SUITE, FULL, CHUNK))
def test_nothing_is_lost_under_the_faults_of_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        Simulation(seed).run()


@pytest.mark.full
def test_a_large_fleet_comes_to_its_end() -> None:
    plan = Plan(workers=60, units=6, faults=ROUGH, kills=20, interrupts=10, pauses=10, readers=2)
    for seed in range(3):
        Simulation(seed, plan).run()


def test_a_seed_repeats_itself_step_for_step() -> None:
    plan = Plan(workers=2, units=2, faults=ROUGH, kills=2, interrupts=2, pauses=1)
    one, other, third = (Simulation(seed, plan).run() for seed in (7, 7, 8))
    assert one.trace == other.trace
    assert one.trace != third.trace
    assert len(one.trace) > 200


_DIGESTS = """
import json, sys
from simulator.fleet import Simulation
print(json.dumps([Simulation(seed).run().digest() for seed in range(*map(int, sys.argv[1:]))]))
"""


@pytest.mark.full
def test_a_seed_repeats_itself_in_another_process() -> None:
    """Names and sets are hashed otherwise there."""
    environment = tiny.environment() | {"PYTHONPATH": str(Path(__file__).parents[1])}
    found = [
        subprocess.run(
            [sys.executable, "-c", _DIGESTS, "0", "8"],
            env={**environment, "PYTHONHASHSEED": hashed},
            capture_output=True, text=True, check=True,
        ).stdout
        for hashed in ("1", "2")
    ]  # fmt: skip
    assert json.loads(found[0]) == json.loads(found[1])


# -- what is planted is found -------------------------------------------------------------------


def _commit_that_discards(attempt: Any, done: Done) -> bool:
    """As compact and shuffle did: until the commit has returned, an end removes the files."""
    committed = attempt._ledger.commit(done)
    attempt._removable = False
    if not committed:
        attempt._remove()
    return committed


def _create_that_believes_conflicts(
    objects: Any, key: str, data: Any, unsure: bool = False
) -> str | None:
    """As buckets did: "already exists" is what obstore makes of 409 as well as of 412."""
    trying = objects._trying("creating", key)
    while True:
        try:
            return str(objects._store.put(key, data, mode="create", use_multipart=False)["e_tag"])
        except exceptions.AlreadyExistsError:
            if not unsure:
                return None
            try:
                same = memoryview(objects.get(key)) == memoryview(data)
            except FileNotFoundError:
                return None
            return "" if same else None
        except Exception as error:
            objects._failed(trying, error)
            unsure = True


def _commit_that_believes_conflicts(ledger: Any, done: Done) -> bool:
    """As the ledger did: what cannot be read back is another worker's."""
    data = fleet.fmt.encode_record("done", done.to_json())
    if ledger.objects.create(fleet.fmt.CURRENT.done_key(done.unit), data):
        return True
    stored = ledger.read_done(done.unit)
    return stored is not None and stored.attempt == done.attempt


def _collect_abandoned(simulation: Any) -> None:
    fleet.collect_garbage(simulation._open(fleet.SOURCE), abandoned=True)


Patch = tuple[Any, str, Callable[..., Any]]
BELIEVING: list[Patch] = [
    (BucketObjects, "_create", _create_that_believes_conflicts),
    (Ledger, "commit", _commit_that_believes_conflicts),
    (Budget, "leaves_out", lambda *_: True),
]
BUSY = Plan(
    workers=2, units=3, faults=ROUGH, kills=1, interrupts=2, pauses=1, compactors=0, readers=0
)
REFUSED = Plan(
    workers=2, units=5, faults=Faults(refused=0.3, latency=0.05), kills=0, interrupts=0, pauses=0,
    collectors=0, compactors=0, readers=0,
)  # fmt: skip
STOPPED = Plan(
    workers=0, units=6, faults=Faults(latency=0.1, cut=0.02), kills=0, interrupts=0, pauses=0,
    collectors=0, readers=0, trouble=300.0, finished=True,
)  # fmt: skip


def _found(patches: list[Patch], plan: Plan, seeds: int) -> Iterator[str]:
    """What seeds find that find anything."""
    with ExitStack() as stack:
        for owner, name, replaced in patches:
            stack.enter_context(mock.patch.object(owner, name, replaced))
        for seed in range(seeds):
            try:
                Simulation(seed, plan).run()
            except (Violation, FileNotFoundError) as fault:  # (a planted one may crash, too)
                yield str(fault)


@pytest.mark.parametrize(
    ("patches", "plan", "fault"),
    [
        pytest.param(
            [(Attempt, "commit", _commit_that_discards)], STOPPED, "which a record names",
            id="files are discarded while their record is created", marks=pytest.mark.full,
        ),
        pytest.param(BELIEVING, REFUSED, "units are missing", id="409 is taken for a record"),
        pytest.param(
            [(Simulation, "_collect", _collect_abandoned)], BUSY, "was created before",
            id="gc takes attempts of unfinished units", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(patches: list[Patch], plan: Plan, fault: str) -> None:
    assert any(fault in found for found in _found(patches, plan, 60))


@pytest.mark.full
@pytest.mark.parametrize("kept", range(len(BELIEVING)))
def test_each_of_three_guards_alone_keeps_a_conflict_from_losing_a_unit(kept: int) -> None:
    patches = [patch for number, patch in enumerate(BELIEVING) if number != kept]
    assert list(_found(patches, REFUSED, 40)) == []
