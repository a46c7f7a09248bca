"""Read a cache of latents by delphi's own `LatentDataset`: a process of its own, with stubs.

SPILE_DELPHI names the folder of the unpacked package (eai-delphi 0.1.3), and those of its small
dependencies that are missing here (asyncer, blobfile, orjson, simple-parsing). Engines, encoders
and indexes for search are stubbed: the loader imports them, and reading needs none.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_STUBBED = ("faiss", "sentence_transformers", "vllm", "sparsify", "datasets", "bitsandbytes",
            "nnsight", "openai", "httpx")  # fmt: skip


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    sys.path[:0] = os.environ["SPILE_DELPHI"].split(os.pathsep)
    sys.meta_path.insert(0, _Stubs())
    from delphi.config import ConstructorConfig, SamplerConfig  # noqa: PLC0415
    from delphi.latents.loader import LatentDataset  # noqa: PLC0415

    dataset = LatentDataset(
        raw_dir=sys.argv[1],
        sampler_cfg=SamplerConfig(),
        constructor_cfg=ConstructorConfig(min_examples=1, example_ctx_len=8, n_non_activating=0),
        tokenizer=MagicMock(),
    )
    latents: dict[int, list[list[float]]] = {}
    for found in (found for buffer in dataset.buffers for found in buffer):
        data = found.activation_data
        pairs = zip(data.locations.tolist(), data.activations.tolist(), strict=True)
        latents[found.latent.latent_index] = [
            [row, token, value] for (row, token, _), value in pairs
        ]
    told = {"modules": dataset.modules, "tokens": [*dataset.tokens.shape], "latents": latents}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
