"""The order of taps: by layer, and in a layer as a model computes them."""

import random

from spile.core.tap_order import AFTER_BLOCKS, BEFORE_BLOCKS, IN_A_BLOCK, OF_A_LENS, sorted_taps
from spile.models.sites import AFTER, BEFORE, BLOCK, LENSES, SITES


def test_sites_stand_in_the_order_of_the_table() -> None:
    def names(stage: str) -> tuple[str, ...]:
        return tuple(site.name for site in SITES.values() if site.stage == stage)

    assert tuple(map(names, (BEFORE, BLOCK, AFTER))) == (BEFORE_BLOCKS, IN_A_BLOCK, AFTER_BLOCKS)
    assert (*BEFORE_BLOCKS, *IN_A_BLOCK, *AFTER_BLOCKS) == (*SITES,)
    assert (*LENSES,) == OF_A_LENS


def test_taps_are_sorted_by_layer_and_not_by_name() -> None:
    wanted = [
        "embed",
        "resid_pre.0",
        "z.2.h1",
        "z.2.h10",
        "attn_out.9",
        "mlp_out_latents.9",
        "mlp_out_latent_ids.9",
        "lens_top_ids.9",
        "unheard_of.9",
        "resid_post.10",
        "final_norm",
        "logprob",
        "resid_post.9 or so",
    ]
    assert sorted_taps(random.Random(0).sample(wanted, len(wanted))) == wanted
