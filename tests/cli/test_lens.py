"""The verb `lens`: what it refuses, and in which words."""

from pathlib import Path

from chaos.harness import check_refused, run


def test_what_cannot_be_fitted_is_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    common = ("lens", "fit", "--model", model, "--corpus", corpus, "--out", tmp_path / "lens")
    refused = [
        ((), "--kind is missing"),
        (("--kind", "tuned", "--taps", "embed"), "chooses --taps: leave it out"),
        (("--kind", "tuned", "--layers", "2"), "the last layer is the target"),
        (("--kind", "tuned", "--layers", "9"), "--layers 'resid_post:9': layer 9 does not exist"),
        (("--kind", "tuned", "--ridge", "2"), "--ridge must be at least 0"),
        (("--kind", "jacobian", "--ridge", "0.1"), "--refine and --ridge are for --kind tuned"),
        (("--kind", "tuned", "--learning-rate", "0.1"), "--learning-rate 0.1: give a positive"),
        (("--kind", "tuned", "--refine", "5", "--learning-rate", "nan"), "--learning-rate nan"),
        (("--kind", "tuned", "--weights", "disk"), "leave --weights out, or use more"),
    ]
    for more, why in refused:
        check_refused(run(*common, *more), 2, why)
