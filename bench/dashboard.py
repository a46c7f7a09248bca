"""SAEDashboard's top activations of the first features of an SAE, to compare with `spile features`.

In an environment with sae-dashboard 0.8.0, sae-lens and transformers:

python bench/dashboard.py --model DIR --sae DIR --layer 4 --tokens tokens.npy --features 128

`tokens.npy` holds token ids [contexts, tokens], which `spile extract --tokens-column` reads from
Parquet as one document each. HF's model stands in for a HookedTransformer; it stops behind the
layer, as SAEDashboard asks. Prints one line of JSON: seconds, and for each feature the context and
the position of its top activations, in order.
"""

import argparse
import contextlib
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sae_dashboard.sae_vis_data import SaeVisConfig
from sae_dashboard.sae_vis_runner import SaeVisRunner
from sae_lens import SAE
from transformers import AutoModelForCausalLM, AutoTokenizer


class Stop(Exception):
    """Ends a forward pass."""


class Hooked(torch.nn.Module):
    """What SAEDashboard asks of a HookedTransformer."""

    def __init__(self, folder: str, layer: int) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.layer, self.hook = layer, f"blocks.{layer}.hook_resid_post"
        self.hook_dict = {self.hook: SimpleNamespace(ctx={})}
        norm = self.model.model.norm.weight.detach()
        self.W_U = self.model.lm_head.weight.detach().T * norm[:, None]
        self.cfg = SimpleNamespace(n_heads=1, device="cpu")

    def run_with_hooks(self, tokens: Any, stop_at_layer: int, fwd_hooks: Any) -> Any:
        blocks, found = self.model.model.layers, {}

        def keep(module: Any, given: Any, out: Any) -> None:
            found["rows"] = out[0] if isinstance(out, tuple) else out

        def stop(module: Any, given: Any) -> None:
            raise Stop

        hooks = [
            blocks[self.layer].register_forward_hook(keep),
            blocks[stop_at_layer].register_forward_pre_hook(stop),
        ]
        with contextlib.suppress(Stop):
            self.model(tokens)
        for each in hooks:
            each.remove()
        for _, call in fwd_hooks:
            call(found["rows"], self.hook_dict[self.hook])
        return found["rows"]

    def to_str_tokens(self, tokens: Any, **options: Any) -> list[str]:
        return [self.tokenizer.decode([each]) for each in np.asarray(tokens).reshape(-1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--sae", "--tokens"):
        parser.add_argument(name, required=True)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--features", type=int, default=128)
    asked = parser.parse_args()
    model = Hooked(asked.model, asked.layer)
    sae = SAE.load_from_disk(asked.sae, device="cpu").float()
    sae.fold_W_dec_norm = lambda: None  # it refuses TopK; decoder rows of the example have length 1
    if not hasattr(type(sae), "hook_z_reshaping_mode"):
        sae.hook_z_reshaping_mode = False
    config = SaeVisConfig(hook_point=model.hook, features=[*range(asked.features)])
    begun = time.perf_counter(), time.process_time()
    made = SaeVisRunner(config).run(sae, model, torch.tensor(np.load(asked.tokens)))
    told = {
        "seconds": time.perf_counter() - begun[0],
        "cpu seconds": time.process_time() - begun[1],
        "top": {
            number: [
                [each.original_index, each.qualifying_token_index]
                for each in made.feature_data_dict[number].sequence_data.seq_group_data[0].seq_data
            ]
            for number in config.features
        },
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
