"""The exact commands of gcloud."""

import pytest

from spile.core.errors import ConfigError
from spile.launch.command import FILE, shown
from spile.launch.gcloud import Gcloud, Node
from support.launches import contained, job

MADE = {"accelerator_type": "v5litepod-64", "runtime_version": "v2-alpha-tpuv5-lite"}
NODE = Node(0, "run1-0", "us-west4-a")
HERE = ("--zone=us-west4-a", "--project=mine", "--quiet")


def cloud(**changes: object) -> Gcloud:
    given: dict[str, object] = {"zones": ("us-west4-a",), "project": "mine", **changes}
    return Gcloud(**given)  # type: ignore[arg-type]


def test_a_tpu_is_made_by_request_or_through_the_queue() -> None:
    assert cloud(**MADE).create(NODE).argv == (
        "gcloud", "compute", "tpus", "tpu-vm", "create", *HERE,
        "--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite", "run1-0",
    )  # fmt: skip
    assert cloud(**MADE, queued=True, spot=True).create(NODE).argv == (
        "gcloud", "compute", "tpus", "queued-resources", "create", *HERE, "--node-id=run1-0",
        "--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite", "--spot",
        "run1-0",
    )  # fmt: skip


def test_it_is_described_listed_and_deleted() -> None:
    tpus = ("gcloud", "compute", "tpus")
    queued = cloud(**MADE, queued=True)
    assert cloud().describe(NODE).argv == (
        *tpus, "tpu-vm", "describe", *HERE, "--format=value(state)", "run1-0",
    )  # fmt: skip
    assert queued.describe_queued(NODE).argv == (
        *tpus, "queued-resources", "describe", *HERE, "--format=value(state.state)", "run1-0",
    )  # fmt: skip
    assert cloud().list_all()[0].argv == (*tpus, "tpu-vm", "list", *HERE)
    assert cloud().delete_node(NODE).argv == (*tpus, "tpu-vm", "delete", *HERE, "run1-0")
    assert queued.delete_node(NODE).argv == (
        *tpus, "queued-resources", "delete", *HERE, "--force", "run1-0",
    )  # fmt: skip


def test_all_hosts_are_handed_a_file_and_told_to_run_it() -> None:
    of = job(secrets={"TOKEN": "hf_shh"})
    sent, started = cloud().send(of, NODE), cloud().start(of, NODE)
    tpus = ("gcloud", "compute", "tpus", "tpu-vm")
    assert sent.argv == (*tpus, "scp", *HERE, "--worker=all", FILE, "run1-0:.spile-run1.sh")
    assert started.argv == (
        *tpus, "ssh", *HERE, "--worker=all", "--command=sh .spile-run1.sh", "run1-0"
    )  # fmt: skip
    assert sent.file is not None
    assert sent.file.startswith('rm -f -- "$0"\n')
    assert "export TOKEN=hf_shh\n" in sent.file
    assert "hf_shh" not in shown(cloud().render(of.masked()))


def test_a_container_is_run_as_root_with_the_devices() -> None:
    of = job(container=contained(device="tpu", sudo=True), secrets={"TOKEN": "hf_shh"})
    text = cloud(slices=2).send(of, NODE).file or ""
    assert (
        "sudo --non-interactive --preserve-env=TOKEN,MACHINE_ID,TOTAL_MACHINES docker run --detach "
        "--name=spile-run1-0 --net=host --stop-timeout=60 --privileged --env=TOKEN "
    ) in text


def test_slices_are_tpus_by_the_names_given_or_the_jobs_numbered() -> None:
    assert [node.name for node in cloud(slices=2).nodes(job())] == ["run1-0", "run1-1"]
    named = cloud(tpus=("alpha", "beta"))
    assert [node.name for node in named.nodes(job())] == ["alpha", "beta"]
    text = named.send(job(), named.nodes(job())[1]).file or ""
    assert "export MACHINE_ID=1\nexport TOTAL_MACHINES=2\n" in text


def test_what_would_be_run_is_shown_in_order() -> None:
    target = cloud(**MADE, queued=True, delete=True)
    verbs = [command.argv[3:5] for command in target.render(job())]
    assert verbs == [
        ("tpu-vm", "describe"), ("queued-resources", "create"), ("queued-resources", "describe"),
        ("tpu-vm", "scp"), ("tpu-vm", "ssh"),
    ]  # fmt: skip
    assert [c.argv[3:5] for c in target.stop(job())] == [
        ("tpu-vm", "ssh"), ("queued-resources", "delete")
    ]  # fmt: skip
    assert [c.argv[3:5] for c in target.status(job())] == [("tpu-vm", "list"), ("tpu-vm", "ssh")]
    assert [c.argv[3:5] for c in target.logs(job(), 5)] == [("tpu-vm", "ssh")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"zones": ()}, "--zone"),
        ({"zones": ("--flags-file=x",)}, "no zone"),
        ({"project": "$(id)"}, "no zone, project"),
        ({"accelerator_type": "v4-8"}, "belong together"),
        ({"spot": True}, "--spot"),
        ({"tpus": ("-x",)}, "--tpu"),
        ({"retries": -1}, "--retries"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cloud(**changes)
