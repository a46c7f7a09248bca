"""Hosts files, and the exact line by which each host is reached. Real hosts: tests/chaos."""

import pytest

from spile.core.errors import ConfigError
from spile.launch.ssh import Line, Ssh, parse_hosts
from support.launches import EXTRACT, job

OPTIONS = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip


def test_a_hosts_file_has_logins_and_addresses() -> None:
    text = "# ours\nh1\n\nme@h2.example 10.0.0.2  # the other\nh3 fd00::3\n"
    assert parse_hosts(text, "FILE") == (
        Line("h1", "h1"), Line("me@h2.example", "10.0.0.2"), Line("h3", "fd00::3"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("-oProxyCommand=id", "line 1"),
        ("ok\n$(id)", "line 2"),
        ("a;b", "line 1"),
        ("a b c", "line 1"),
        ("a -b", "line 1"),
        ("me@-x", "line 1"),
        ("-l@x", "line 1"),
        ("'a'", "line 1"),
        ("", "no host"),
        ("# a", "no host"),
        ("a\nb\na", "a is there twice"),
    ],
)
def test_a_line_that_is_no_host_is_refused_by_its_number(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"FILE.*{named}"):
        parse_hosts(text, "FILE")


def test_hosts_are_slices_of_their_own_or_joined_in_groups() -> None:
    lines = parse_hosts("a\nb 10.0.0.2\nc fd00::3\nd", "FILE")
    alone = [host.seat.environment() for host in Ssh(lines=lines).hosts()]
    assert alone[3] == {"MACHINE_ID": "3", "TOTAL_MACHINES": "4"}
    joined = [host.seat.environment() for host in Ssh(lines=lines, world_size=2).hosts()]
    assert joined[3] == {
        "MACHINE_ID": "1", "TOTAL_MACHINES": "2", "COORDINATOR_ADDRESS": "[fd00::3]:8476",
        "NUM_HOSTS": "2", "HOST_ID": "1",
    }  # fmt: skip
    assert joined[1]["COORDINATOR_ADDRESS"] == "a:8476"


def test_the_line_holds_neither_arguments_nor_environment() -> None:
    lines = parse_hosts("me@a\nb", "FILE")
    of = job(secrets={"TOKEN": "hf_shh"}, env={"A": "1"})
    commands = Ssh(lines=lines, config="/my config").render(of)
    assert [command.argv for command in commands] == [
        (*OPTIONS, "-F", "/my config", "--", "me@a", "sh -s"),
        (*OPTIONS, "-F", "/my config", "--", "b", "sh -s"),
    ]
    for command in commands:
        assert not command.env
        assert command.stdin is not None
        assert " ".join(EXTRACT) in command.stdin
        assert "export TOKEN=hf_shh\n" in command.stdin


def test_groups_that_do_not_divide_the_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--world-size 2 does not divide the 3 hosts"):
        Ssh(lines=parse_hosts("a\nb\nc", "FILE"), world_size=2)
