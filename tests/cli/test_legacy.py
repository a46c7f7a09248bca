"""Former command lines: flags are translated as the table says, and Spile accepts the result."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import spile
from chaos.harness import check_refused, check_same, run
from spile import cli
from spile.cli.legacy import HOSTS_FILE, PROGRAMS, Monitor, Old, translate
from spile.core.config import build
from spile.core.errors import ConfigError
from spile.status.status import Status

# What users type today, script by script.
TYPED = {
    "fineweb": "machine_id total_machines multihost coordinator_address host_id num_hosts "
    "mesh_type model_path dataset_name dataset_config dataset_split max_samples batch_size "
    "max_seq_length layers_to_extract output_dir upload_to_gcs gcs_bucket gcs_prefix shard_size_gb "
    "compress_shards no_compress_shards delete_local_after_upload no_data_parallel "
    "use_data_parallel verbose",
    "arc": "machine_id total_machines multihost coordinator_address host_id num_hosts mesh_type "
    "model_path dataset_path max_tasks grid_encoder prompt_version predictions_per_task "
    "max_samples batch_size max_seq_length layers_to_extract output_dir "
    "upload_to_gcs gcs_bucket gcs_prefix shard_size_gb compress_shards no_compress_shards "
    "delete_local_after_upload no_data_parallel use_data_parallel random_seed verbose",
    "multihost": "topology dataset_path max_tasks fsdp_size activation_type grid_encoder "
    "prompt_version predictions_per_task checkpoint_dir enable_checkpointing no_checkpointing "
    "enable_barrier_sync no_barrier_sync barrier_controller_host barrier_port is_barrier_server "
    "random_seed",
    "launch": "deployment tpu_names zone hosts total_machines gcs_bucket model_path dataset_name "
    "dataset_config dataset_split batch_size max_seq_length layers_to_extract shard_size_gb "
    "max_samples working_dir logs_dir monitor",
    "monitor": "gcs_bucket gcs_prefix total_machines aggregate list_shards",
}
FINEWEB = "--corpus HuggingFaceFW/fineweb-edu:sample-10BT:train"
NESTED = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"
LOCAL = "--deployment local --gcs_bucket B"
# For each flag a line that uses it, and its translation (empty: only a note).
RAN = {
    "model_path": ("--model_path M", "--model M"),
    "max_seq_length": ("--max_seq_length 512", "--seq-len 512 --long-docs truncate"),
    "layers_to_extract": ("--layers_to_extract 20 21", "--taps resid_post:20+21"),
    "max_samples": ("--max_samples 5", "--max-docs 5"),
    "batch_size": ("--batch_size 8", "--batch-tokens 16384"),
    "coordinator_address": ("--coordinator_address 10.0.0.1:8476", "--coordinator 10.0.0.1:8476"),
    "host_id": ("--host_id 0", "--process-id 0"),
    "num_hosts": ("--num_hosts 16", "--num-processes 16"),
    "mesh_type": ("--mesh_type 2d", "--mesh 2d"),
    "output_dir": ("--output_dir acts", "--out acts"),
    "upload_to_gcs": ("--upload_to_gcs --gcs_bucket B --output_dir x", "--out gs://B/activations"),
    "gcs_bucket": ("--upload_to_gcs --gcs_bucket gs://B/", "--out gs://B/activations"),
    "gcs_prefix": ("--upload_to_gcs --gcs_bucket B --gcs_prefix /p/q/", "--out gs://B/p/q"),
    "shard_size_gb": ("--shard_size_gb 0.5", "--shard-bytes 0.5GiB"),
    "compress_shards": ("--compress_shards", "--compress"),
    "no_compress_shards": ("--no_compress_shards", ""),
    "delete_local_after_upload": ("--delete_local_after_upload", ""),
    "multihost": ("--multihost", ""),
    "verbose": ("--verbose", ""),
    "machine_id": ("--machine_id 3 --total_machines 32", "--share 3/32"),
    "total_machines": ("--total_machines 8 --machine_id 0 --max_samples 5", "--max-docs 40"),
    "no_data_parallel": ("--no_data_parallel --mesh_type 2d", "--mesh 1"),
    "use_data_parallel": ("--use_data_parallel", ""),
}
ARC = {
    "dataset_path": ("--dataset_path gs://B/t.jsonl", 'arc:gs://B/t.jsonl(prompt="chat", '),
    "max_tasks": (
        "--dataset_path x --max_tasks 5 --machine_id 0 --total_machines 2",
        "max_tasks=10",
    ),
    "grid_encoder": (f"--dataset_path x --grid_encoder {NESTED}", 'encoder="rows+shape"'),
    "predictions_per_task": (
        "--dataset_path x --predictions_per_task 8",
        'predictions=8, augment="rotate,flip,colors"',
    ),
    "prompt_version": ("--prompt_version v1", ""),
    "random_seed": ("--dataset_path x --random_seed 7", "seed=7"),
}
LINES: dict[str, dict[str, tuple[str, str]]] = {
    "fineweb": {
        **RAN,
        "dataset_name": ("--dataset_name a/b", "--corpus a/b:sample-10BT:train"),
        "dataset_config": ("--dataset_config c", "--corpus HuggingFaceFW/fineweb-edu:c:train"),
        "dataset_split": ("--dataset_split s", "fineweb-edu:sample-10BT:s"),
    },
    "arc": {**RAN, **ARC},
    "multihost": {
        **RAN,
        **ARC,
        "batch_size": ("--batch_size 32 --num_hosts 16 --max_seq_length 100", "--batch-tokens 200"),
        "activation_type": ("--activation_type attn", "--taps attn_out:all"),
        "fsdp_size": ("--fsdp_size 4", "--mesh 3d --fsdp 4"),
        "topology": ("--topology v5e-64", ""),
        "checkpoint_dir": ("--checkpoint_dir c", ""),
        "enable_checkpointing": ("--enable_checkpointing", ""),
        "no_checkpointing": ("--no_checkpointing", ""),
        "no_barrier_sync": ("--no_barrier_sync", ""),
        "barrier_controller_host": ("--barrier_controller_host h", ""),
        "enable_barrier_sync": ("--enable_barrier_sync", ""),
        "barrier_port": ("--barrier_port 5555", ""),
        "is_barrier_server": ("--is_barrier_server", ""),
    },
    "launch": {
        "deployment": ("--deployment local --total_machines 4 --gcs_bucket B", "local --slices 4"),
        "tpu_names": ("--deployment gcp_tpu --tpu_names a b --gcs_bucket B", "--tpu a --tpu b"),
        "zone": ("--deployment gcp_tpu --tpu_names a --zone z --gcs_bucket B", "--zone z"),
        "hosts": ("--deployment ssh --hosts a b --gcs_bucket B", f"ssh --hosts {HOSTS_FILE} --"),
        "total_machines": ("--deployment local --total_machines 2 --gcs_bucket B", "--slices 2"),
        "gcs_bucket": ("--deployment local --gcs_bucket B", "--out gs://B/activations_fineweb"),
        "batch_size": ("--deployment local --gcs_bucket B --batch_size 4", "--batch-tokens 8192"),
        "max_samples": ("--deployment ssh --hosts a b --gcs_bucket B --max_samples 5",
                        "--max-docs 10"),
        "model_path": (f"{LOCAL} --model_path M", "--model M"),
        "dataset_name": (f"{LOCAL} --dataset_name a/b", "--corpus a/b:sample-10BT:train"),
        "dataset_config": (f"{LOCAL} --dataset_config c", "fineweb-edu:c:train"),
        "dataset_split": (f"{LOCAL} --dataset_split s", "fineweb-edu:sample-10BT:s"),
        "layers_to_extract": (f"{LOCAL} --layers_to_extract 10 11", "--taps resid_post:10+11"),
        "max_seq_length": (f"{LOCAL} --max_seq_length 512", "--seq-len 512 --long-docs truncate"),
        "shard_size_gb": (f"{LOCAL} --shard_size_gb 2", "--shard-bytes 2GiB"),
        "working_dir": (f"{LOCAL} --working_dir /w", "local --folder /w"),
        "logs_dir": (f"{LOCAL} --logs_dir l", ""),
        "monitor": (f"{LOCAL} --monitor", ""),
    },
    "monitor": {
        "gcs_bucket": ("--gcs_bucket B", "status gs://B/activations_fineweb"),
        "gcs_prefix": ("--gcs_bucket B --gcs_prefix p", "status gs://B/p"),
        "aggregate": ("--gcs_bucket B --aggregate", "status gs://B/activations_fineweb"),
        "list_shards": ("--gcs_bucket B --list_shards", "status gs://B/activations_fineweb"),
        "total_machines": ("--gcs_bucket B --total_machines 4", "status gs://B/"),
    },
}  # fmt: skip
EVERY = [(program, flag) for program, known in PROGRAMS.items() for flag in known.flags]


def test_all_that_users_type_is_in_the_table() -> None:
    for program, names in TYPED.items():
        known = {flag.name for flag in PROGRAMS[program].flags}
        assert not {*names.split()} - known, program


PARSER = cli.make_parser()


@pytest.mark.parametrize(("program", "flag"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_each_flag_becomes_what_the_table_says_and_is_understood(program: str, flag: Old) -> None:
    line, wanted = LINES[program][flag.name]
    assert f"--{flag.name}" in line
    made = translate(program, line.split())
    text = " ".join(made.argv)
    assert wanted in text
    noted = any(note.startswith(f"--{flag.name}: ") for note in made.notes)
    assert noted == (not flag.new) == (not wanted)
    if flag.new.startswith("--"):
        assert flag.new in made.argv
    if made.argv[0] == "extract":
        arguments = PARSER.parse_args(made.argv)
        build({k: v for k, v in vars(arguments).items() if k not in ("out", "verb")})


def test_what_is_left_out_gets_the_former_defaults() -> None:
    made = translate("fineweb", ["--model_path", "M", "--output_dir", "o"])
    assert str(made) == (
        f"spile extract --model M {FINEWEB} --taps resid_post:10-23 --long-docs truncate --out o"
    )


def test_a_default_of_the_former_tool_is_named_unless_a_flag_decides_it() -> None:
    for program, name in (
        ("fineweb", "KathirKs/qwen-2.5-0.5b"),
        ("arc", "KathirKs/qwen-2.5-7b"),
        ("multihost", "Qwen/Qwen2.5-0.5B"),
    ):
        made = translate(program, [])
        assert ("--model", name) == made.argv[1:3]
        assert f"--model_path is not given: {name}, as before" in made.notes
        made = translate(program, ["--", "--model", "mine"])
        assert name not in made.argv
        assert not any("model_path" in note for note in made.notes)
    made = translate("fineweb", ["--machine_id", "3", "--max_samples", "5"])
    assert "--share 3/32" in str(made) and "--max-docs 160" in str(made)
    assert "--total_machines is not given: 32, as before" in made.notes
    assert "--taps resid_post:-14--1 " in str(translate("arc", []))
    layers = ["--deployment", "local", "--gcs_bucket", "B", "--layers_to_extract", "10 11"]
    assert "--taps resid_post:10+11 " in str(translate("launch", layers))


def test_the_monitor_says_the_state_of_each_machine() -> None:
    workers = [
        {"share": "0/6", "state": "done"}, {"share": "1/6", "state": "running"},
        {"share": "2/6", "state": "failed"}, {"share": "3/6", "state": "stopped"},
        {"share": "4/6", "state": "dead"}, {"share": "5/6", "state": "not started"},
    ]  # fmt: skip
    found = cast(Status, SimpleNamespace(done=False, workers=workers))
    assert Monitor("gs://B/p", 6, False, False).states(found) == [
        "COMPLETE", "IN PROGRESS", "ERROR", "STOPPED", "ERROR", "NOT STARTED"
    ]  # fmt: skip
    alone = cast(Status, SimpleNamespace(done=False, workers=[{"state": "starting"}]))
    assert Monitor("gs://B/p", 1, False, False).states(alone) == ["IN PROGRESS"]
    over = cast(Status, SimpleNamespace(done=True, workers=workers[:1]))
    assert Monitor("gs://B/p", 2, False, False).states(over) == ["COMPLETE"] * 2


def test_new_flags_follow_two_dashes_and_win() -> None:
    made = translate("fineweb", ["--model_path", "M", "--", "--model", "N", "--quiet"])
    assert made.argv[-3:] == ("--model", "N", "--quiet")


def test_words_with_spaces_are_printed_as_a_shell_takes_them() -> None:
    made = translate("arc", ["--dataset_path", "my tasks.jsonl", "--output_dir", "o; rm -rf /"])
    assert """'arc:my tasks.jsonl(prompt="chat", encoder="rows+shape", """ in str(made)
    assert "'o; rm -rf /'" in str(made)


@pytest.mark.parametrize(
    ("program", "line", "named"),
    [
        ("fineweb", "--machine_idd 3", "--machine_idd"),
        ("fineweb", "--total_machines 8", "not --machine_id"),
        ("fineweb", "--max_samples many", "--max_samples must be a whole number, got 'many'"),
        ("fineweb", "--layers_to_extract 1 x", "--layers_to_extract must be a whole number"),
        ("fineweb", "--shard_size_gb -1", "shard_size_gb"),
        ("fineweb", "--upload_to_gcs", "--gcs_bucket is missing"),
        ("multihost", "--activation_type all", "--activation_type"),
        (
            "multihost",
            "--dataset_path x --grid_encoder CodeBlockEncoder()",
            "no such encoder; choose from",
        ),
        ("launch", "--gcs_bucket B", "--deployment is missing"),
        ("launch", "--deployment ssh --gcs_bucket B", "needs --tpu_names or --hosts"),
        ("launch", "--deployment ssh --hosts a --total_machines 2 --gcs_bucket B", "1 are named"),
        ("monitor", "--aggregate", "--gcs_bucket is missing"),
    ],
)
def test_what_means_nothing_is_refused(program: str, line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        translate(program, line.split())


def test_a_dry_run_prints_the_new_spelling_and_runs_nothing(tmp_path: Path) -> None:
    for words in (("--dry-run", "fineweb"), ("fineweb", "--dry-run")):
        result = run("legacy", *words, "--model_path", "M", "--output_dir", tmp_path / "o",
                     "--verbose")  # fmt: skip
        assert result.code == 0, result.err
        note, line = result.out.splitlines()
        assert note == "# --verbose: progress is shown unless --quiet is given"
        assert line.startswith("spile extract --model M --corpus HuggingFaceFW")
    assert not (tmp_path / "o").exists()
    check_refused(run("legacy", "fineweb", "--nothing"), 2, "--nothing")
    check_refused(run("legacy", "another"), 2, "another")


@pytest.mark.full
def test_a_former_command_makes_the_dataset_that_the_new_one_makes(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    today = ["--corpus", corpus, "--unit-tokens", "900", "--compute-dtype", "float32"]
    old = ["--model_path", model, "--layers_to_extract", "0", "2", "--max_seq_length", "64"]
    machines = ["--machine_id", "1", "--total_machines", "2", "--max_samples", "10"]
    result = run(
        "legacy", "fineweb", *old, *machines, "--output_dir", tmp_path / "old", "--", *today
    )
    assert result.code == 0, result.err
    printed = [line for line in result.err.splitlines() if line.startswith("spile extract ")]
    assert len(printed) == 1 and "--share 1/2" in printed[0]
    new = ["--model", model, "--taps", "resid_post:0+2", "--seq-len", "64", "--max-docs", "20"]
    result = run("extract", *new, "--long-docs", "truncate", *today, "--out", tmp_path / "new")
    assert result.code == 0, result.err
    check_same(tmp_path / "old", tmp_path / "new")
    assert spile.open(str(tmp_path / "old")).recipe.long_docs == "truncate"


def test_the_guide_shows_the_whole_table() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "fleets.md").read_text()
    for program, known in PROGRAMS.items():
        assert f"`spile legacy {program}`" in guide
        assert known.script in guide
    for _, flag in EVERY:
        assert row(flag) in guide, f"docs/fleets.md lacks:\n{row(flag)}"


def row(flag: Old) -> str:
    """One line of the guide's table."""
    new = f"`{flag.new}`" if flag.new else "—"
    return f"| `--{flag.name}` | {new} | {flag.how.replace('|', chr(92) + '|')} |"
