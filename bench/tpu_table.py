"""For models and topologies: the best mesh, whether it fits, and the most tokens a second.

    python bench/tpu_table.py [--on libtpu|cpu] [--models 0.5B,7B] [--topologies v5e-8,v5e-64]
                              [--taps resid_post:-1] [--search]

It calls the functions of `spile compile`: the mesh is that of `--mesh auto`, or with --search the
best of all worth trying (minutes for each cell). With `--on cpu` it runs anywhere, and memory is an
estimate. It prints a Markdown table.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from spile.compile.step import Compiled, Question, compile_step, search
from spile.compile.targets import find_target, virtual_cpus
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError
from spile.models.config.arch import Arch
from spile.models.config.hf_config import read_config
from spile.plan.chips import parse_topology

CONFIGS = Path(__file__).parent.parent / "tests/fixtures/configs"


def _qwen(width: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "max_window_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
    }  # fmt: skip


# A published config, and the fields in which the model differs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-0.5B": ("Qwen2.5-0.5B", {}),
    "Qwen2.5-7B": ("Qwen2.5-7B", {}),
    "Qwen2.5-14B": ("Qwen2.5-7B", _qwen(5120, 13824, 48, 40)),
    "Qwen2.5-32B": ("Qwen2.5-7B", _qwen(5120, 27648, 64, 40)),
    "Qwen2.5-72B": ("Qwen2.5-7B", _qwen(8192, 29568, 80, 64)),
    "Llama-3.1-8B": ("Llama-3.1-8B", {}),
    "Llama-3.1-70B": ("Llama-3.3-70B-Instruct", {}),  # the same shapes
    "Qwen3-30B-A3B": ("Qwen3-30B-A3B", {}),
    "Mixtral-8x7B": ("Mixtral-8x7B-v0.1", {}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gemma-2-9b": ("gemma-2-9b", {}),
}
TOPOLOGIES = (
    "v4-8", "v4-32", "v5e-4", "v5e-8", "v5e-16", "v5e-64", "v5e-256", "v6e-8", "v6e-64", "v6e-256",
    "v5p-8", "v5p-64",
)  # fmt: skip


def arch_of(name: str) -> Arch:
    file, changes = MODELS[name]
    return read_config({**json.loads((CONFIGS / f"{file}.json").read_text()), **changes}, name)[1]


def best(question: Question, options: argparse.Namespace) -> Compiled | None:
    """None: the weights alone are too large for every mesh."""
    layout = question.layout()
    if question.workload(layout).weights > (question.target.memory or 0):
        return None
    if options.search:
        try:
            return search(question)[0]
        except ConfigError:
            pass  # by estimate no mesh fits; let the compiler decide
    return compile_step(question, layout)


def cell(found: Compiled | None) -> str:
    if found is None:
        return "no"
    rate = f"{found.tokens_per_second:,.0f}" if found.tokens_per_second else "?"
    fits = "" if found.fits else "does not fit: "
    limit = found.seconds.limit.replace("_", " ") if found.seconds else ""
    beside = "" if limit == "compute" else f" ({limit})"
    return f"{fits}{found.mesh}: {rate}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--on", choices=("libtpu", "cpu"))
    parser.add_argument("--models", default=",".join(MODELS), help="names, or parts of them")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--taps", default="resid_post:-1")
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    wanted = options.models.split(",")
    models = [name for name in MODELS if any(part in name for part in wanted)]
    names = options.topologies.split(",")
    if options.on == "cpu":  # once for all: jax starts with a number of them
        virtual_cpus(max(parse_topology(name).chips for name in names))
    targets = {name: find_target(name, options.on) for name in names}
    begin = time.perf_counter()
    print(f"| mesh: tok/s at most | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for model in models:
        cells: list[str] = []
        for name, target in targets.items():
            recipe = Recipe(taps=options.taps)
            cells.append(cell(best(Question(arch_of(model), recipe, Runtime(), target), options)))
            print(f"{model} {name}: {cells[-1]}", file=sys.stderr)
        print(f"| {model} | {' | '.join(cells)} |", flush=True)
    minutes = (time.perf_counter() - begin) / 60
    print(f"\n{', '.join(sorted({t.on for t in targets.values()}))}, {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
