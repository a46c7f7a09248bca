"""Features as texts: the tokens around examples, and what has no features."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.interop.export import export
from spile.interop.export.export_source import ExportSource
from spile.interop.export.feature_source import only_layers, shown_features
from support import web_page


def test_examples_are_tokens_around_the_rows(counted: Path) -> None:
    dataset = spile.open(counted)
    features = dataset.features("resid_post.1")
    source = ExportSource(dataset, tuple(dataset.taps), {}, 1)
    every = [*shown_features(source, features, 3, 2)]
    assert [each.index for each in every] == [*range(40)]
    loud = every[web_page.LOUD_LATENT]
    assert loud.largest == features.largest[web_page.LOUD_LATENT]
    for example, value in zip(loud.top.examples, features.top(loud.index).values, strict=True):
        assert example.tokens[example.at] == web_page.LOUD_TOKEN
        assert example.values[example.at] == value and len(example.tokens) <= 6
    heights, middles = loud.bars
    assert sum(heights) == pytest.approx(loud.count) and len(middles) == 40
    silent = every[web_page.SILENT_LATENT]
    assert (silent.count, silent.bands, silent.top.examples, silent.bars) == (0, [], [], ([], []))
    assert not np.isnan(silent.mean)


def test_two_sets_of_one_layer_must_be_chosen(counted: Path) -> None:
    features = spile.open(counted).features("resid_post.1")
    assert only_layers([features]) == {1: features}
    with pytest.raises(ConfigError, match="are both of layer 1; choose with --taps"):
        only_layers([features, features])


@pytest.mark.parametrize("to", ["neuronpedia", "circuit-tracer", "feature-table"])
def test_a_dataset_without_features_is_refused(to: str, counted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no features of the chosen taps were counted; there are"):
        export(str(counted), tmp_path / "dest", to=to, taps="mlp_out.1")
