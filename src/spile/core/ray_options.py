"""How `--engine ray` uses a cluster. Like `Runtime`, nothing here changes what is in a dataset."""

from dataclasses import dataclass

from spile.core.errors import ConfigError
from spile.core.options import Options, option


@dataclass(frozen=True, kw_only=True)
class RayOptions(Options):
    """Slices, and where they run."""

    engine: str = option(
        "local",
        "local: this process, or with others it is joined to; ray: slices on a Ray cluster [local]",
        choices=("local", "ray"),
    )
    ray_address: str = option(
        "auto", "HOST:PORT of the cluster; auto: the one this machine belongs to [auto]"
    )
    ray_slices: int | None = option(
        None, "at most so many slices at a time [as many as there is room for]",
        kind="count", minimum=1,
    )  # fmt: skip
    ray_hosts: int = option(1, "hosts that do a unit together [1]", kind="count", minimum=1)
    ray_resources: str | None = option(
        None,
        "what a slice takes of each of its hosts, e.g. GPU=1 or TPU=4,CPU=8 [all accelerators of a "
        "node, or its CPUs]",
    )
    ray_topology: str | None = option(
        None, "TPU slices, placed by Ray as they are wired, e.g. v5e:4x4 or v4:2x2x2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resources()
        version, colon, topology = (self.ray_topology or "v:x").partition(":")
        if not (version and colon and topology):
            raise ConfigError(f"--ray-topology must be e.g. v5e:4x4, got {self.ray_topology!r}")
        if self.ray_topology and self.ray_hosts > 1:
            raise ConfigError("--ray-topology says how many hosts there are: leave out --ray-hosts")

    def resources(self) -> dict[str, float]:
        """Of each host; empty if it takes all."""
        found: dict[str, float] = {}
        for part in (self.ray_resources or "").split(",") if self.ray_resources else ():
            name, _, amount = part.partition("=")
            try:
                found[name.strip()] = float(amount)
            except ValueError:
                found[""] = 0
        if "" in found or any(not 0 < amount < 1e6 for amount in found.values()):
            raise ConfigError(
                f"--ray-resources must be e.g. GPU=1 or TPU=4,CPU=8, got {self.ray_resources!r}"
            )
        return found
