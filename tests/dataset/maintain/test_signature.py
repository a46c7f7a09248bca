"""A signature covers every record and file, and names its signer; anybody can verify it."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from chaos.harness import Result, check_refused, run
from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.audit import audit_unit
from spile.dataset.maintain.signature import SignedList, decode_list
from spile.dataset.maintain.verify import Journal, verify
from spile.dataset.records.features import FeatureSet
from spile.features.run import FeatureRequest, make_features
from support import stored

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"
)
UNITS = ((5, 9), (9, 5), (0, 3))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine` and `other`, and a file of signers that names mine."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name]
        subprocess.run(command, check=True)
    (folder / "signers").write_text(f"me@example.org {(folder / 'mine.pub').read_text()}")
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return stored.copied(tmp_path / "out", units=UNITS)


@pytest.fixture
def signed(dataset: stored.Stored, keys: Path) -> stored.Stored:
    result = run("sign", dataset.path, "--key", keys / "mine")
    assert result.code == 0, result.err
    return dataset


def checked(dataset: stored.Stored, keys: Path, *more: object) -> Result:
    signers = () if "--signers" in more else ("--signers", keys / "signers")
    return run("verify", dataset.path, "--signature", "--json", *signers, *more)


def faults(dataset: stored.Stored, keys: Path, *more: object) -> list[str]:
    result = checked(dataset, keys, *more)
    found = result.json["faults"]
    assert (result.code, bool(found)) in ((0, False), (3, True)), result.err
    return found


def key_name(keys: Path, name: str) -> str:
    command = ["ssh-keygen", "-l", "-f", keys / f"{name}.pub"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]


def test_a_signed_dataset_is_vouched_for(dataset: stored.Stored, keys: Path) -> None:
    result = run("sign", dataset.path, "--key", keys / "mine", "--json")
    files = [key for key in dataset.listed() if not key.startswith("signature")]
    assert result.json["units"] == result.json["units_total"] == 3
    assert result.json["files"] == len(files) and result.json["key"] == key_name(keys, "mine")
    found = checked(dataset, keys)
    assert found.code == 0 and found.json["ok"] and found.json["unsigned"] == []
    assert found.json["signed_by"] == f"me@example.org ({key_name(keys, 'mine')})"
    assert found.json["orphans"] == []
    told = run("verify", dataset.path, "--signature", "--signers", keys / "mine.pub").out
    assert f"signed by mine.pub ({key_name(keys, 'mine')}): 3 of 3 units" in told
    assert verify(dataset.objects).ok


def test_nothing_of_spile_is_needed_to_verify_it(signed: stored.Stored, keys: Path) -> None:
    """By docs/format.md: the list follows from the records, by sha256sum and sort alone."""
    command = ["ssh-keygen", "-Y", "verify", "-f", keys / "signers", "-I", "me@example.org",
               "-n", "spile", "-s", "signature-v2.sha256.sig"]  # fmt: skip
    listed = signed.path / "signature-v2.sha256"
    with listed.open("rb") as file:
        subprocess.run(command, cwd=signed.path, stdin=file, check=True, capture_output=True)
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", listed.name], cwd=signed.path, check=True
    )
    table = json.loads((signed.path / "units.json").read_bytes())
    names = ["units.json", table["units"]["key"]]
    names += [
        n for n in ("model.json", "scales.json", "manifest.json") if (signed.path / n).exists()
    ]
    manifest = json.loads((signed.path / "manifest.json").read_bytes())
    names += [file["key"] for file in (*manifest["segments"], manifest["columns"])]
    (digests,) = (signed.path / "digests").iterdir()
    names.append(f"digests/{digests.name}")
    columns = safetensors.numpy.load_file(digests)
    done = sorted((signed.path / "done").glob("*/*"))
    of_files: list[str] = []
    for path, unit, digest in zip(done, columns["unit"], columns["record"], strict=True):
        record = json.loads(path.read_bytes())
        assert (record["unit"], sha256(path.read_bytes())) == (unit, digest.tobytes())
        beside = (record[name] for name in ("index", "statistics", "documents_table"))
        of_files += [file["key"] for file in (*record["shards"], *beside)]
    for key, digest in zip(of_files, columns["file"], strict=True):
        assert sha256((signed.path / key).read_bytes()) == digest.tobytes()
    summed = subprocess.run(
        ["sha256sum", *names], cwd=signed.path, check=True, capture_output=True
    ).stdout
    lines = subprocess.run(
        ["sort", "-k2"], input=summed, check=True, capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout  # fmt: skip
    head = (
        f"# spile signature 2\n# fingerprint {table['fingerprint']}\n"
        f"# units {len(done)} of {table['units']['count']}\n"
    )
    assert listed.read_bytes() == head.encode() + lines


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def forged(dataset: stored.Stored, unit: int = 1) -> str:
    """A changed file whose record and manifest agree with it: no checksum shows the change."""
    done = dataset.done(unit)
    path = dataset.path / done.shards[0].key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    stored.reseal(dataset, unit)
    return done.shards[0].key


def test_a_forgery_that_no_checksum_tells_is_found(signed: stored.Stored, keys: Path) -> None:
    forged(signed)
    assert run("verify", signed.path).code == 0
    found = faults(signed, keys)
    assert any("done/000000/00000001.json: is not the record that was signed" in f for f in found)
    assert any("manifest.json: is not the record that was signed" in f for f in found)


def test_another_file_of_the_same_checksum_is_found(signed: stored.Stored) -> None:
    """XXH3 is no cryptographic hash: a file can be made that has it."""
    done, table = signed.done(1), signed.table
    shard = done.shards[0]
    signature = (signed.path / fmt.SIGNED).read_bytes()
    digests = SignedList(signed.objects, fmt.CURRENT, signature).digests_of(done)
    data = bytearray((signed.path / shard.key).read_bytes())
    data[-1] ^= 1
    (signed.path / shard.key).write_bytes(data)
    digest = xxhash.xxh3_128_hexdigest(bytes(data))
    same = dataclasses.replace(shard, digest=digest)
    done = dataclasses.replace(done, shards=(same, *done.shards[1:]))
    assert audit_unit(signed.objects, table, table.units[1], done).faults == []
    found = audit_unit(signed.objects, table, table.units[1], done, digests).faults
    assert found == [f"{shard.key}: is not the file that was signed"]


def test_a_removed_unit_and_an_added_record_are_found(signed: stored.Stored, keys: Path) -> None:
    (signed.path / fmt.CURRENT.done_key(2)).unlink()
    (signed.path / fmt.MANIFEST).unlink()
    found = faults(signed, keys, "--partial")
    assert f"{fmt.CURRENT.done_key(2)}: was signed, and is missing or damaged" in found
    (signed.path / fmt.MODEL).write_bytes(fmt.encode_record("model", {"tensors": {}}))
    found = faults(signed, keys, "--partial")
    assert f"{fmt.MODEL}: is not the record that was signed" in found


def test_a_dataset_that_grows_says_what_is_covered(tmp_path: Path, keys: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, commit=[0, 2])
    result = run("sign", dataset.path, "--key", keys / "mine")
    assert result.code == 0 and "signed 2 of 3 units" in result.out
    assert checked(dataset, keys).code == 3  # it is not whole
    assert checked(dataset, keys, "--partial").code == 0
    assert dataset.ledger.commit(dataset.attempt(1)) and dataset.ledger.complete(dataset.table)
    found = checked(dataset, keys)
    assert found.code == 3 and found.json["unsigned"] == [1]
    (fault,) = found.json["faults"]
    assert "covers 2 of 3 units; not signed: 1; `spile sign` again" in fault
    assert run("sign", dataset.path, "--key", keys / "mine").code == 0
    assert checked(dataset, keys).code == 0


def test_added_taps_are_not_signed_and_say_so(signed: stored.Stored, keys: Path) -> None:
    added, _ = stored.add_pass(signed, {"z.0": 4}, commit=(0,))
    (fault,) = faults(signed, keys)
    assert fault.startswith(f"passes/{added.name}/pass.json: z.0 were added, and a signature")
    added.drop()
    assert faults(signed, keys) == []


def test_an_unsigned_dataset_is_refused(dataset: stored.Stored, keys: Path) -> None:
    check_refused(checked(dataset, keys), 3, "is not signed")


def test_a_key_that_nobody_allowed_is_refused(dataset: stored.Stored, keys: Path) -> None:
    assert run("sign", dataset.path, "--key", keys / "other").code == 0
    check_refused(checked(dataset, keys), 3, key_name(keys, "other"), "does not allow")
    check_refused(
        checked(dataset, keys, "--signers", keys / "mine.pub"), 3, key_name(keys, "other")
    )
    assert checked(dataset, keys, "--signers", keys / "other.pub").code == 0


@pytest.mark.parametrize("which", [fmt.SIGNED, fmt.SIGNATURE])
def test_a_changed_list_or_signature_is_refused(
    signed: stored.Stored, keys: Path, which: str
) -> None:
    path = signed.path / which
    data = bytearray(path.read_bytes())
    place = next(n for n in range(len(data) // 2, len(data)) if data[n] not in b"\n4")
    data[place] = ord("4")  # (a letter of both forms; its last bits alone may mean nothing)
    path.write_bytes(data)
    check_refused(checked(signed, keys), 3, "is not a signature of")


def test_a_signature_for_another_purpose_is_refused(signed: stored.Stored, keys: Path) -> None:
    path = signed.path / fmt.SIGNED
    (signed.path / fmt.SIGNATURE).unlink()
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", keys / "mine", "-n", "file", path]
    subprocess.run(command, check=True)
    check_refused(checked(signed, keys), 3, "is not a signature of")
    limited = keys / "limited"
    limited.write_text(f'me@example.org namespaces="git" {(keys / "mine.pub").read_text()}')
    assert run("sign", signed.path, "--key", keys / "mine").code == 0
    check_refused(checked(signed, keys, "--signers", limited), 3, "does not allow")


def test_a_signature_of_another_dataset_is_refused(
    signed: stored.Stored, keys: Path, tmp_path: Path
) -> None:
    other = stored.build(tmp_path / "other", UNITS, seed=1, max_docs=9)
    for name in (fmt.SIGNED, fmt.SIGNATURE):
        shutil.copy(signed.path / name, other.path / name)
    (fault,) = faults(other, keys)
    assert "is the signature of another dataset" in fault


def test_what_is_outside_may_change(signed: stored.Stored, keys: Path) -> None:
    signed.objects.create(fmt.CHECK, fmt.encode_record("check", {"ok": True, "taps": {}}))
    (signed.path / "README.md").write_text("a card")
    assert checked(signed, keys).code == 0


def test_without_ssh_keygen_it_says_what_to_install(
    signed: stored.Stored, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_refused(checked(signed, keys), 2, "install OpenSSH 8.2 or later")
    check_refused(run("sign", signed.path, "--key", keys / "mine"), 2, "install OpenSSH")


def test_who_may_sign_must_be_said(
    signed: stored.Stored, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    refused = run("verify", signed.path, "--signature")
    check_refused(refused, 2, "--signers: who may sign", key_name(keys, "mine"))
    (tmp_path / ".ssh").mkdir()
    shutil.copy(keys / "signers", tmp_path / ".ssh" / "allowed_signers")
    assert run("verify", signed.path, "--signature").code == 0
    check_refused(
        run("verify", signed.path, "--signature", "--quick"), 2, "--quick", "run it alone"
    )


def test_a_key_that_does_not_sign_changes_nothing(signed: stored.Stored, keys: Path) -> None:
    before = (signed.path / fmt.SIGNATURE).read_bytes()
    check_refused(run("sign", signed.path, "--key", keys / "signers"), 2, "does not sign with it")
    check_refused(run("sign", signed.path, "--key", keys / "none"), 2, "no such file")
    assert (signed.path / fmt.SIGNATURE).read_bytes() == before


def test_what_is_damaged_is_not_signed(dataset: stored.Stored, keys: Path) -> None:
    path = dataset.path / dataset.done(0).index.key
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    check_refused(run("sign", dataset.path, "--key", keys / "mine"), 3, "checksum does not match")
    assert not dataset.listed("signature")


def test_an_audit_without_signature_is_not_continued_with_one(
    signed: stored.Stored, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPILE_CACHE", str(tmp_path / "cache"))

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal = Journal(signed.objects.url, resume=False)
        verify(signed.objects, journal=journal, progress=interrupt)
    assert checked(signed, keys, "--resume").json["resumed"] == 0
    assert run("verify", signed.path, "--resume", "--json").json["resumed"] == 2


def test_a_list_has_one_spelling() -> None:
    head = b"# spile signature 2\n# fingerprint " + b"0" * 64 + b"\n# units 1 of 1\n"
    line = b"%s  done/1.json\n" % (b"a" * 64)
    assert decode_list(head + line) == ("0" * 64, {"done/1.json": "a" * 64})
    later = line.replace(b"done/1", b"done/2")
    of_head = [b"", head[:-3], head.replace(b"0", b"g"), head.replace(b"1 of", b"one of")]
    of_lines = [line[:-1], later + line, line + line, b"x\n"]
    for bad in (*of_head, line, *(head + lines for lines in of_lines)):
        with pytest.raises((StoreError, CorruptError)):
            decode_list(bad)
    with pytest.raises(StoreError, match="not a list that this version of spile knows"):
        decode_list(head.replace(b"signature 2", b"signature 3") + line)


def test_the_tokenizer_is_signed(tmp_path: Path, keys: Path) -> None:
    """The check also holds against a forger who adapts every record."""
    dataset = stored.build(tmp_path / "out", UNITS, tokenizer=stored.TOKENIZER)
    assert run("sign", dataset.path, "--key", keys / "mine").code == 0
    assert faults(dataset, keys) == []
    key = dataset.table.tokenizer["tokenizer.json"].key
    stored.flip(dataset.path / key, 1, 4)
    assert f"{key}: is not the record that was signed" in faults(dataset, keys)


def test_features_are_signed(tmp_path: Path, keys: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, taps=stored.LATENTS, **stored.ENCODED)
    make_features(str(dataset.path), FeatureRequest(logits=0))
    assert run("sign", dataset.path, "--key", keys / "mine").code == 0
    assert run("gc", dataset.path).code == 0  # (removes what a summary has taken in)
    assert faults(dataset, keys) == []
    folder = dataset.path / "features/mlp_out.1-1"
    # A forger also adapts the record that names a changed file.
    record = next((folder / "summaries").iterdir())
    body = record.read_bytes()
    features = FeatureSet(dataset.objects, "mlp_out.1-1")
    made = features.summary(features.summaries()[0])
    assert made is not None
    features.objects.delete(f"summaries/{record.name}")
    features.create_summary(replace(made, rows=made.rows + 1))
    (fault,) = faults(dataset, keys)
    assert (
        fault == f"features/mlp_out.1-1/summaries/{record.name}: is not the record that was signed"
    )
    record.write_bytes(body)
    # Features that nobody signed; and those that are dropped.
    np.save(tmp_path / "one.npy", np.ones(6))
    request = FeatureRequest(tap="resid_post.0", directions=[str(tmp_path / "one.npy")], logits=0)
    make_features(str(dataset.path), request)
    assert all("is not signed; whoever added it" in fault for fault in faults(dataset, keys))
    for name in ("resid_post.0-1", "mlp_out.1-1"):
        assert run("drop", dataset.path, "--features", name).code == 0
    assert run("gc", dataset.path).code == 0 and not (folder / "summaries").exists()
    assert faults(dataset, keys) == []
