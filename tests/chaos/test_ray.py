"""A real Ray cluster of several nodes on this machine, whose workers and raylets are killed.

`make chaos-fleets` runs them: more than twenty kills, slices of two hosts, TPU slices as Ray places
them, how much a node that joins does, and what a unit costs.
"""

import importlib.util
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Witness, Work, check_same
from spile.core.tensors import write_tensors
from support import tiny
from support.ray_cluster import Cluster
from support.worlds import Member, check_equal, runs, wait_until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed"),
]

# Every step takes a while, so that kills fall between units. Every process of Ray runs this code,
# and most do not compute: it patches the module when it is imported instead of importing it.
SLOW = """
import importlib.abc, importlib.util, os, sys, time

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "spile.run.step.sweep":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            call = module.Sweep.__call__
            pause = float(os.environ.get("JAX_TEST_PAUSE", "0"))
            module.Sweep.__call__ = lambda *given: (time.sleep(pause), call(*given))[1]

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Late())
"""
Reference = tuple[Work, Path]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that is only a head, which takes no slices."""
    plant = tmp_path_factory.mktemp("plant")
    (plant / "sitecustomize.py").write_text(SLOW)
    paths = os.pathsep.join(p for p in (str(plant), os.environ.get("PYTHONPATH", "")) if p)
    made = Cluster({"PYTHONPATH": paths})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_node_is_left(cluster: Cluster) -> Iterator[None]:
    """Kill the nodes however a test ends: the next test needs an empty cluster."""
    yield
    cluster.kill_all()


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    work = Work(model, tiny.write_corpus(folder / "corpus.jsonl", 100, seed=6))
    work.options["taps"] = "resid_post:0+2"
    work.extract(folder / "out")
    return work, folder / "out"


class Driver(Member):
    """`spile extract --engine ray`."""

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        out: Path,
        *more: str,
        pause: float = 0.2,
        **options: Any,
    ) -> None:
        flags = work.flags(out, stale_after=2, **options)
        flags += ["--engine", "ray", "--ray-address", cluster.address, *more]
        super().__init__(("extract", *flags), {"JAX_TEST_PAUSE": str(pause)})

    def finish(self, seconds: float = 180) -> None:
        wait_until(lambda: self.poll() is not None, seconds, lambda: self.err)
        assert self.process.returncode == 0, self.err


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


def at_work(out: Path) -> list[int]:
    """Ids of the running processes of slices, from their heartbeats."""
    records = [json.loads(path.read_bytes()) for path in out.glob("workers/**/*.json")]
    return [r["pid"] for r in records if r["state"] == "running" and runs(r["pid"])]


def after_units(driver: Driver, out: Path, count: int = 1) -> None:
    before = done(out)
    wait_until(
        lambda: done(out) >= before + count or driver.poll() is not None, 120, lambda: driver.err
    )


@pytest.mark.full
def test_killed_workers_and_raylets_lose_and_double_no_unit(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    work, expected = reference
    wanted, rng = 24, random.Random(9)
    nodes = [cluster.add(num_cpus=1) for _ in range(3)]
    kills, raylets, dataset = 0, 0, 0
    while kills < wanted:
        out = tmp_path / str(dataset)
        dataset += 1
        witness, driver = Witness(out), Driver(cluster, work, out)
        try:
            while driver.poll() is None:
                after_units(driver, out, rng.randint(1, 2))
                witness.look()
                workers = at_work(out)
                if kills >= wanted or not workers or driver.poll() is not None:
                    continue
                # A worker, then a whole node, which another replaces.
                if kills % 2:
                    cluster.kill(nodes.pop(rng.randrange(len(nodes))))
                    raylets += 1
                    nodes.append(cluster.add(num_cpus=1))
                else:
                    os.kill(rng.choice(workers), signal.SIGKILL)
                kills += 1
            driver.finish()
            assert "is lost" in driver.err or kills >= wanted
        finally:
            driver.end()
        witness.look()
        witness.check()
        check_same(out, expected)
    assert raylets == wanted // 2


@pytest.mark.full
def test_units_whose_slice_did_not_live_to_say_so_are_not_waited_for(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    work, expected = reference
    cluster.add(num_cpus=1)
    out = tmp_path / "out"
    driver = Driver(cluster, work, out, pause=1.0)
    try:
        wait_until(lambda: bool(at_work(out)), 120, lambda: driver.err)
        driver.process.send_signal(signal.SIGSTOP)
        os.kill(at_work(out)[0], signal.SIGKILL)
        work.extract(out, stale_after=2)
        driver.process.send_signal(signal.SIGCONT)
        driver.finish(60)
    finally:
        driver.process.send_signal(signal.SIGCONT)
        driver.end()
    check_same(out, expected)


@pytest.mark.full
def test_slices_of_two_hosts_are_replaced_whole(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    work, expected = reference
    for _ in range(3):
        cluster.add(num_cpus=1)
    out = tmp_path / "out"
    driver = Driver(cluster, work, out, "--ray-hosts", "2", mesh="data=2", heartbeat_timeout=10)
    try:
        after_units(driver, out)
        os.kill(at_work(out)[-1], signal.SIGKILL)
        after_units(driver, out)
        driver.finish()
        assert driver.err.count("is lost") == 1
        assert driver.err.count("is at work; 1 slices") == 2
    finally:
        driver.end()
    records = [json.loads(path.read_bytes()) for path in out.glob("done/*/*.json")]
    assert {record["made_by"]["processes"] for record in records} == {2}
    check_equal(out, expected)


@pytest.mark.full
def test_tpu_slices_are_placed_as_they_are_wired(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    """Nodes that say they are hosts of two v4 slices; their numbers are not Ray's."""
    work, expected = reference
    for name in ("a", "b"):
        for worker in (1, 0):
            resources = {"TPU": 4, name: 1, **({"TPU-v4-16-head": 1} if worker == 0 else {})}
            labels = {
                "ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-topology": "2x2x2", "ray.io/tpu-pod-type": "v4-16",
            }  # fmt: skip
            told = {"TPU_NAME": name, "TPU_WORKER_ID": str(worker)}
            cluster.add(num_cpus=1, resources=resources, labels=labels, env_vars=told)
    out = tmp_path / "out"
    driver = Driver(cluster, work, out, "--ray-topology", "v4:2x2x2", mesh="data=2")
    try:
        driver.finish()
        assert "2 slices" in driver.err
    finally:
        driver.end()
    check_equal(out, expected)


@pytest.mark.full
def test_errors_and_stops_end_the_run_as_they_would_without_ray(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    work, expected = reference
    cluster.add(num_cpus=1)
    out = tmp_path / "out"
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.embed_tokens.weight"][tiny.BOS, 5] = float("inf")
    broken = tiny.write_model(tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    write_tensors(broken / "model.safetensors", tensors)
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (2, "absent.jsonl", {"corpus": tmp_path / "absent.jsonl"}),
        (3, "NaN or infinity in unit ", {"model": broken}),
        (130, "interrupted; what is committed stays valid", {}),
    ]
    for code, named, options in cases:
        where = out if code == 130 else tmp_path / str(code)
        driver = Driver(cluster, work, where, **options)
        try:
            if code == 130:
                after_units(driver, where)
                driver.process.send_signal(signal.SIGTERM)
            wait_until(lambda d=driver: d.poll() is not None, 120, lambda d=driver: d.err)
            assert driver.process.returncode == code, driver.err
            assert named in driver.last_line
        finally:
            driver.end()
    driver = Driver(cluster, work, out, pause=0)
    try:
        driver.finish()
    finally:
        driver.end()
    check_same(out, expected)


@pytest.mark.full
def test_a_node_that_joins_takes_half_of_what_is_left(
    cluster: Cluster, reference: Reference, tmp_path: Path
) -> None:
    """Each step pauses a second, so two nodes that work side by side commit in turn."""
    work, expected = reference
    cluster.add(num_cpus=1)
    out = tmp_path / "out"
    driver = Driver(cluster, work, out, pause=1.0)
    try:
        after_units(driver, out, 2)
        cluster.add(num_cpus=1)
        wait_until(lambda: len(+committed(out)) == 2, 120, lambda: driver.err)
        before = committed(out)
        wait_until(lambda: (committed(out) - before).total() >= 6, 120, lambda: driver.err)
        taken = committed(out) - before
        driver.finish()
    finally:
        driver.end()
    check_same(out, expected)
    assert len(taken) == 2 and min(taken.values()) >= 2, taken


def committed(out: Path) -> Counter[int]:
    """How many units each process has committed, by its heartbeat."""
    records = [json.loads(path.read_bytes()) for path in out.glob("workers/**/*.json")]
    return Counter({r["pid"]: r.get("progress", {}).get("units", 0) for r in records})


@pytest.mark.full
def test_a_unit_costs_less_than_50_ms_more_than_without_ray(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    work = Work(model, tiny.write_corpus(tmp_path / "corpus.jsonl", 300, seed=8))
    work.options.update(taps="embed", unit_tokens=60)
    cluster.add(num_cpus=1)
    driver = Driver(cluster, work, tmp_path / "ray", pause=0)
    try:
        driver.finish()
    finally:
        driver.end()
    tiny.spile("extract", *work.flags(tmp_path / "local"))
    each = {name: per_unit(tmp_path / name) for name in ("ray", "local")}
    assert each["ray"] - each["local"] < 0.05, each
    check_same(tmp_path / "ray", tmp_path / "local")


def per_unit(out: Path) -> float:
    """Return the seconds from the first commit to the last."""
    moments = sorted(path.stat().st_mtime for path in out.glob("done/*/*.json"))
    return (moments[-1] - moments[0]) / (len(moments) - 1)
