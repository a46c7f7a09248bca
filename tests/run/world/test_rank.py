"""The rank of this process, from flags, the environment or the cluster, and refusals."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax._src.clusters.cloud_tpu_cluster as cloud_tpu
import pytest

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.run.world.rank import Rank, find_rank

COORDINATOR = ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
PROCESSES = ("NUM_HOSTS", "JAX_NUM_PROCESSES")
PROCESS = ("HOST_ID", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID", "JAX_PROCESS_ID")
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[003-006],spare",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
GKE = {
    "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2",
    "TPU_WORKER_ID": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}
JOINED = Runtime(coordinator="h0:1234", num_processes=4, process_id=1)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of the machine that runs the tests."""
    for name in list(os.environ):
        if name in (*COORDINATOR, *PROCESSES, *PROCESS) or name.startswith(
            ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_")
        ):
            monkeypatch.delenv(name)


def rank_in(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Rank | None:
    """Find the rank without flags."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return find_rank(Runtime(), os.environ)


@pytest.mark.parametrize("first", range(len(COORDINATOR)))
def test_the_first_coordinator_that_is_given_counts(first: int) -> None:
    environment = {name: f"{name.lower()}:1" for name in COORDINATOR[first:]}
    runtime = Runtime(num_processes=2, process_id=0)
    rank = find_rank(runtime, environment)
    assert rank == Rank(f"{COORDINATOR[first].lower()}:1", 2, 0)
    flagged = find_rank(Runtime(coordinator="flag:1", num_processes=2, process_id=0), environment)
    assert flagged == Rank("flag:1", 2, 0)


@pytest.mark.parametrize("first", range(len(PROCESSES)))
def test_the_first_number_of_processes_that_is_given_counts(first: int) -> None:
    environment = {name: str(7 + PROCESSES.index(name)) for name in PROCESSES[first:]}
    rank = find_rank(Runtime(coordinator="h:1", process_id=0), environment)
    assert rank == Rank("h:1", 7 + first, 0)
    flagged = find_rank(Runtime(coordinator="h:1", num_processes=2, process_id=0), environment)
    assert flagged == Rank("h:1", 2, 0)


@pytest.mark.parametrize("first", range(len(PROCESS)))
def test_the_first_process_id_that_is_given_counts(first: int) -> None:
    environment = {name: str(PROCESS.index(name)) for name in PROCESS[first:]}
    rank = find_rank(Runtime(coordinator="h:1", num_processes=9), environment)
    assert rank == Rank("h:1", 9, first)
    flagged = find_rank(Runtime(coordinator="h:1", num_processes=9, process_id=8), environment)
    assert flagged == Rank("h:1", 9, 8)


def test_the_first_process_leads_and_a_slice_has_a_name() -> None:
    environment = {"MEGASCALE_SLICE_ID": "3"}
    rank = find_rank(JOINED, environment)
    assert rank == Rank("h0:1234", 4, 1, "3")
    assert str(rank) == "slice 3, process 1 of 4"
    assert not Rank("h0:1234", 4, 1).leads
    assert Rank("h0:1234", 4, 0).leads


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TPU_WORKER_ID": "0"},
        {"CLOUD_TPU_TASK_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_single_process_makes_no_world(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_in(monkeypatch, environment) is None


def test_one_of_one_process_and_hosts_on_their_own_make_no_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Runtime(coordinator="h:1", num_processes=1, process_id=0)
    assert find_rank(one, {"TPU_WORKER_ID": "3"}) is None
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert find_rank(Runtime(world="host"), os.environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-006],spare", "node003"),
        ("node[3,7-9]", "node3"),
        ("alpha,beta,gamma,delta", "alpha"),
        ("alpha", "alpha"),
    ],
)
def test_slurm_says_all_of_it(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_in(monkeypatch, {**SLURM, "SLURM_STEP_NODELIST": nodes})
    port = 65536 - 4096 + 5000 % 4096
    # Tasks of a host share its devices: each has that of its number there.
    assert rank == Rank(f"{first}:{port}", 4, 2, devices=(1,))


def test_open_mpi_says_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_in(monkeypatch, OPEN_MPI)
    port = 65536 - 4096 + 1531576320 // 4096 % 4096
    assert rank == Rank(f"10.96.0.1:{port}", 3, 1, devices=(0,))


def test_flags_win_over_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert find_rank(JOINED, os.environ) == Rank("h0:1234", 4, 1)


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A TPU machine's own server, as far as jax asks it."""
    pytest.importorskip("requests")
    said = {"agent-worker-number": "2", "tpu-env": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = said.get(self.path.rpartition("/")[2])
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(cloud_tpu, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    yield said
    server.shutdown()
    server.server_close()


def test_a_pod_on_gke_says_all_of_it(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_in(monkeypatch, GKE) == Rank("127.0.0.1:8482", 2, 1)


def test_two_slices_on_gke_are_one_world(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.9:99",
    }
    assert rank_in(monkeypatch, {**GKE, **slices}) == Rank("127.0.0.9:8482", 4, 3, "1")


def test_a_pod_on_gce_says_all_of_it(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata["worker-network-endpoints"] = "a:1:127.0.0.1,b:2:127.0.0.2,c:3:127.0.0.3"
    assert rank_in(monkeypatch, {}) == Rank("127.0.0.1:8482", 3, 2)


def test_a_single_tpu_host_on_gce_makes_no_world(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata.update({"worker-network-endpoints": "127.0.0.1", "agent-worker-number": "0"})
    assert rank_in(monkeypatch, {}) is None


@pytest.mark.parametrize(
    ("runtime", "environment", "named"),
    [
        (Runtime(coordinator="h:1"), {}, ["h:1", "--num-processes"]),
        (Runtime(num_processes=4, process_id=0), {}, ["4 processes", "--coordinator HOST:PORT"]),
        (Runtime(num_processes=4, coordinator="h:1"), {}, ["--process-id, from 0 to 3"]),
        (Runtime(process_id=1), {}, ["--process-id 1", "--num-processes", "--coordinator"]),
        (
            Runtime(num_processes=4, coordinator="h:1", process_id=4),
            {},
            ["--process-id 4 is out of range", "from 0 to 3"],
        ),
        (Runtime(num_processes=1, process_id=1), {}, ["--process-id 1 is out of range"]),
        (Runtime(num_processes=4, coordinator="h:1"), {"HOST_ID": "7"}, ["7 is out of range"]),
        (Runtime(num_processes=4, coordinator="h:1"), {"HOST_ID": "two"}, ["HOST_ID", "'two'"]),
        (Runtime(coordinator="h:1"), {"NUM_HOSTS": "0"}, ["at least 1", "got 0"]),
        (Runtime(num_processes=2, coordinator="h", process_id=0), {}, ["HOST:PORT", "'h'"]),
        (Runtime(num_processes=2, coordinator="h:", process_id=0), {}, ["HOST:PORT", "'h:'"]),
        (Runtime(num_processes=2, coordinator=":99", process_id=0), {}, ["HOST:PORT", "':99'"]),
        (Runtime(num_processes=2, coordinator="h:65536", process_id=0), {}, ["HOST:PORT"]),
        (
            Runtime(num_processes=3, coordinator="h:1", process_id=0),
            {"TPU_WORKER_HOSTNAMES": "a,b,c,d"},
            ["the pod has 4 hosts", "3 processes", "--num-processes 4"],
        ),
        (
            Runtime(num_processes=6, coordinator="h:1", process_id=0),
            {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "MEGASCALE_NUM_SLICES": "2"},
            ["the pod has 4 hosts", "6 processes"],
        ),
    ],
)
def test_what_makes_no_place_is_refused_with_what_to_do(
    runtime: Runtime, environment: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        find_rank(runtime, environment)
    for name in named:
        assert name in str(refused.value)


def test_a_cluster_that_says_too_little_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    incomplete = {name: value for name, value in OPEN_MPI.items() if name[-4:] != "RANK"}
    with pytest.raises(ConfigError, match="jax sees a cluster.*OMPI_COMM_WORLD_RANK.*--world host"):
        rank_in(monkeypatch, incomplete)


@pytest.mark.parametrize("hosts", ["localhost", "a,b"])
def test_a_pod_with_as_many_hosts_as_processes_is_taken(hosts: str) -> None:
    runtime = Runtime(coordinator="[::1]:1234", num_processes=2, process_id=1)
    rank = find_rank(runtime, {"TPU_WORKER_HOSTNAMES": hosts})
    assert rank == Rank("[::1]:1234", 2, 1)
