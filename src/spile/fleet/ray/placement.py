"""Places for slices on a Ray cluster: nodes, groups of nodes, TPU slices. No jax."""

import importlib
import logging
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spile.core.config import RayOptions
from spile.core.errors import ConfigError, first_line
from spile.core.libraries import import_library

_log = logging.getLogger("spile.fleet")
_TOPOLOGY, _SLICE_NAME = "ray.io/tpu-topology", "ray.io/tpu-slice-name"
_GROUP = "group"  # the name of every placement of more than one node
_CONNECT_SECONDS = 5


@dataclass(eq=False)
class Placement:
    """Room for one slice."""

    name: str  # its node; a node where a slice has failed pauses for a while
    needs: Mapping[str, float]  # resources of each host
    hosts: int = 1
    group: Any = None
    reservation: Any = None  # for a TPU slice
    hellos: dict[int, Mapping[str, Any]] = field(
        default_factory=dict[int, Mapping[str, Any]]
    )  # by host


def connect(address: str) -> Any:
    """Return the `ray` module, connected to a cluster.

    Raises:
        ConfigError: if it is not installed, or there is no such cluster.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:  # Ray would try for a minute
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"--ray-address {address}: not reachable ({error.strerror or error}); give the "
                "address that `ray start --head` prints"
            ) from None
    ray = import_library("ray", "--engine ray", "'spile[ray]'")
    try:
        ray.init(
            address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR"
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster there ({first_line(error)}); run "
            "`ray start --head` on one node, and `ray start --address=HOST:PORT` on the others"
        ) from error
    return ray


def lost(ray: Any, error: Exception) -> bool:
    """Return whether an actor is gone, as opposed to having raised an error."""
    errors = ray.exceptions
    return isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)


class Placements:
    """The cluster's resources, minus those that our slices use."""

    def __init__(self, ray: Any, options: RayOptions) -> None:
        self._ray, self._options = ray, options
        self._given = options.resources()
        self._taken: list[Placement] = []
        self._reserver = ThreadPoolExecutor(1, "reserve")  # reserving blocks
        self._reserving: Future[Placement] | None = None

    def free(self, count: int, resting: Collection[str]) -> list[Placement]:
        """Take and return at most `count` places for slices."""
        if count <= 0:
            return []
        if self._options.ray_topology:
            found = self._tpu_slices(resting)
        elif self._options.ray_hosts > 1:
            found = self._groups(count, resting)
        else:
            found = self._nodes(count, resting)
        self._taken += found
        return found

    def options(self, placement: Placement) -> list[dict[str, Any]]:
        """Return Ray's options for the actor of each host."""
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        needs = {**placement.needs}
        sizes = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0)}
        if placement.group is None:
            where = [strategies.NodeAffinitySchedulingStrategy(placement.name, soft=False)]
        else:
            where = [
                strategies.PlacementGroupSchedulingStrategy(placement.group, n)
                for n in range(placement.hosts)
            ]
        return [{**sizes, "resources": needs, "scheduling_strategy": each} for each in where]

    def give_back(self, placement: Placement) -> None:
        if placement not in self._taken:
            return
        self._taken.remove(placement)
        with suppress(Exception):  # (the cluster may have dropped it with a node)
            if placement.reservation is not None:
                placement.reservation.shutdown()
            elif placement.group is not None:
                self._ray.util.remove_placement_group(placement.group)

    def close(self) -> None:
        self._reserver.shutdown(wait=False, cancel_futures=True)

    def described(self) -> str:
        """Describe what a slice needs and what the nodes have, to explain why nothing starts."""
        options = self._options
        wanted = options.ray_topology or options.ray_resources or "all of a node"
        hosts = f" on each of {options.ray_hosts} nodes" if options.ray_hosts > 1 else ""
        nodes = ", ".join(_counted(node["Resources"]) for node in self._alive())
        return f"a slice needs {wanted}{hosts}; the nodes have {nodes}"

    def _alive(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _room(self) -> list[tuple[str, dict[str, float], int]]:
        """Return the nodes that can hold a host of a slice, its needs, and how many fit on each."""
        room: list[tuple[str, dict[str, float], int]] = []
        for node in self._alive():
            total = node["Resources"]
            needs = self._given or _whole(total)
            times = min((int(total.get(n, 0) // amount) for n, amount in needs.items()), default=0)
            if times:
                room.append((node["NodeID"], needs, times))
        return room

    def _nodes(self, count: int, resting: Collection[str]) -> list[Placement]:
        found: list[Placement] = []
        for name, needs, times in self._room():
            used = sum(placement.name == name for placement in self._taken)
            if name not in resting:
                found += [Placement(name, needs) for _ in range(times - used)]
        return found[:count]

    def _groups(self, count: int, resting: Collection[str]) -> list[Placement]:
        """Return groups of hosts on different nodes."""
        hosts, room = self._options.ray_hosts, self._room()
        free = sum(times for _, _, times in room) // hosts if len(room) >= hosts else 0
        if _GROUP in resting or free <= len(self._taken):
            return []
        needs = room[0][1]
        return [
            Placement(
                _GROUP,
                needs,
                hosts,
                self._ray.util.placement_group([dict(needs)] * hosts, strategy="STRICT_SPREAD"),
            )
            for _ in range(min(count, free - len(self._taken)))
        ]

    def _tpu_slices(self, resting: Collection[str]) -> list[Placement]:
        """Return a slice that Ray has reserved meanwhile, and reserve the next one."""
        found: list[Placement] = []
        if self._reserving and self._reserving.done():
            done, self._reserving = self._reserving, None
            try:
                found.append(done.result())
            except ValueError as error:
                raise ConfigError(
                    f"--ray-topology {self._options.ray_topology}: {error}"
                ) from error
            except Exception as error:
                _log.warning("no TPU slice yet: %s", first_line(error))
        topology = (self._options.ray_topology or "").partition(":")[2]
        labels = [node.get("Labels", {}) for node in self._alive()]
        there = {each.get(_SLICE_NAME) for each in labels if each.get(_TOPOLOGY) == topology}
        if (
            self._reserving is None
            and _GROUP not in resting
            and len(there) > len(self._taken) + len(found)
        ):
            self._reserving = self._reserver.submit(self._reserve)
        return found

    def _reserve(self) -> Placement:
        version, _, topology = (self._options.ray_topology or "").partition(":")
        tpu: Any = importlib.import_module("ray.util.tpu")
        slice = tpu.slice_placement_group(topology, version, self._given or None)
        return Placement(
            _GROUP, dict(slice.bundle_resources), slice.num_bundles, slice.placement_group, slice
        )


def _whole(total: Mapping[str, float]) -> dict[str, float]:
    """Return all accelerators of a node, or its CPUs."""
    for kind in ("TPU", "GPU"):
        if total.get(kind):
            return {kind: total[kind], **({"CPU": 1.0} if total.get("CPU", 0) >= 1 else {})}
    return {"CPU": total["CPU"]} if total.get("CPU") else {}


def _counted(total: Mapping[str, float]) -> str:
    kinds = ("CPU", "GPU", "TPU")
    return " ".join(f"{kind}={total[kind]:g}" for kind in kinds if total.get(kind)) or "nothing"
