"""Processes that do each unit together make the same dataset, and refuse in one line."""

import json
import re
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import spile
from chaos.harness import Work, run
from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.dataset import format as fmt
from spile.objects import LocalObjects
from spile.run.world.child import _why as why_it_ended
from spile.run.world.rank import Rank
from spile.run.world.world import join
from support import tiny
from support.worlds import ABORTED, Group, check_equal, planted, slow_steps

# Rows of several shapes, of which some are dropped, and then every other one.
RECIPE = {
    "taps": "q:1,attn_pattern:0,resid_post:0+2,logprob",
    "where": "not bos and pos % 7 != 3",
    "every": 2,
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
    "batch_tokens": 256,
}
# Each process comes late to every call, by a time of its own.
SKEWED = """
import random, time
from spile.run.step import sweep
from spile.run.world import world

def late(call):
    def patched(*given):
        delay = chance.choice([0, 0, 0, 0.02, 0.1, 0.4])
        with open(__file__ + ".delays", "a") as file:
            file.write(f"{delay}\\n")
        time.sleep(delay)
        return call(*given)
    return patched

chance = random.Random(7)
sweep.Sweep.__call__ = late(sweep.Sweep.__call__)
joined = world.JoinedWorld
joined._get, joined._set = late(joined._get), late(joined._set)
"""


@dataclass(frozen=True)
class Made:
    """The dataset that one process makes on one device, and the work that makes it."""

    work: Work
    out: Path
    units: int

    def world(
        self, out: Path, processes: int, devices: int, mesh: str = "auto", **changes: Any
    ) -> Group:
        flags = self.work.flags(out, mesh=mesh, **changes.pop("options", {}))
        return Group(flags, processes, devices, **changes)

    def check_equal(self, out: Path) -> None:
        check_equal(out, self.out)


@pytest.fixture(scope="module")
def made(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    work = Work(model, corpus, RECIPE)
    out = tmp_path_factory.mktemp("made") / "out"
    work.extract(out)
    return Made(work, out, len(list((out / "done").glob("*/*"))))


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


def check_refused(group: Group, code: int, *named: str, seconds: float = 60) -> None:
    """Check that every process ends with that code, a last line that says why, and no traceback."""
    assert set(group.wait(seconds)) == {code}, group.said()
    for member in group.members:
        assert member.last_line.startswith("spile"), member.err
        assert "Traceback" not in member.err, member.err
        for name in named:
            assert name in member.last_line, f"{name!r} is not in {member.last_line!r}"


# -- the same rows ---------------------------------------------------------------------------


@pytest.mark.full
def test_one_process_on_four_devices_makes_what_one_device_makes(
    made: Made, tmp_path: Path
) -> None:
    with made.world(tmp_path / "out", 1, 4, "3d") as world:
        world.finish()
    made.check_equal(tmp_path / "out")


def test_two_processes_make_what_one_makes_and_only_the_first_reports(
    made: Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with made.world(out, 2, 2, "2d", options={"json": True, "shard_bytes": 8192}) as world:
        world.finish()
        told = json.loads(world[0].out)
        assert world[1].out == ""
    made.check_equal(out)
    assert told["units"] == made.units
    record = json.loads((out / "done" / "000000" / "00000001.json").read_bytes())
    assert (record["made_by"]["processes"], record["made_by"]["mesh"]) == (2, "data=2,model=2")
    # Rows left from the process that held them: each wrote about half of every tap.
    rows = {
        part: sum(s["count"] for s in record["shards"] if f".{part}." in s["key"])
        for part in (0, 1)
    }
    assert min(rows.values()) > 0.2 * sum(rows.values()), rows


@pytest.mark.full
@pytest.mark.parametrize("chosen", [{"pool": "mean"}, {"reduce": "mean,cov"}])
def test_two_processes_pool_what_one_pools_and_the_first_writes_it(
    chosen: dict[str, str], made: Made, tmp_path: Path
) -> None:
    """Documents are longer than contexts, so that their parts lie in rows of both processes."""
    options = {**chosen, "taps": "resid_post:0,logprob", "seq_len": 32, "where": "not bos"}
    work = Work(made.work.model, made.work.corpus, {**RECIPE, **options})
    work.extract(tmp_path / "one")
    out = tmp_path / "out"
    with made.world(out, 2, 2, "2d", options=options) as world:
        world.finish()
    check_equal(out, tmp_path / "one")
    record = json.loads((out / "done" / "000000" / "00000001.json").read_bytes())
    assert record["made_by"]["processes"] == 2
    assert not [shard for shard in record["shards"] if ".1." in shard["key"]]


@pytest.mark.full
def test_a_process_that_is_late_to_every_call_changes_nothing(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    skewed = {1: planted(tmp_path / "plant", SKEWED)}
    with made.world(out, 2, 2, "fsdp=2,model=2", environments=skewed) as world:
        world.finish()
    made.check_equal(out)
    delays = (tmp_path / "plant" / "sitecustomize.py.delays").read_text().split()
    assert sum(map(float, delays)) > 1


@pytest.mark.full
def test_other_worlds_on_other_meshes_go_on_where_one_was_stopped(
    made: Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    slow = planted(tmp_path / "plant", slow_steps(0.3))
    stopped: list[int] = []
    for processes, mesh, told in ((4, "1d", 2), (1, "3d", 0)):
        before = done(out)
        environments = {n: {**slow, "SPILE_PLANT": "1"} for n in range(processes)}
        with made.world(out, processes, 4 // processes, mesh, environments=environments) as world:
            world.until(lambda before=before: done(out) > before)
            world[told].process.send_signal(signal.SIGTERM)
            check_refused(world, 130, "interrupted", seconds=20)
        stopped.append(done(out))
        assert stopped[-1] < made.units
        assert run("verify", out, "--partial", "--json").json["faults"] == []
    with made.world(out, 2, 2, "data=4") as world:
        world.finish()
    made.check_equal(out)
    meshes = {
        (by["processes"], by["mesh"])
        for path in out.glob("done/*/*.json")
        for by in [json.loads(path.read_bytes())["made_by"]]
    }
    assert meshes == {(4, "model=4"), (1, "fsdp=2,model=2"), (2, "data=4")}


# -- what users get wrong --------------------------------------------------------------------


def refused_alike(made: Made, tmp_path: Path, code: int, *named: str, **changes: Any) -> None:
    with made.world(tmp_path / "out", 2, 1, **changes) as world:
        check_refused(world, code, *named)
    assert done(tmp_path / "out") == 0


@pytest.mark.full
def test_a_process_with_other_arguments_is_named_with_the_flag(made: Made, tmp_path: Path) -> None:
    own = {1: ["--shard-bytes", "8192"]}
    named = "process 1 (", "--shard-bytes 8192", "process 0 has 1073741824"
    refused_alike(made, tmp_path, 2, *named, own_flags=own)


@pytest.mark.full
def test_a_process_with_another_version_is_named(made: Made, tmp_path: Path) -> None:
    other = planted(tmp_path / "plant", "import spile\nspile.__version__ = '0.0.0'")
    named = "process 1 (", "spile '0.0.0'", repr(spile.__version__)
    refused_alike(made, tmp_path, 2, *named, environments={1: other})


@pytest.mark.full
def test_a_mesh_that_does_not_divide_is_refused_by_all(made: Made, tmp_path: Path) -> None:
    refused_alike(made, tmp_path, 2, "--mesh data=3", "there are 2", mesh="data=3")


@pytest.mark.full
def test_a_batch_that_processes_cannot_share_is_refused_by_all(made: Made, tmp_path: Path) -> None:
    named = "--batch-tokens 64", "2 processes cannot share", "a multiple of 128"
    refused_alike(made, tmp_path, 2, *named, mesh="1d", options={"batch_tokens": 64})


@pytest.mark.full
def test_a_model_that_no_mesh_holds_is_refused_by_all(made: Made, tmp_path: Path) -> None:
    code = "import spile.run.assembly as local\nlocal.memory_limit = lambda device: 10_000"
    small = planted(tmp_path / "plant", code)
    named = "the weights take", "more devices"
    refused_alike(made, tmp_path, 2, *named, environments={0: small, 1: small})


@pytest.mark.full
def test_what_one_process_fails_with_all_of_them_say(made: Made, tmp_path: Path) -> None:
    """The second process finds another model under the same name, in its own working directory."""
    here, there = tmp_path / "here", tmp_path / "there"
    tiny.write_model(here / "llama")
    tiny.write_model(there / "llama", seed=1)
    named = "process 1 (", "model weights"
    refused_alike(
        made, tmp_path, 2, *named, options={"model": "llama"}, folders={0: here, 1: there}
    )


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        port = address.rpartition(":")[2]
        with pytest.raises(ConfigError, match=rf"cannot listen on \S+:{port} .*in use"):
            join(Rank(address, 2, 0), Runtime(), threading.Event())


@pytest.mark.parametrize(
    ("host", "named"), [("127.0.0.1", "not reached within 1 s"), ("x.invalid", "no such host")]
)
def test_a_coordinator_that_is_not_there_is_named(host: str, named: str) -> None:
    address = f"{host}:{tiny.free_port()}"
    with pytest.raises(ConfigError, match=f"^--coordinator {re.escape(address)}: {named}"):
        join(Rank(address, 2, 1), Runtime(start_timeout=1), threading.Event())


@pytest.mark.full
def test_a_process_that_finds_no_coordinator_says_so(made: Made, tmp_path: Path) -> None:
    address = f"127.0.0.1:{tiny.free_port()}"
    with made.world(tmp_path / "out", 2, 1, ids=[1], coordinator=address, start_timeout=1) as world:
        check_refused(world, 2, f"--coordinator {address}", "not reached within 1 s")


def test_a_process_that_waits_for_others_can_be_stopped(made: Made, tmp_path: Path) -> None:
    with made.world(tmp_path / "out", 2, 1, ids=[0]) as world:
        world.until(lambda: listens(world.coordinator))
        world[0].process.send_signal(signal.SIGTERM)
        check_refused(world, 130, "interrupted", seconds=5)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.full
def test_processes_that_never_came_are_named(made: Made, tmp_path: Path) -> None:
    named = "processes 1, 3 of 4 never joined", "start all processes again"
    with made.world(tmp_path / "out", 4, 1, ids=[0, 2], start_timeout=5) as world:
        check_refused(world, ABORTED, *named)


@pytest.mark.full
def test_two_processes_with_one_id_are_told_so(made: Made, tmp_path: Path) -> None:
    with made.world(tmp_path / "out", 3, 1, ids=[0, 1, 1], start_timeout=8) as world:
        check_refused(world, ABORTED, "two processes have the id 1", "give each its own")


def test_two_signs_of_life_of_one_id_are_two_processes(tmp_path: Path) -> None:
    """Unless they have one parent, which starts the process again."""
    objects, rank = LocalObjects(tmp_path), Rank("127.0.0.1:9", 3, 0)

    def said(*parents: int) -> str:
        for number, parent in enumerate(parents):
            body = {"units": [], "counter": 1, "pid": 10 + number, "host": "h", "parent": parent,
                    "world": {"coordinator": rank.coordinator, "process": 1}}  # fmt: skip
            objects.replace(
                fmt.CURRENT.worker_key(f"w{number}", 0), fmt.encode_record("worker", body)
            )
        return why_it_ended(rank, objects, {}, 9)

    assert said(5, 6) == "two processes have the id 1 (h and h); give each its own"
    assert said(5, 5) == "processes 0, 2 of 3 never joined; start all of them"
