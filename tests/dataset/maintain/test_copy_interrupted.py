"""If compacting or shuffling ends at the worst moment, the same command continues."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.harness import run
from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import read_tokenizer
from spile.objects import LocalObjects, Objects
from support import stored

Copy = Callable[[Objects, Objects], object]


class Ending(LocalObjects):
    """A disk that ends the command after it has created a unit's record."""

    def __init__(self, root: Path, unit: int, error: BaseException) -> None:
        super().__init__(root)
        self._unit, self._error = unit, error

    def create(self, key: str, data: bytes) -> bool:
        created = super().create(key, data)
        if key == fmt.CURRENT.done_key(self._unit):
            raise self._error
        return created


def compacted(source: Objects, dest: Objects) -> object:
    return compact(source, dest, unit_bytes=4000)


def shuffled(source: Objects, dest: Objects) -> object:
    return shuffle(source, dest, memory=6000)


@pytest.fixture
def source(tmp_path: Path) -> Objects:
    return stored.build(tmp_path / "source", ((30,), (20, 9), (25,), (31,))).objects


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("the link is down")])
@pytest.mark.parametrize("copy", [compacted, shuffled])
def test_a_unit_whose_record_was_created_keeps_its_files(
    copy: Copy, error: BaseException, source: Objects, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    for unit in (0, 1):
        with pytest.raises(type(error)):
            copy(source, Ending(dest, unit, error))
    copy(source, LocalObjects(dest))
    report = verify(LocalObjects(dest))
    assert report.ok
    assert report.rows == verify(source).rows


def test_a_run_between_passes_whose_record_was_created_keeps_its_files(
    source: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = LocalObjects(tmp_path / "dest")
    with monkeypatch.context() as patched:
        patched.setattr(
            "spile.dataset.maintain.shuffle.open_objects",
            lambda url: Ending(Path(url), 1, KeyboardInterrupt()),
        )
        with pytest.raises(KeyboardInterrupt):
            shuffled(source, dest)
    shuffled(source, dest)
    assert verify(dest).ok


@pytest.mark.parametrize("copy", [compacted, shuffled])
def test_going_on_refuses_a_unit_whose_files_are_gone(
    copy: Copy, source: Objects, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    with pytest.raises(KeyboardInterrupt):
        copy(source, Ending(dest, 0, KeyboardInterrupt()))
    done = Ledger(LocalObjects(dest)).read_done(0)
    assert done is not None
    (dest / done.shards[0].key).unlink()
    with pytest.raises(CorruptError, match="missing, or cut short; remove"):
        copy(source, LocalObjects(dest))


def test_scratch_that_holds_a_strangers_files_is_left_alone(
    source: Objects, tmp_path: Path
) -> None:
    scratch, dest = tmp_path / "scratch", tmp_path / "dest"
    arguments = ["shuffle", source.url, str(dest), "--memory", "6000", "--scratch", str(scratch)]
    assert run(*arguments).code == 0
    assert [path for path in scratch.rglob("*") if path.is_file()] == []
    for name in ("1/notes.txt", "1/done/000000/00000000.json", "2/attempts/0/a/b.safetensors"):
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text("mine")
    assert run(*arguments).code == 0
    assert len([path for path in scratch.rglob("*") if path.is_file()]) == 3


@pytest.mark.parametrize("copy", [compacted, shuffled])
def test_the_tokenizer_is_copied_before_anything_else_and_damage_is_not(
    copy: Copy, tmp_path: Path
) -> None:
    made = stored.build(tmp_path / "source", ((30,), (20, 9)), **stored.WITH_TOKENIZER)
    dest = LocalObjects(tmp_path / "dest")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            copy(made.objects, Ending(tmp_path / "dest", 0, KeyboardInterrupt()))
        shutil.rmtree(tmp_path / "dest" / fmt.DONE)
    copy(made.objects, dest)
    ledger = Ledger(dest)
    assert read_tokenizer(ledger.objects, ledger.table()) == stored.TOKENIZER
    assert verify(dest).ok
    stored.flip(made.path / made.table.tokenizer["tokenizer.json"].key, 1, 4)
    with pytest.raises(CorruptError, match=r"restores it from the model's tokenizer.json"):
        copy(made.objects, LocalObjects(tmp_path / "other"))
    assert Ledger(LocalObjects(tmp_path / "other")).read_table() is None
