"""The exact commands of sbatch. A real Slurm: tests/chaos."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from spile.core.errors import ConfigError
from spile.launch.command import run, shown
from spile.launch.slurm import Slurm
from support.launches import HOSTILE, IMAGE, calls, contained, hostile_job, job, path_with, recorder

LINE = "spile supervise -- extract --model M --corpus C --taps resid_post:20 --out gs://B/acts"


def test_an_array_of_slices_of_one_node() -> None:
    target = Slurm(slices=32, options=("--partition=gpu", "--time=1-0"), log_folder="/logs")
    (command,) = target.render(job(secrets={"TOKEN": "hf_shh"}, folder="/work"))
    assert command.argv == (
        "sbatch", "--parsable", "--job-name=run1", "--nodes=1", "--ntasks-per-node=1",
        "--requeue", "--open-mode=append", "--export=ALL", "--output=/logs/run1.log.%A_%a",
        "--array=0-31", "--chdir=/work", "--partition=gpu", "--time=1-0",
    )  # fmt: skip
    assert command.env == {"TOKEN": "hf_shh"}
    assert command.stdin == (
        "#!/bin/sh\nset -e\n"
        'export MACHINE_ID="$SLURM_ARRAY_TASK_ID" TOTAL_MACHINES=32\n'
        f"exec srun --kill-on-bad-exit=1 {LINE}\n"
    )


def test_one_job_of_several_nodes_that_are_joined() -> None:
    (command,) = Slurm(world_size=4).render(job(setup="module load cuda"))
    assert "--nodes=4" in command.argv
    assert "--output=./run1.log.%j" in command.argv
    assert not [word for word in command.argv if word.startswith("--array")]
    assert command.stdin == (
        "#!/bin/sh\nset -e\nmodule load cuda\n"
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'export COORDINATOR_ADDRESS="$first:$((61440 + SLURM_JOB_ID % 4096))" NUM_HOSTS=4\n'
        "exec srun --kill-on-bad-exit=1 sh -c 'HOST_ID=$SLURM_PROCID; export HOST_ID; "
        f'exec "$@"\' sh {LINE}\n'
    )


def test_in_a_container_the_place_goes_in_by_name() -> None:
    of = job(container=contained(device="gpu", engine="podman"), secrets={"TOKEN": "hf_shh"})
    script = Slurm(slices=2, world_size=2).script(of)
    names = ("TOKEN", "MACHINE_ID", "TOTAL_MACHINES", "COORDINATOR_ADDRESS", "NUM_HOSTS", "HOST_ID")
    passed = " ".join(f"--env={name}" for name in names)
    assert script.endswith(
        " podman run --rm --net=host --stop-timeout=60 --device=nvidia.com/gpu=all "
        f"{passed} {IMAGE} {LINE.removeprefix('spile ')}\n"
    )
    assert "hf_shh" not in script


def test_hostile_words_go_through_the_script_as_they_are(tmp_path: Path) -> None:
    tool = recorder(tmp_path / "spile tool")
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nshift\nSLURM_PROCID=1 exec "$@"\n')
    srun.chmod(0o755)
    (tmp_path / "bin/scontrol").symlink_to("/bin/echo")
    of = hostile_job(spile=str(tool), restarts=0)
    env = {**os.environ, "PATH": path_with(srun.parent), "SLURM_JOB_ID": "5000"}
    env |= {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NODELIST": "n"}
    text = Slurm(slices=4, world_size=2).script(of)
    subprocess.run(["sh"], input=text, env=env, cwd=tmp_path, text=True, check=True)
    (call,) = calls(tool)
    assert call["argv"] == ["extract", *HOSTILE]
    wanted = {"MACHINE_ID": "3", "TOTAL_MACHINES": "4", "NUM_HOSTS": "2", "HOST_ID": "1",
              "COORDINATOR_ADDRESS": "show hostnames n:62344"}  # fmt: skip
    assert {name: call["env"][name] for name in wanted} == wanted
    assert not list(tmp_path.rglob("pwned"))


def test_what_is_shown_holds_no_secret() -> None:
    (command,) = Slurm().render(job(secrets={"TOKEN": "hf_shh"}).masked())
    assert str(command).startswith("TOKEN='***' sbatch --parsable ")
    assert "hf_shh" not in json.dumps(shown([command]))


def test_logs_are_the_last_lines_of_each_task_or_say_that_there_is_none(tmp_path: Path) -> None:
    (logs,) = Slurm(log_folder=str(tmp_path / "my logs")).logs(job(), 1)
    assert run(logs).out == "never started, or with another --log-folder\n"
    (tmp_path / "my logs").mkdir()
    for task in range(2):
        (tmp_path / "my logs" / f"run1.log.7_{task}").write_text(f"first\nlast of {task}\n")
    told = run(logs)
    assert told.code == 0 and "last of 0\n" in told.out and "first" not in told.out
    assert "run1.log.7_1 <==" in told.out


def test_status_logs_and_stop_go_by_name() -> None:
    target, of = Slurm(log_folder="/my logs"), job()
    assert target.stop(of)[0].argv == ("scancel", "--me", "--name=run1")
    assert target.status(of)[0].argv[:3] == ("squeue", "--me", "--name=run1")
    assert "set -- '/my logs/run1.log.'*\n" in str(target.logs(of, 7)[0].stdin)


@pytest.mark.parametrize(
    ("option", "named"),
    [("partition=x", "--OPTION=VALUE"), ("-p", "--OPTION=VALUE"), ("--array=0-3", "launcher's")],
)
def test_options_that_are_none_or_ours_are_refused(option: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Slurm(options=(option,))


def test_a_log_folder_in_which_slurm_reads_signs_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-folder"):
        Slurm(log_folder="/logs/%j")
