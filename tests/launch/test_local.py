"""Processes on this machine."""

import pytest

from spile.core.errors import ConfigError
from spile.launch.local import Local
from support.launches import job


def test_slices_have_shares_and_worlds_have_ports_of_their_own() -> None:
    seats = [host.seat for host in Local(slices=2, world_size=2, port=9000).hosts()]
    assert [seat.environment() for seat in seats] == [
        {
            "MACHINE_ID": str(slice), "TOTAL_MACHINES": "2",
            "COORDINATOR_ADDRESS": f"127.0.0.1:{9000 + slice}", "NUM_HOSTS": "2",
            "HOST_ID": str(process),
        }
        for slice in (0, 1)
        for process in (0, 1)
    ]  # fmt: skip
    assert [seat.number for seat in seats] == [0, 1, 2, 3]


def test_each_process_sees_gpus_of_its_own() -> None:
    seen = [
        host.seat.environment()["CUDA_VISIBLE_DEVICES"]
        for host in Local(slices=2, gpus_each=2).hosts()
    ]
    assert seen == ["0,1", "2,3"]


def test_every_process_is_handed_a_script_of_its_own() -> None:
    commands = Local(slices=3).render(job())
    assert [command.argv for command in commands] == [("sh", "-s")] * 3
    assert [command.where for command in commands] == ["slice 0", "slice 1", "slice 2"]
    assert len({command.stdin for command in commands}) == 3


@pytest.mark.parametrize("changes", [{"slices": 0}, {"world_size": -1}, {"gpus_each": 0}])
def test_counts_below_one_are_refused(changes: dict[str, int]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be at least 1"):
        Local(**changes)
