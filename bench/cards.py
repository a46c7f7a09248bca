"""Which models run on which card, where their blocks are kept, and the predicted tokens a second.

    python bench/cards.py [--models Llama-3.3-70B-Instruct,...] [--seq-len 2048]

It uses published configurations (tests/fixtures/configs) and `spile plan`'s own rules: one tap at
the last layer, bfloat16, rows of full length. The predicted rate is the slower of computing, at the
card's sustained products, and copying, at the rate of its link. Only the H200's figures were
measured; the others are published, and products are assumed to reach 66% of them, as on the H200.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from spile.core.config import Runtime
from spile.models.config.hf_config import read_config
from spile.models.layout import ONE_DEVICE
from spile.models.taps import parse_taps
from spile.plan.chips import CHIPS
from spile.plan.residency import Machine, choose_residency
from spile.plan.roofline import MEMORY_SHARE, Workload, sweet_spot

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
MODELS = (
    "Llama-3.1-8B", "gemma-2-27b", "Llama-3.3-70B-Instruct", "Mixtral-8x22B-v0.1",
    "Qwen3-235B-A22B",
)  # fmt: skip
# FLOP/s in bfloat16 (dense), bytes a second into the device
CARDS = {
    "24 GB (RTX 4090)": (24e9, 165e12, 25e9),
    "48 GB (L40S)": (48e9, 362e12, 25e9),
    "80 GB (H100)": (80e9, CHIPS["h100"].peak, CHIPS["h100"].host_link),
    "141 GB (H200)": (141e9, CHIPS["h200"].peak, CHIPS["h200"].host_link),
}
HOSTS = {"24 GB (RTX 4090)": (64, 256), "48 GB (L40S)": (128, 512)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seq-len", type=int, default=2048)
    options = parser.parse_args()
    print("| model | card | host memory | blocks on the device, in host memory, on disk | tok/s |")
    print("|---|---|---|---|---|")
    for name in options.models.split(","):
        _, arch = read_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)
        taps = parse_taps(f"resid_post:{arch.num_layers - 1}", arch)

        def step(rows: int, arch: object = arch, taps: object = taps) -> Workload:
            return Workload(
                arch=arch, taps=taps, cuts=ONE_DEVICE, seq_len=options.seq_len, rows=rows,
                compute_dtype="bfloat16", store_dtype="bfloat16", whole=True,
            )  # type: ignore[arg-type]  # fmt: skip

        enough = max(1, sweet_spot(arch, "gpu") // options.seq_len)
        for card, (memory, peak, link) in CARDS.items():
            fitting = enough
            while fitting > 1 and step(fitting).device_bytes > MEMORY_SHARE * memory:
                fitting //= 2
            chip = replace(CHIPS["h200"], peak=peak, host_link=link, memory=int(memory))
            told: dict[str, list[str]] = {}
            for host in HOSTS.get(card, (128, 512)):
                found = choose_residency(
                    step, (enough, fitting), Runtime(), Machine("gpu", int(memory), chip),
                    most_rows=4_000_000 // options.seq_len, host_memory=host * 10**9,
                )  # fmt: skip
                one = step(1)
                computing = one.flops / chip.sustained * found.sweep_rows
                copying = sum(
                    found.block_bytes / (link if where == "host" else 2e9)
                    for where in found.kept if where != "resident"
                )  # fmt: skip
                rate = found.sweep_rows * options.seq_len / max(computing, copying)
                counts = ", ".join(str(found.count(k)) for k in ("resident", "host", "disk"))
                told.setdefault(f"{counts} | {rate:,.0f}", []).append(f"{host} GB")
            for line, hosts in told.items():
                print(f"| {name} | {card} | {' or '.join(hosts)} | {line} |")


if __name__ == "__main__":
    main()
