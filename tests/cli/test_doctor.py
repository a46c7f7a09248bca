"""`spile doctor` describes a machine in about twenty lines, without a secret."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from spile import cli
from spile.cli import doctor
from spile.cli.doctor import diagnose, doctor_text


def test_it_names_devices_extras_and_disk_and_asks_for_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] >= 1 and told["platform"] and told["problem"] is None
    assert told["extras"]["cloud"] == metadata.version("obstore")
    assert told["cache_free"] > 0 and told["memory"] > told["cores"] > 0
    lines = doctor_text(diagnose()).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 120


def test_what_is_missing_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = metadata.version

    def absent(package: str) -> str:
        if package == "obstore":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    found = diagnose()
    assert found.extras["cloud"] is None
    assert "cloud        missing: pip install 'spile[cloud]'  (gs:// and s3://)" in doctor_text(
        found
    )


def test_credentials_are_named_by_where_they_are_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables, _ in doctor._CREDENTIALS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert {*diagnose().credentials.values()} == {None}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-secret")
    found = diagnose()
    assert found.credentials == {
        "Hugging Face": str(tmp_path / "hf" / "token"),
        "Google Cloud": None,
        "AWS": "$AWS_ACCESS_KEY_ID",
    }
    assert "secret" not in doctor_text(found)


def test_a_device_that_cannot_be_started_is_a_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(diagnose(), problem="no driver")
    monkeypatch.setattr(doctor, "diagnose", lambda: broken)
    assert cli.run(["doctor"]) == 3
    assert "devices      none could be started: no driver" in capsys.readouterr().out
