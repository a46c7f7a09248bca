"""The devices to compile for; unavailable ones are refused in one line."""

import jax
import pytest

from spile.compile import targets
from spile.compile.targets import find_target, virtual_cpus
from spile.core.errors import ConfigError


def test_without_a_topology_it_is_this_machine() -> None:
    found = find_target(None, None)
    assert found.on == "here" and list(found.devices) == jax.devices()
    assert found.platform == jax.default_backend()


@pytest.mark.parametrize(
    ("topology", "on", "said"),
    [
        (None, "moon", "--on must be one of libtpu, cpu, here; got 'moon'"),
        (None, "cpu", "--on cpu needs a --topology"),
        (None, "libtpu", "--on libtpu needs a --topology"),
        ("v5e-4", "here", "--on here: this machine has .*, not v5e-4; choose --on cpu"),
        ("h200", "libtpu", "--on libtpu is for TPUs, not for h200"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(topology: str | None, on: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_target(topology, on)


def test_a_chip_that_is_elsewhere_is_played_by_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    found = find_target("h200", None)
    assert (found.on, found.platform, len(found.devices)) == ("cpu", "gpu", 1)
    assert found.chip and found.memory == found.chip.memory
    assert found.notes[0] == "there is no GPU here"


def test_more_virtual_devices_than_jax_has_started_with_are_refused() -> None:
    count = len(jax.devices("cpu")) + 1
    with pytest.raises(ConfigError, match=f"{count} virtual CPU devices are needed"):
        virtual_cpus(count)
