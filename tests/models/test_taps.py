"""The grammar of taps: what each spelling means, in which order, and what is said when it fails."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tiny
from spile.errors import ConfigError
from spile.models.families import read_config
from spile.models.taps import SITES, Tap, parse_taps

_, ARCH = read_config({**tiny.CONFIG, "num_hidden_layers": 28}, "test")


def names(text: str) -> list[str]:
    return [tap.name for tap in parse_taps(text, ARCH)]


def layers(text: str) -> list[int | None]:
    return [tap.layer for tap in parse_taps(f"resid_post:{text}", ARCH)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5", [5]),
        ("0", [0]),
        ("27", [27]),
        ("20-27", list(range(20, 28))),
        ("3-3", [3]),
        ("all", list(range(28))),
        ("-1", [27]),
        ("-28", [0]),
        ("-4--2", [24, 25, 26]),
        ("25--1", [25, 26, 27]),
        ("-28-1", [0, 1]),
        ("0-27/4", [0, 4, 8, 12, 16, 20, 24]),
        ("1-10/3", [1, 4, 7, 10]),
        ("all/9", [0, 9, 18, 27]),
        ("0-3/99", [0]),
        ("1+5+3", [1, 3, 5]),
        ("0-2+2-4+-1", [0, 1, 2, 3, 4, 27]),
        ("4+4+4-4", [4]),
        (" 1 + 2 ", [1, 2]),
    ],
)
def test_layers_are_numbers_ranges_all_negatives_steps_and_sums(
    text: str, wanted: list[int]
) -> None:
    assert layers(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("resid_post.20", "resid_post.20"),
        ("resid_post.-1", "resid_post.27"),
        ("blocks.20.hook_resid_post", "resid_post.20"),
        ("blocks.0.hook_resid_pre", "resid_pre.0"),
        ("blocks.3.hook_resid_mid", "resid_mid.3"),
        ("blocks.3.hook_attn_out", "attn_out.3"),
        ("blocks.3.hook_mlp_out", "mlp_out.3"),
        ("hook_embed", "embed"),
        ("ln_final.hook_normalized", "final_norm"),
        ("embed", "embed"),
        ("logits", "logits"),
    ],
)
def test_canonical_and_transformer_lens_names_are_taps(text: str, wanted: str) -> None:
    assert names(text) == [wanted]


@pytest.mark.parametrize("site", SITES)
def test_every_site_has_a_lens_name_that_comes_back(site: str) -> None:
    lens = SITES[site].lens.format(7)
    assert names(lens) == [f"{site}.7" if SITES[site].layered else site]


def test_taps_come_in_the_order_in_which_the_model_meets_them() -> None:
    text = "logits,final_norm,resid_post:27+0,mlp_out:0,resid_mid:0,attn_out:0+27,resid_pre:0+1"
    assert names(f"{text},embed") == [
        "embed",
        "resid_pre.0",
        "attn_out.0",
        "resid_mid.0",
        "mlp_out.0",
        "resid_post.0",
        "resid_pre.1",
        "attn_out.27",
        "resid_post.27",
        "final_norm",
        "logits",
    ]


def test_spelling_and_order_do_not_change_the_taps() -> None:
    same = ["resid_post:1-2,embed", "embed, resid_post:2+1 ,", "resid_post.2,hook_embed,"
            "blocks.1.hook_resid_post,resid_post:1-2,embed"]  # fmt: skip
    assert {parse_taps(text, ARCH) for text in same} == {parse_taps(same[0], ARCH)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resid_pots:3", ["'resid_pots'", "did you mean resid_post?", "known: embed"]),
        ("mlp_outs.3", ["'mlp_outs'", "did you mean mlp_out?"]),
        ("zzz", ["'zzz'", "known: embed, resid_pre"]),
        ("blocks.3.hook_zzz", ["blocks.3.hook_zzz"]),
        ("embed:0", ["embed has no layers", "write just embed"]),
        ("logits.3", ["logits has no layers"]),
        ("resid_post", ["say which layers", "resid_post:0-3"]),
        ("resid_post:", ["say which layers"]),
        ("resid_post:28", ["layer 28 does not exist", "28 layers, 0 to 27"]),
        ("resid_post:-29", ["layer -29 does not exist"]),
        ("resid_post:20-28", ["layer 28 does not exist"]),
        ("blocks.28.hook_resid_post", ["layer 28 does not exist"]),
        ("resid_post:5-2", ["'5-2' is an empty range"]),
        ("resid_post:-1-0", ["'-1-0' is an empty range"]),
        ("resid_post:0-5/0", ["'0-5/0' is an empty range"]),
        ("resid_post:1.5", ["'1.5' is not a layer", "0-27/4"]),
        ("resid_post:one", ["'one' is not a layer"]),
        ("resid_post:1++2", ["'' is not a layer"]),
        ("resid_post:1:2", ["'1:2' is not a layer"]),
        ("resid_post:0-27/-1", ["is not a layer"]),
        ("", ["names no tap"]),
        (" , ,", ["names no tap"]),
    ],
)
def test_a_tap_that_cannot_be_is_refused_with_a_hint(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_taps(text, ARCH)
    message = str(caught.value)
    assert message.startswith("--taps")
    assert "\n" not in message
    assert all(part in message for part in said), message


PARTS = st.sampled_from([*SITES, "blocks.", ".hook_resid_post", ":", "-", "+", "/", ",", ".",
                         "all", " ", "0", "3", "27", "28", "99", "x", "\n", "²", "٣"])  # fmt: skip


@given(st.lists(PARTS, max_size=8).map("".join))
@example("resid_post:" + "9" * 5000)
def test_any_text_gives_taps_of_this_model_or_a_config_error(text: str) -> None:
    try:
        taps = parse_taps(text, ARCH)
    except ConfigError:
        return
    assert taps
    for tap in taps:
        assert tap.site in SITES
        assert (tap.layer in range(28)) is SITES[tap.site].layered
        assert parse_taps(tap.name, ARCH) == (tap,)


@pytest.mark.parametrize(
    ("tap", "needed"),
    [
        ("embed", 0),
        ("resid_pre.0", 0),
        ("resid_pre.5", 5),
        ("attn_out.5", 6),
        ("resid_mid.5", 6),
        ("mlp_out.5", 6),
        ("resid_post.5", 6),
        ("resid_post.27", 28),
        ("final_norm", 28),
        ("logits", 28),
    ],
)
def test_no_more_layers_are_needed_than_lie_below_the_tap(tap: str, needed: int) -> None:
    (met,) = parse_taps(tap, ARCH)
    assert met.layers_needed(ARCH) == needed


def test_a_tap_is_as_wide_as_the_stream_and_logits_as_the_vocabulary() -> None:
    widths = {site: Tap(site, 0 if SITES[site].layered else None).width(ARCH) for site in SITES}
    assert widths.pop("logits") == tiny.VOCAB
    assert set(widths.values()) == {32}
