"""The command of every host, and jobs that are refused before any host is contacted."""

import pytest

from spile.core.errors import ConfigError
from spile.launch.command import shown
from spile.launch.job import Container, Seat
from spile.launch.local import Local
from support.launches import DIGEST, EXTRACT, IMAGE, SECRET, contained, job


@pytest.mark.parametrize(
    ("restarts", "words"),
    [
        (None, ("spile", "supervise", "--", "extract", *EXTRACT)),
        (7, ("spile", "supervise", "--max-restarts", "7", "--", "extract", *EXTRACT)),
        (0, ("spile", "extract", *EXTRACT)),
    ],
)
def test_the_command_is_the_same_extract_under_supervision(
    restarts: int | None, words: tuple[str, ...]
) -> None:
    assert job(restarts=restarts).command == words


def test_a_seat_says_only_what_differs() -> None:
    assert Seat().environment() == {}
    assert Seat(slice=2, slices=3).environment() == {"MACHINE_ID": "2", "TOTAL_MACHINES": "3"}
    joined = Seat(process=1, processes=2, coordinator="a:1").environment()
    assert joined == {"COORDINATOR_ADDRESS": "a:1", "NUM_HOSTS": "2", "HOST_ID": "1"}
    assert Seat(slice=3, slices=4, process=1, processes=2).number == 7


def test_a_masked_job_shows_no_secret() -> None:
    secret = job(secrets={"TOKEN": SECRET})
    text = shown(Local().render(secret.masked()))
    assert SECRET not in text
    assert "TOKEN='***'" in text
    assert SECRET in shown(Local().render(secret))


def test_the_container_gets_values_by_environment_and_a_read_only_key() -> None:
    inside = job(container=contained(mounts=("/data:/data:ro",)), credentials="/keys/k.json")
    assert inside.environment() == {"GOOGLE_APPLICATION_CREDENTIALS": "/credentials/key.json"}
    assert job(credentials="/keys/k.json").environment() == {
        "GOOGLE_APPLICATION_CREDENTIALS": "/keys/k.json"
    }
    assert inside.container_run(["TOKEN"], "--rm") == (
        "docker", "run", "--rm", "--net=host", "--stop-timeout=60", "--env=TOKEN",
        "--volume=/data:/data:ro", "--volume=/keys/k.json:/credentials/key.json:ro",
        IMAGE, "supervise", "--", "extract", *EXTRACT,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "flag"), [("tpu", "--privileged"), ("gpu", "--gpus=all"), ("cpu", "--net=host")]
)
def test_the_container_is_given_the_device(device: str, flag: str) -> None:
    assert flag in job(container=contained(device=device)).container_run(["A"])


def test_root_keeps_the_variables_it_is_told_to() -> None:
    line = job(container=contained(sudo=True)).container_run(["A", "B"])
    assert line[:4] == ("sudo", "--non-interactive", "--preserve-env=A,B", "docker")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "-x"}, "--name"),
        ({"name": "a b"}, "--name"),
        ({"name": "A"}, "--name"),
        ({"name": "../x"}, "--name"),
        ({"name": "x" * 41}, "at most 40"),
        ({"env": {"A B": ""}}, "'A B'"),
        ({"env": {"A;id": ""}}, "'A;id'"),
        ({"secrets": {"-A": ""}}, "'-A'"),
        ({"env": {"A": "x\0y"}}, "NUL"),
        ({"extract": ("a\0b",)}, "NUL"),
        ({"spile": "-c"}, "--spile"),
        ({"credentials": "key.json"}, "--credentials"),
        ({"extract": ("--coordinator", "a:1")}, "--coordinator"),
        ({"extract": ("--process-id=1",)}, "--process-id"),
        ({"extract": ("--share", "0/2")}, "--share"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("-", "[-]")):
        job(**changes)


@pytest.mark.parametrize(
    "image", ["spile", "spile:latest", f"-v@{DIGEST}", "a@sha256:12", f"a b@{DIGEST}", f"@{DIGEST}"]
)
def test_an_image_without_its_digest_is_refused(image: str) -> None:
    with pytest.raises(ConfigError, match="--container must be IMAGE@sha256:DIGEST"):
        Container(image=image)


@pytest.mark.parametrize("mount", ["/a", "a:/b", "/a:b", "/a:/b:rw", "/a:/b:ro:ro"])
def test_a_mount_that_is_none_is_refused(mount: str) -> None:
    with pytest.raises(ConfigError, match="--mount"):
        contained(mounts=(mount,))
