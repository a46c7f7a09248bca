"""Answers of SGLang: prompts and sampled tokens, with and without a layer axis, and broken ones.

The chunks are as `scheduler_output_processor_mixin.py` of SGLang makes them: the rows of the
prompt, then a row for each decoded token but the last.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.ingest.conftest import BFLOAT16, Answers, Same
from spile.core.errors import ConfigError, InputError
from spile.interop.ingest import Ingested, ingest

PROMPT = 3  # tokens of each prompt; the rest was sampled
SAMPLED = 7  # the token that was sampled last, which has no row


def answer(tokens: np.ndarray, rows: np.ndarray, *, logprobs: bool = False) -> dict[str, Any]:
    """An answer to the first tokens, of rows [tokens, width] or [tokens, layers, width]."""
    ids, values = tokens.tolist(), rows.astype(np.float64)
    prompt, output = ids[:PROMPT], [*ids[PROMPT:], SAMPLED]
    chunks = [values[:PROMPT].tolist(), *(row.tolist() for row in values[PROMPT:])]
    meta = {
        "id": "x", "prompt_tokens": len(prompt), "completion_tokens": len(output),
        "hidden_states": chunks,
    }  # fmt: skip
    if not logprobs:
        return {"text": "…", "input_ids": prompt, "output_ids": output, "meta_info": meta}
    meta["input_token_logprobs"] = [[None, prompt[0], None], *([-1.0, t, None] for t in prompt[1:])]
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in output]
    return {"text": "…", "meta_info": meta}


def save(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def taken(source: Path, out: Path, answers: Answers, **options: Any) -> Ingested:
    return ingest(source, out, model=str(answers.model), **options)


@pytest.mark.parametrize("logprobs", [False, True])
def test_prompts_and_sampled_tokens_have_their_rows(
    answers: Answers, tmp_path: Path, same: Same, logprobs: bool
) -> None:
    rows = answers.layers(4)
    given = zip(answers.tokens, rows, strict=True)
    lines = [answer(ids, values[:, 0], logprobs=logprobs) for ids, values in given]
    made = taken(save(tmp_path / "a.jsonl", lines), tmp_path / "out", answers)
    assert (made.taps, made.dtype, made.refused) == (("final_norm",), "bfloat16", {})
    assert made.rows_by == "SGLang"
    same(tmp_path / "out", answers.tokens, rows)


def test_a_layer_axis_needs_the_names_of_its_layers(
    answers: Answers, tmp_path: Path, same: Same
) -> None:
    rows = [each.astype(np.float16) for each in answers.layers(1, 2)]
    folder = tmp_path / "answers"
    folder.mkdir()
    lines = [answer(ids, values) for ids, values in zip(answers.tokens, rows, strict=True)]
    save(folder / "a.jsonl", lines[:4])
    save(folder / "b.jsonl", lines[4:])
    with pytest.raises(ConfigError, match="its layer k enters block k"):
        taken(folder, tmp_path / "out", answers)
    made = taken(folder, tmp_path / "out", answers, taps="resid_post:0-1", store_dtype="float16")
    assert made.refused == {}
    same(tmp_path / "out", answers.tokens, rows)


def test_the_narrowest_dtype_that_holds_the_values_is_stored(
    answers: Answers, tmp_path: Path
) -> None:
    for number, (dtype, stored) in enumerate(
        [(BFLOAT16, "bfloat16"), (np.float16, "float16"), (np.float32, "float32")]
    ):
        rows = answers.rows[0][:, 4].astype(dtype)
        lines = [answer(answers.tokens[0], rows)]
        path = save(tmp_path / f"{number}.jsonl", lines)
        assert taken(path, tmp_path / f"out{number}", answers).dtype == stored


def test_faulty_answers_are_refused_by_their_line(
    answers: Answers, tmp_path: Path, same: Same
) -> None:
    tokens, rows = answers.tokens[0], answers.layers(4)[0][:, 0]
    sound = answer(tokens, rows)
    cached = json.loads(json.dumps(sound))  # the prompt's beginning came from a cache
    cached["meta_info"]["hidden_states"][0].pop(0)
    silent = json.loads(json.dumps(sound))
    del silent["meta_info"]["hidden_states"]
    nameless = {key: value for key, value in sound.items() if key != "input_ids"}
    part = json.loads(json.dumps(sound))
    part["meta_info"]["prompt_tokens"] += 2
    ragged = json.loads(json.dumps(sound))
    ragged["meta_info"]["hidden_states"][1].pop()
    narrow = answer(tokens, rows[:, :5])
    nan = json.loads(json.dumps(sound))
    nan["meta_info"]["hidden_states"][0][1][2] = float("nan")
    path = save(tmp_path / "a.jsonl", [sound, cached, silent, nameless, part, ragged, narrow, nan])
    with path.open("a") as file:
        file.write('{"meta_info": \n[1, 2]\n')
    made = taken(path, tmp_path / "out", answers)
    same(tmp_path / "out", [tokens], [rows[:, None]])
    assert made.refused == {
        "NaN or infinity": 1, "another shape or dtype than the first document": 1,
        "file cannot be read": 1, "no hidden states": 3, "no token ids": 2,
        "rows and tokens differ in number": 1,
    }  # fmt: skip
    assert made.named[0].startswith("a.jsonl:2: rows and tokens differ in number (")
    assert made.named[-3].startswith("a.jsonl:8: NaN or infinity (final_norm, token 1)")


def test_files_without_any_usable_answer_are_refused(answers: Answers, tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [{"meta_info": {"hidden_states": []}}])
    with pytest.raises(InputError, match="none of its 1 answers has hidden states and token ids"):
        taken(path, tmp_path / "out", answers)
    with pytest.raises(InputError, match="no such file or folder"):
        taken(tmp_path / "nothing", tmp_path / "out", answers)
