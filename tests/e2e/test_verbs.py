"""The verbs beside `extract`: `taps`, `plan`, `check` and `convert`, as a user types them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from chaos.harness import Work, check_refused, check_sound, run, said
from spile.core.tensors import map_tensor, read_header
from spile.corpus.tokenize import TextTokenizer
from spile.dataset.records.ledger import Ledger
from spile.models.files.checkpoint import open_checkpoint, read_arch
from spile.models.sites import GROUPS, SITES
from spile.models.taps import all_taps
from spile.objects import LocalObjects
from spile.run.pipeline import display
from support import tiny
from support.stored import Stored, reseal

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"
# What a model of a certain make does not have.
RARE = {
    "shared_expert_out", "attn_gate", "conv_in", "conv_out", "conv_gate", "delta_state_norm",
    "kv_latent", "ssm_in", "ssm_read", "ssm_gate", "ssm_z", "ssm_out", "layer_embed",
    "layer_embed_out",
}  # fmt: skip
DENSE = {*RARE, "router_logits", "expert_weights", "expert_ids"}
ABSENT = {
    "Llama-3.2-1B": DENSE,
    "gpt2": {*DENSE, "q_rot", "k_rot"},
    "pythia-70m": {*DENSE, "resid_mid"},
    "Mixtral-8x7B-v0.1": {*RARE, "mlp_hidden"},
}


@pytest.fixture
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory that holds only a published config."""
    shutil.copyfile(CONFIGS / f"{request.param}.json", tmp_path / "config.json")
    return tmp_path


def one_line(text: str) -> str:
    """The output on a terminal that is wide enough."""
    return " ".join(text.split())


def first_column(table: str) -> list[str]:
    """Return the names below the title; long cells continue on the next line, indented."""
    lines = table.splitlines()
    assert lines[0].split() == ["tap", "shape", "bytes/token", "meaning"]
    return [line.split()[0] for line in lines[1:] if line[:1].strip()]


@pytest.mark.parametrize("published", ABSENT, indirect=True)
def test_taps_names_every_site_that_the_model_has(published: Path) -> None:
    result = run("taps", "--model", published)
    arch = read_arch(str(published))
    name = {site: f":0-{arch.num_layers - 1}" if SITES[site].layered else "" for site in SITES}
    (absent,) = [
        sites
        for model, sites in ABSENT.items()
        if (CONFIGS / f"{model}.json").read_bytes() == (published / "config.json").read_bytes()
    ]
    *shown, gradients = first_column(result.out)
    assert gradients == "SITE_grad"
    assert sorted(shown) == sorted(site + name[site] for site in SITES if site not in absent)
    assert len({*shown}) == len(shown)
    for site in {*SITES} - absent:
        for other_name in SITES[site].lens:
            assert other_name.format(0) in result.out.replace(",", " ").split()
        assert f"{site}{name[site]}" in shown
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("published", ["Llama-3.2-1B"], indirect=True)
def test_taps_describes_shapes_and_bytes(published: Path) -> None:
    table = run("taps", "--model", published, "--seq-len", "1k").out
    rows = {line.split()[0]: line.split()[1:3] for line in table.splitlines() if line.strip()}
    assert rows["resid_post:0-15"] == ["2048", "4,096"]
    assert rows["q:0-15"] == ["32×64", "4,096"]
    assert rows["k_rot:0-15"] == ["8×64", "1,024"]
    assert rows["attn_pattern:0-15"] == ["32×1000", "64,000"]
    assert rows["logits"] == ["128256", "256,512"]
    assert rows["entropy"] == ["1", "4"]
    wide = run("taps", "--model", published, "--store-dtype", "float32").out
    rows = {line.split()[0]: line.split()[1:3] for line in wide.splitlines() if line.strip()}
    assert rows["mlp_hidden:0-15"] == ["8192", "32,768"]
    assert rows["attn_pattern:0-15"] == ["32×2048", "262,144"]
    assert rows["entropy"] == ["1", "4"]


@pytest.mark.parametrize("published", ["gpt2", "Mixtral-8x7B-v0.1"], indirect=True)
def test_taps_lists_each_layer_on_request_and_always_as_json(published: Path) -> None:
    names = [tap.name for tap in all_taps(read_arch(str(published)))]
    assert first_column(run("taps", "--model", published, "--all").out) == [*names, "SITE_grad"]
    entries = run("taps", "--model", published, "--json").json
    assert entries == run("taps", "--model", published, "--json", "--all").json
    assert [entry["name"] for entry in entries] == names
    by_name = {entry["name"]: entry for entry in entries}
    keys = {"name", "shape", "dtype", "bytes", "meaning", "aliases"}
    for entry in entries:
        assert {*entry} == keys
        size = {"bfloat16": 2, "int16": 2, "int32": 4, "float32": 4}[entry["dtype"]]
        assert entry["bytes"] == np.prod(entry["shape"], dtype=int) * size
        assert entry["meaning"] == SITES[entry["name"].split(".")[0]].meaning
    assert "blocks.3.hook_resid_post" in by_name["resid_post.3"]["aliases"]
    assert "hidden_states[4]" in by_name["resid_post.3"]["aliases"]
    assert by_name["logprob"]["dtype"] == "float32"
    assert all(entry["dtype"] == "int16" for name, entry in by_name.items() if "expert_ids" in name)


def test_taps_needs_no_weights_and_neither_jax_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "spile.cli", "taps", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "spile.models.taps" in imported
    heavy = {"jax", "jaxlib", "torch", "transformers", "peft", "gguf", "pyarrow"}
    assert not heavy & {name.partition(".")[0] for name in imported}
    assert "resid_post:0-2" in result.stdout


def test_taps_refuses_what_it_cannot_describe(tmp_path: Path) -> None:
    check_refused(run("taps"), 2, "--model")
    check_refused(run("taps", "--model", tmp_path / "none"), 2, tmp_path / "none")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**tiny.CONFIG, "architectures": ["MambaForCausalLM"]}))
    check_refused(run("taps", "--model", tmp_path), 2, config, "MambaForCausalLM")
    config.write_text(json.dumps(tiny.CONFIG))
    check_refused(run("taps", "--model", tmp_path, "--seq-len", "4"), 2, "--seq-len", "8")
    check_refused(run("taps", "--model", tmp_path, "--store-dtype", "int3"), 2, "int3")


@pytest.mark.parametrize("verb", ["extract", "plan"])
def test_help_names_every_site(verb: str) -> None:
    result = run(verb, "--help-all")
    (listed,) = re.findall(r"\nsites:(.*?)\nlayers:", result.out, re.DOTALL)
    assert result.code == 0
    listed = re.sub(r"SITE_grad:.*?\n(?=\s*\w+: stands)", "", listed, flags=re.DOTALL)
    words = {"and", "without", "layers", "stands", "for"}
    # (What a lens predicts has no site of the model's own.)
    assert {*re.findall(r"\w+", listed)} - words == {*SITES, *GROUPS, *GROUPS["lens_top"]}
    layered, bare = listed.split("and, without layers:")
    assert {*layered.split()} == {name for name, site in SITES.items() if site.layered}
    bare, *_ = bare.partition(f"{next(iter(GROUPS))}: stands for")
    assert {*bare.split()} == {name for name, site in SITES.items() if not site.layered}


LARGE = {"taps": "resid_post:1,attn_pattern:0+1,logits", "seq_len": 64}
NOTES = (  # of 4 heads, 64 keys and 260 tokens, beside a stream of 32 values
    "note: attn_pattern takes 512 bytes per row and tap, 8 times a residual stream's: "
    "it grows with --seq-len;",
    "note: logits takes 520 bytes per row and tap, 8 times a residual stream's: "
    "logprob and entropy, or --where, may be enough",
)


def test_plan_notes_taps_that_are_easily_overlooked(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    flags = Work(model, corpus, LARGE).flags(tmp_path / "out")
    shown = one_line(run("plan", "--calibrate", "off", *flags).out)
    for note in NOTES:
        assert note in shown
    cost = run("plan", "--calibrate", "off", *flags, "--json").json
    assert len(cost["warnings"]) == 2
    for note, warning in zip(NOTES, cost["warnings"], strict=True):
        assert f"note: {warning}".startswith(note)
    quiet = Work(model, corpus, {**LARGE, "taps": "resid_post:all,logprob"})
    result = run("plan", "--calibrate", "off", *quiet.flags(tmp_path / "out"), "--json")
    assert result.code == 0 and result.json["warnings"] == []
    narrow = Work(model, corpus, {**LARGE, "taps": "embed", "compute_dtype": "float8_e4m3"})
    result = run("plan", "--calibrate", "off", *narrow.flags(tmp_path / "out"), "--json")
    (warning,) = result.json["warnings"]
    assert warning.startswith("products in float8: on the demo model rows were 3 to 8% off")
    assert warning.endswith("this device emulates them, which is no faster")


@pytest.mark.parametrize(
    ("flags", "share"),
    [({}, 1.0), ({"where": "end"}, None), ({"where": "pos % 2 == 1"}, 0.5), ({"every": 4}, 0.25)],
)
def test_plan_counts_the_rows_that_are_kept(
    flags: dict[str, Any], share: float | None, model: Path, corpus: Path, tmp_path: Path
) -> None:
    work = Work(model, corpus, {"taps": "resid_post:1,q:0", "seq_len": 64, **flags})
    cost = run("plan", "--calibrate", "off", *work.flags(tmp_path / "out"), "--json").json
    shown = one_line(run("plan", "--calibrate", "off", *work.flags(tmp_path / "out")).out)
    assert f"rows to keep {cost['rows']:,} " in shown
    assert f"tokens {cost['tokens']:,} " in shown
    assert cost["documents"] == 40
    per_row = {"resid_post.1": 64, "q.0": 64}
    assert cost["bytes_per_tap"] == {tap: cost["rows"] * size for tap, size in per_row.items()}
    beside = cost["index_bytes"] + cost["overhead_bytes"]
    assert cost["total_bytes"] == sum(cost["bytes_per_tap"].values()) + beside
    expected = 40 if share is None else cost["tokens"] * share  # one of each document
    assert abs(cost["rows"] - expected) <= 0.05 * expected
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A dataset with its own model and corpus, which a test may move."""
    folder = tmp_path_factory.mktemp("checked")
    model = tiny.write_model(folder / "model")
    corpus = tiny.write_corpus(folder / "docs.jsonl", 12)
    taps = "embed,resid_post:0+2,z:1,logprob"
    return Work(model, corpus, {"taps": taps, "seq_len": 64, "compute_dtype": "float32"})


@pytest.fixture(scope="module")
def checked(made: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "dataset"
    made.extract(out)
    return out


def test_check_says_how_far_each_tap_is_and_where_things_may_be(
    made: Work, checked: Path, tmp_path: Path
) -> None:
    model = made.model.rename(tmp_path / "model")
    try:
        check_refused(run("check", checked), 2, f"--model {made.model}", "no such directory")
        result = run("check", checked, "--model", model, "--samples", 2)
    finally:
        model.rename(made.model)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:4] == ["tap", "error", "allowed", "control"]
    legend = next(number for number, line in enumerate(lines) if line.startswith("  error "))
    taps = [line.split() for line in lines[1:legend]]
    assert [row[0] for row in taps] == ["embed", "resid_post.0", "z.1", "resid_post.2", "logprob"]
    for _, error, allowed, control, alone, typical, cosine in taps:
        assert float(error) <= float(allowed) < float(control)
        assert float(alone) <= float(error) + 1e-6
        assert float(typical.strip("()")) < 0.01
        assert float(cosine) > 0.999
    assert lines[-1].startswith(f"{checked}: every tap agrees with the reference (2 documents, ")
    assert "transformers " in lines[-1] and "torch " in lines[-1]
    for line in said(result.err):
        assert line.startswith("spile: loading "), "nothing but what was asked for"
    check_sound(checked)


WAITS = {
    "compile": "compiling for ",
    "plan": "reading the model and the corpus  ",
    "shuffle": "shuffling  ",
    "check": "comparing with HF transformers  ",
}


@pytest.mark.parametrize("verb", WAITS)
def test_a_verb_that_takes_long_says_for_how_long(
    verb: str, made: Work, checked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.002)
    model = ["--model", made.model, "--taps", "embed"]
    words = {
        "compile": model,
        "plan": [*model, "--corpus", made.corpus, "--calibrate", "off"],
        "shuffle": [checked, tmp_path / "shuffled"],
        "check": [checked, "--samples", 1],
    }[verb]
    for more, wanted in ((), True), (("--json",), False):
        result = run(verb, *words, *more)
        assert result.code == 0, result.err
        assert (f"spile: {WAITS[verb]}" in result.err) == wanted, result.err
        shutil.rmtree(tmp_path / "shuffled", ignore_errors=True)


@pytest.mark.full
def test_check_of_a_faulty_dataset_names_the_tap_and_fails(checked: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(checked, tmp_path / "out"))
    stored = Stored(out, Ledger(LocalObjects(out)).table(), [], np.zeros(0), {}, [])
    for unit in stored.table.units:
        (shard,) = [shard for shard in stored.done(unit.id).shards if shard.tap == "z.1"]
        info = read_header(out / shard.key)["z.1"]
        rows = np.memmap(out / shard.key, info.dtype, "r+", info.start, info.shape)
        rows[:] = rows[:, [1, 0, 2, 3]]
        rows.flush()
        reseal(stored, unit.id)
    check_sound(out)
    result = tiny.spile("check", str(out), "--json", check=False)
    assert result.returncode == 3
    found = json.loads(result.stdout)
    assert (found["ok"], found["documents"]) == (False, 4)
    assert {tap for tap, entry in found["taps"].items() if not entry["ok"]} == {"z.1"}
    assert {*found["taps"]["z.1"]} == {"error", "floor", "control", "loss", "allowed", "ok"}
    text = run("check", out, "--samples", 1)
    assert text.code == 3
    assert [line.split()[0] for line in text.out.splitlines() if "too far" in line] == ["z.1"]
    assert f"{out}: 1 tap disagrees with the reference" in text.out
    check_sound(out)


def test_check_refuses_what_cannot_be_checked(checked: Path, model: Path, tmp_path: Path) -> None:
    check_refused(run("check"), 2, "OUT")
    for samples in ("0", "-3", "few"):
        check_refused(run("check", checked, "--samples", samples), 2, "--samples", samples)
    check_refused(run("check", tmp_path / "none"), 3, tmp_path / "none")
    check_refused(run("check", checked, "--lora", tmp_path / "none"), 2, tmp_path / "none")
    check_refused(run("check", checked, "--corpus", tmp_path / "none"), 2, tmp_path / "none")
    other = tiny.write_model(tmp_path / "other", seed=1)
    check_refused(run("check", checked, "--model", other), 2, "another recipe", "model weights")


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama as its converter leaves it; returns its tensors."""
    rng = np.random.default_rng(0)
    layer = {
        "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
        "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48), "attn_norm": (32,),
        "ffn_norm": (32,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (tiny.VOCAB, 32), "output_norm": (32,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    tensors = {
        f"{name}.weight": (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, "<s>", "</s>", "in", "th"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["i n", "t h"])
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.EOS)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.full
def test_convert_makes_a_model_that_the_other_verbs_take(corpus: Path, tmp_path: Path) -> None:
    source, dest = tmp_path / "tiny.gguf", tmp_path / "models" / "tiny"
    tensors = write_gguf(source)
    result = run("convert", source, dest)
    assert (result.out, result.err) == (f"made {dest}\n", "")
    arch = open_checkpoint(str(dest)).arch
    assert (arch.family, arch.num_layers, arch.vocab_size) == ("llama", 2, tiny.VOCAB)
    assert first_column(run("taps", "--model", dest).out)[0] == "embed"
    info = read_header(dest / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weight = map_tensor(dest / "model.safetensors", info)
    assert np.array_equal(weight, tensors["blk.1.ffn_up.weight"])
    (ids,) = TextTokenizer(dest, "none").encode(["in the 12"])
    pieces = ["in", "\u0120", "th", "e", "\u0120", "1", "2"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {**{c: i for i, c in enumerate(alphabet)}, "in": 258, "th": 259}
    assert ids.tolist() == [vocab[piece] for piece in pieces]
    work, out = Work(dest, corpus, {"taps": "resid_post:1", "max_docs": 5}), tmp_path / "out"
    assert run("plan", "--calibrate", "off", *work.flags(out), "--json").json["documents"] == 5
    work.extract(out, compute_dtype="float32")
    agreed = run("check", out, "--json", "--samples", 2)
    assert (agreed.code, agreed.json["ok"]) == (0, True)


def test_convert_says_what_it_made_as_json_and_takes_another_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    assert run("convert", source, tmp_path / "a").code == 0
    result = run("convert", source, tmp_path / "b", "--tokenizer", tmp_path / "a", "--json")
    assert (result.code, result.json) == (0, {"model": str(tmp_path / "b")})
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tiny.write_tokenizer(tmp_path)  # of other pieces
    check_refused(
        run("convert", source, tmp_path / "c", "--tokenizer", tmp_path), 2, "not the tokenizer of"
    )
    assert not (tmp_path / "c").exists()


def test_convert_refuses_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source, dest = tmp_path / "tiny.gguf", tmp_path / "model"
    result = run("convert", source, dest)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"spile: {source}: there is no such file\n"
    check_refused(run("convert", source), 2, "DEST")
    source.write_bytes(b"GGUF" + bytes(500))
    check_refused(run("convert", source, dest), 2, source)
    write_gguf(source)
    check_refused(run("convert", source, source), 2, source, "exists already")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    check_refused(run("convert", source, tmp_path / "full"), 2, tmp_path / "full", "exists already")
    check_refused(run("convert", tmp_path / "full", dest), 2, "there is no such file")
    check_refused(run("convert", source, dest, "--tokenizer", tmp_path / "full"), 2, "full")
    refused = run("convert", source, source / "below" / "a" / "file")
    check_refused(refused, 2, source / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "tiny.gguf"]
