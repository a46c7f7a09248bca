"""Reading features: windows stay in their context, and what has none is told."""

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.features.run import FeatureRequest, make_features
from support import stored


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path = tmp_path_factory.mktemp("features") / "out"
    made = stored.build(path, taps=stored.LATENTS, **stored.ENCODED)
    make_features(str(path), FeatureRequest(logits=0, examples=4))
    return made


def test_windows_stay_in_the_context_of_their_row(made: stored.Stored) -> None:
    features = spile.open(made.path).features("mlp_out.1")
    ids, values = made.rows["mlp_out_latent_ids.1"], made.rows["mlp_out_latents.1"]
    index = made.index
    for latent in range(0, 40, 7):
        rows = features.top(latent).rows
        found = features.windows(latent, rows, 5, 3)
        assert found.tokens.shape == (len(rows), 9)
        for at, row in enumerate(rows.tolist()):
            for place, other in enumerate(range(row - 5, row + 4)):
                inside = 0 <= other < len(index)
                same = inside and all(
                    index[name][other] - index["pos"][other] * (name == "offset")
                    == index[name][row] - index["pos"][row] * (name == "offset")
                    for name in ("doc", "offset")
                )
                assert found.there[at, place] == same
                if same:
                    assert found.tokens[at, place] == index["token_id"][other]
                    wanted = values[other][ids[other] == latent].sum()
                    assert found.values[at, place] == wanted
                else:
                    assert found.tokens[at, place] == found.values[at, place] == 0


def test_latents_are_found_by_token(made: stored.Stored) -> None:
    features = spile.open(made.path).features("mlp_out.1")
    token = int(made.index["token_id"][7])
    ids, values = made.rows["mlp_out_latent_ids.1"], made.rows["mlp_out_latents.1"]
    found, shares = features.with_token([token])
    at = made.index["token_id"] == token
    wanted = {*ids[at][values[at] > 0].tolist()}
    assert {*found.tolist()} == wanted
    assert (np.diff(shares) <= 0).all()
    for latent, share in zip(found.tolist(), shares.tolist(), strict=True):
        active = ((ids == latent) & (values > 0)).any(axis=1)
        assert share == pytest.approx((active & at).sum() / active.sum())
    assert features.with_token([10**6])[0].tolist() == []


def test_a_set_has_several_names(made: stored.Stored) -> None:
    ds = spile.open(made.path)
    names = ("mlp_out.1", "mlp_out_latents.1", "mlp_out_latent_ids.1", "mlp_out.1-1")
    assert {ds.features(name).name for name in names} == {"mlp_out.1-1"}
    assert repr(ds.features("mlp_out.1")).startswith("<spile features: 40 latents of mlp_out.1, ")
    with pytest.raises(ConfigError, match="no features of 'resid_post.0' in .* mlp_out.1-1:"):
        ds.features("resid_post.0")
    with pytest.raises(ConfigError, match="mlp_out.1 has latents 0 to 39, not 40"):
        ds.features("mlp_out.1").top(40)
    assert spile.open(made.path, taps=["resid_post.0"]).feature_sets == []
