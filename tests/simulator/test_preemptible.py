"""Fleets of preemptible workers lose and double nothing, and take little longer than they must.

A seed that fails is repeated by `simulate(Fleet(...), SEED)`, step for step.
"""

from typing import Any

import pytest

from simulator.preemptible import Fleet, FleetError, simulate
from spile.dataset.format import Done
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger

SMALL = Fleet(workers=5, units=40, lifetime=400.0)
LARGE = Fleet(workers=100, units=2000)
SEEDS, CHUNK = 200, 5


@pytest.mark.parametrize("seed", range(2))
def test_a_small_fleet_does_each_unit_once(seed: int) -> None:
    report = simulate(SMALL, seed)
    assert report.preempted
    limit = 1.1 * report.ideal + 2 * SMALL.unit_seconds + _again(SMALL)
    assert (1 - report.lost) * report.makespan <= limit  # lives are short here
    assert report.duplicated <= 0.01
    assert report.per_unit("replace") <= 2 + 1.5 * 80 / 10, "a beat every 10 s, and one for a claim"
    assert report.per_unit("create") <= 4 + 1 + 0.5, "files, a record, a share of what is derived"


def test_a_seed_repeats_itself() -> None:
    fleet = Fleet(workers=2, units=5, lifetime=200.0)
    one, other = (simulate(fleet, 7) for _ in range(2))
    assert (one.makespan, one.steps, one.requests) == (other.makespan, other.steps, other.requests)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_hundred_workers_take_little_longer_than_they_must(first: int) -> None:
    _check(LARGE, range(first, first + CHUNK))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 20, CHUNK))
def test_workers_with_shares_take_little_longer_than_they_must(first: int) -> None:
    _check(Fleet(workers=100, units=2000, shares=True), range(first, first + CHUNK))


def _check(fleet: Fleet, seeds: range) -> None:
    """Most seeds are within the target; if the last unit is preempted, it is begun once more."""
    reports = [simulate(fleet, seed) for seed in seeds]
    for report in reports:
        limit = 1.05 * report.ideal + fleet.unit_seconds + _again(fleet)
        assert report.makespan <= limit, report
        assert report.duplicated <= 0.01, report
        assert report.per_unit("create", "replace", "list") <= 30, report
    assert sum(report.within_target for report in reports) > len(reports) / 2


def _again(fleet: Fleet) -> float:
    """Return the seconds that a last unit takes more if it is preempted."""
    return fleet.stale_after + (1 + fleet.spread) * fleet.unit_seconds


# -- what is planted is found -------------------------------------------------------------------


@pytest.mark.full
def test_claims_without_a_look_at_others_are_found_as_duplicated_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claim(presence: Presence, unit: int) -> bool:
        presence.hold(unit)
        return True

    monkeypatch.setattr(Presence, "claim", claim)
    monkeypatch.setattr(Presence, "holders", lambda *_: {})
    assert not simulate(SMALL, 0).within_target


def test_a_unit_without_a_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.commit

    def commit(ledger: Any, done: Done) -> bool:
        return True if done.unit == 3 else real(ledger, done)

    monkeypatch.setattr(Ledger, "commit", commit)
    with pytest.raises(FleetError, match="8 done records of 9 units"):
        simulate(Fleet(workers=2, units=9, lifetime=1e9), 0)
