"""What a lens predicts, by HF's own norm and head: the ground truth of `--lens`."""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spile.check.next_token import next_token
from spile.core.tap_order import OF_A_LENS
from spile.models.config.arch import Arch
from spile.models.files.lenses import Lens

LENS_LOGITS = "lens_logits"  # whose values ids are compared by; no dataset holds them
_OF_HEAD = {
    "lens_logsumexp": "logsumexp",
    "lens_top_ids": "top_token_ids",
    "lens_top_logprobs": "top_logprobs",
}


@dataclass(frozen=True)
class LensRows:
    """Computes the taps of a lens from the streams of a HF model."""

    lens: Lens
    arch: Arch

    def layers(self, wanted: Callable[[str], bool]) -> list[int]:
        """Return the layers at which a prediction is wanted."""
        sites = (*OF_A_LENS, LENS_LOGITS)
        return [n for n in self.lens.layers if any(wanted(f"{site}.{n}") for site in sites)]

    def of(
        self,
        layer: int,
        stream: np.ndarray,
        head: Callable[[Tensor], Tensor],
        like: Tensor,
        tops: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Return every tap of a layer.

        Args:
            head: the model's norm and head.
            like: one of the model's arrays, for its dtype and device.
            tops: how many of the largest to keep, by the head's site.
        """
        arrays = {name: torch.tensor(a).to(like) for name, a in self._loaded[layer].items()}
        x = torch.from_numpy(stream).to(like)
        mapped = x @ arrays["matrix"].T
        mapped = mapped + arrays["bias"] if "bias" in arrays else mapped
        logits = self._capped(head(x + mapped if self.lens.adds else mapped))
        ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        found = next_token(logits, ids, tops)
        own = {f"{site}.{layer}": found[of_head] for site, of_head in _OF_HEAD.items()}
        return own | {f"{LENS_LOGITS}.{layer}": logits}

    def _capped(self, logits: Tensor) -> Tensor:
        logits = logits * self.arch.logit_scale
        cap = self.arch.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @cached_property
    def _loaded(self) -> dict[int, dict[str, Any]]:
        return {layer: self.lens.load(layer) for layer in self.lens.layers}
