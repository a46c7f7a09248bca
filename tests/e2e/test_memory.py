"""Memory is queue depth times batch bytes, whatever the size of the corpus."""

from pathlib import Path

import tiny
from chaos.harness import Work, launch

TEXT = "the same few words for every document, so that units are alike; "
DOCUMENTS = 1200
OPTIONS = {
    "taps": "embed,resid_post:0",
    "seq_len": 128,
    "unit_tokens": 20_000,
    "store_dtype": "float32",
}


def write_corpus(path: Path, documents: int) -> Path:
    """Lines that are mostly not text: a reader that kept the file would show."""
    padding = "." * 12_000
    with path.open("w") as file:
        for number in range(documents):
            file.write(f'{{"text": "{number} {TEXT}", "x": "{padding}"}}\n')
    return path


def peak_of(work: Work, folder: Path) -> int:
    """Peak resident memory of a whole run, in kB."""
    peak = folder / f"{work.corpus.stem}.peak"
    out = folder / work.corpus.stem
    process = launch({"peak": str(peak)}, "extract", *work.flags(out))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    made = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert made > work.corpus.stat().st_size // 2
    return int(peak.read_text())


def test_peak_memory_does_not_grow_with_the_corpus(model: Path, tmp_path: Path) -> None:
    small = Work(model, write_corpus(tmp_path / "small.jsonl", DOCUMENTS), OPTIONS)
    large = Work(model, write_corpus(tmp_path / "large.jsonl", 8 * DOCUMENTS), OPTIONS)
    # Else a run that kept all it read, or all it made, would pass.
    assert large.corpus.stat().st_size > 100e6
    # Compiling takes more memory than running: both runs find it done.
    tiny.spile("extract", *small.flags(tmp_path / "warm"))
    first, second = peak_of(small, tmp_path), peak_of(large, tmp_path)
    assert second < 1.1 * first, f"{first} kB, then {second} kB for eight times the corpus"
