"""How fast text becomes packed tokens, by kind of corpus: `python bench/tokenizing.py`.

It measures everything before the device (reading, chat templates, tokenizing, packing), with the
demo model's tokenizer on repetitions of the demo corpus. Each line is a separate process. "Tokens
per core" divides by the processor seconds of all threads and processes. "One interpreter's limit"
divides by the seconds that only one thread at a time can spend: all but those of the tokenizer's
own Rust threads (unknown if it has none).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("text", "jsonl", "jsonl.gz", "parquet", "chats", "short chats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="whose tokenizer and chat template")
    parser.add_argument("--bytes", type=float, default=20e6, help="of text, of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--processes", default="1", help="that render chats, e.g. 1,2,4")
    parser.add_argument("--unit-tokens", type=int, default=1_000_000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(**json.loads(arguments.one))))
        return
    print(f"{os.cpu_count()} cores ({os.uname().machine})")
    print("corpus       threads processes       tok/s  tok/s a core  one interpreter's limit")
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kinds.split(","):
            corpus = written(Path(folder), kind, int(arguments.bytes))
            for threads in map(int, arguments.threads.split(",")):
                for processes in map(int, arguments.processes.split(",")):
                    if "chats" not in kind and processes > 1:
                        continue
                    one = {"model": arguments.model, "corpus": str(corpus), "threads": threads,
                           "processes": processes, "unit_tokens": arguments.unit_tokens,
                           "messages": "messages" if "chats" in kind else None}  # fmt: skip
                    show(kind, one)


def show(kind: str, one: dict[str, Any]) -> None:
    command = [sys.executable, __file__, "--one", json.dumps(one)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    rate, cpu = found["tokens"] / found["seconds"], found["tokens"] / found["cpu"]
    limit = f"{found['tokens'] / found['python']:,.0f}" if one["threads"] > 1 else "?"
    made = f"{kind:12} {one['threads']:7} {one['processes']:9} {rate:11,.0f} {cpu:13,.0f}"
    print(f"{made}  {limit:>23}", flush=True)


def written(folder: Path, kind: str, size: int) -> Path:
    """Write the demo corpus as paragraphs, repeated up to the size."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    from spile.corpus.files import DEMO

    with gzip.open(DEMO, "rt") as file:
        speeches = [json.loads(line)["text"] for line in file]
    texts: list[str] = []
    while size > 0:
        for speech in speeches:
            for start in range(0, len(speech), 4000):
                texts.append(speech[start : start + 4000].replace("\n", " "))
                size -= len(texts[-1])
            if size <= 0:
                break
    path = folder / f"corpus.{kind}"
    if kind == "text":
        path = path.with_suffix(".txt")
        path.write_text("\n".join(texts))
    elif "chats" in kind:
        path = path.with_suffix(".parquet")
        size = 100 if kind.startswith("short") else 1000
        chats = [chat(text[start : start + 4 * size], size)
                 for text in texts for start in range(0, len(text), 4 * size)]  # fmt: skip
        pq.write_table(pa.table({"messages": chats}), path, row_group_size=1000)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    else:
        opened = gzip.open if kind.endswith("gz") else open
        with opened(path, "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def chat(text: str, size: int) -> list[dict[str, str]]:
    """Split a text into turns of `size` characters."""
    return [
        {
            "role": "assistant" if start // size % 2 else "user",
            "content": text[start : start + size],
        }
        for start in range(0, len(text), size)
    ]


def measured(
    model: str, corpus: str, threads: int, processes: int, unit_tokens: int, messages: str | None
) -> dict[str, float]:
    from spile.core.config import Recipe
    from spile.corpus.tokenize import use_threads
    from spile.dataset.records.ledger import Ledger
    from spile.objects import MemoryObjects
    from spile.plan.job import prepare_documents, prepare_unit
    from spile.plan.resolve import resolve

    use_threads(threads)
    recipe = Recipe(
        model=model, corpus=corpus, taps="embed", messages=messages, unit_tokens=unit_tokens
    )
    job = resolve(recipe, Ledger(MemoryObjects("memory://bench")), "cpu")
    reader = job.reader(processes)
    prepare_unit(job, reader, job.units[0], with_table=False)  # threads are started
    began, cpu, tokens, rust = time.perf_counter(), time.process_time(), 0, 0.0
    for unit in job.units:
        documents = reader.read(unit.spans, unit.first_doc)
        before = time.process_time() - time.thread_time()
        packed = prepare_documents(job.recipe, job.tokenizer, documents, with_table=False).packed
        rust += time.process_time() - time.thread_time() - before
        tokens += packed.num_tokens
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    reader.close()
    spent = os.times()  # of processes that have ended, with their start
    children = spent.children_user + spent.children_system
    return {"tokens": tokens, "seconds": seconds, "cpu": used + children, "python": used - rust}


if __name__ == "__main__":
    main()
