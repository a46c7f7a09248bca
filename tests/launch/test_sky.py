"""SkyPilot: the exact task file and command.

The file was read by SkyPilot 0.14 itself (`sky.Task.from_yaml`); it is too large to test with.
"""

import subprocess
from pathlib import Path

import pytest
import yaml

from spile.core.errors import ConfigError
from spile.launch.command import FILE, run_all, shown
from spile.launch.sky import Sky
from support.launches import HOSTILE, calls, contained, hostile_job, job, path_with, recorder

TASK = """\
name: "run1-1"
num_nodes: 2
resources:
  infra: "gcp/us-central1"
  accelerators: "A100:8"
  use_spot: true
envs:
  A: "1"
  MACHINE_ID: "1"
  TOTAL_MACHINES: "2"
secrets:
  TOKEN: null
setup: |
  set -e
  pip install 'spile[gpu]'
run: |
  export COORDINATOR_ADDRESS="$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1):8476"
  export NUM_HOSTS="$SKYPILOT_NUM_NODES" HOST_ID="$SKYPILOT_NODE_RANK"
  exec spile supervise -- extract --model M --corpus C --taps resid_post:20 --out gs://B/acts
"""


def test_each_slice_is_a_managed_job() -> None:
    target = Sky(slices=2, world_size=2, accelerators="A100:8", infra="gcp/us-central1", spot=True)
    of = job(env={"A": "1"}, secrets={"TOKEN": "hf_shh"}, setup="set -e\npip install 'spile[gpu]'")
    _, second = target.render(of)
    assert second.argv == (
        "sky", "jobs", "launch", "--yes", "--detach-run", "--secret=TOKEN", FILE
    )  # fmt: skip
    assert second.env == {"TOKEN": "hf_shh"}
    assert second.file == TASK
    assert "hf_shh" not in shown(target.render(of.masked()))


def test_a_tpu_pod_is_one_node_whose_hosts_find_each_other() -> None:
    (command,) = Sky(accelerators="tpu-v5litepod-64").render(job())
    task = yaml.safe_load(command.file or "")
    assert task["num_nodes"] == 1
    assert task["run"].startswith("exec spile supervise -- extract ")
    with pytest.raises(ConfigError, match="TPU pod for one node"):
        Sky(accelerators="tpu-v5litepod-64", world_size=16)


def test_hostile_words_reach_the_node_as_they_are(tmp_path: Path) -> None:
    tool = recorder(tmp_path / "its spile")
    of = hostile_job(spile=str(tool), restarts=0)
    (command,) = Sky().render(of)
    task = yaml.safe_load(command.file or "")
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, check=True)
    assert calls(tool)[0]["argv"] == ["extract", *HOSTILE]
    assert task["envs"] == dict(of.env)
    assert set(task["secrets"].values()) == {None}
    assert not list(tmp_path.rglob("pwned"))


def test_sky_is_given_the_file_which_is_ours_alone_and_gone_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "import stat; print(oct(os.stat(sys.argv[-1]).st_mode), open(sys.argv[-1]).read())"
    sky = recorder(tmp_path / "bin/sky", body=body)
    monkeypatch.setenv("PATH", path_with(sky.parent))
    (result,) = run_all(Sky().render(job(secrets={"TOKEN": "hf_shh"})))
    assert result.out.startswith("0o100600 name: ")
    (call,) = calls(sky)
    assert call["env"]["TOKEN"] == "hf_shh"
    assert "hf_shh" not in str(call["argv"])
    assert not Path(call["argv"][-1]).exists()


def test_status_logs_and_stop_go_by_name() -> None:
    target, of = Sky(slices=2), job()
    assert target.status(of)[0].argv == ("sky", "jobs", "queue")
    assert target.logs(of, 5)[1].argv == (
        "sky", "jobs", "logs", "--name=run1-1", "--no-follow", "--tail=5"
    )  # fmt: skip
    assert [command.argv for command in Sky().stop(of)] == [
        ("sky", "jobs", "cancel", "--name=run1", "--yes")
    ]


def test_a_container_is_refused() -> None:
    with pytest.raises(ConfigError, match="--container"):
        Sky().render(job(container=contained()))
