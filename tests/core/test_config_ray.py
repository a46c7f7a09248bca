"""Options of a cluster: which are accepted, and which are refused by the flag's name."""

from pathlib import Path

import pytest

from chaos.harness import check_refused, run
from spile.core.config import RayOptions
from spile.core.errors import ConfigError


def test_resources_of_a_host_are_read() -> None:
    assert RayOptions().resources() == {}
    assert RayOptions(ray_resources="TPU=4, CPU=0.5").resources() == {"TPU": 4.0, "CPU": 0.5}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ray_resources": "GPU"}, "--ray-resources"),
        ({"ray_resources": "=4"}, "--ray-resources"),
        ({"ray_resources": "GPU=0"}, "--ray-resources"),
        ({"ray_resources": "GPU=nan"}, "--ray-resources"),
        ({"ray_topology": "4x4"}, "--ray-topology"),
        ({"ray_topology": "v5e:"}, "--ray-topology"),
        ({"ray_topology": "v5e:4x4", "ray_hosts": 2}, "leave out --ray-hosts"),
        ({"ray_hosts": 0}, "--ray-hosts must be at least 1"),
        ({"engine": "spark"}, "--engine must be one of local, ray"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, str | int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RayOptions(**options)  # type: ignore[arg-type]


def test_flags_and_toml_reach_it(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    check_refused(run("extract", *out, "--engine", "ray", "--ray-hosts", "0"), 2, "--ray-hosts")
    config = tmp_path / "run.toml"
    config.write_text('engine = "ray"\nray-resources = "GPU"\n')
    check_refused(run("extract", *out, "--config", config), 2, "--ray-resources", "'GPU'")
