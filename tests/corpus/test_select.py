"""Which documents are chosen: by hash, by length."""

import pytest

from spile.corpus.select import Selection


def test_a_fraction_is_that_share_and_the_same_every_time() -> None:
    texts = [b"document %d" % number for number in range(4000)]
    for share in (0.1, 0.5, 1.0):
        chosen = Selection(fraction=share)
        kept = [text for text in texts if not chosen.refuses_content(text)]
        assert len(kept) == pytest.approx(4000 * share, rel=0.15)
        assert kept == [text for text in texts if not chosen.refuses_content(text)]


def test_smaller_fractions_lie_within_larger_ones() -> None:
    texts = [b"document %d" % number for number in range(2000)]
    kept = [
        {text for text in texts if not Selection(fraction=share).refuses_content(text)}
        for share in (0.1, 0.3, 0.9)
    ]
    assert kept[0] < kept[1] < kept[2]


def test_holdout_and_rest_are_the_whole_and_share_nothing() -> None:
    texts = [b"document %d" % number for number in range(3000)]
    parts = {
        part: {t for t in texts if not Selection(holdout=0.1, part=part).refuses_content(t)}
        for part in ("rest", "holdout")
    }
    assert parts["rest"] | parts["holdout"] == {*texts}
    assert not parts["rest"] & parts["holdout"]
    assert len(parts["holdout"]) == pytest.approx(300, rel=0.25)


def test_a_fraction_of_the_held_out_is_no_less_than_its_share() -> None:
    """The two hashes are independent of each other."""
    texts = [b"document %d" % number for number in range(6000)]
    both = Selection(fraction=0.5, holdout=0.5, part="holdout")
    assert sum(not both.refuses_content(t) for t in texts) == pytest.approx(1500, rel=0.15)


def test_lengths_are_bounded_and_reasons_said() -> None:
    bounds = Selection(min_tokens=3, max_doc_tokens=5)
    assert [bounds.refuses_length(n) for n in (0, 2, 3, 5, 6)] == [
        "no tokens", "under --min-tokens", "", "", "over --max-doc-tokens",
    ]  # fmt: skip
