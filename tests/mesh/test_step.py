"""A step on a mesh gives the rows and statistics of a step on one device."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from spile.core.config import Recipe
from spile.core.pool import COVARIANCE, JACOBIAN
from spile.dataset.codec.statistics import TapStats
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward.splice import load_changes
from spile.models.layout import Layout
from spile.models.taps import Tap, parse_taps
from spile.plan.encoders import find_encoders
from spile.plan.splices import find_splices
from spile.run.step.devices import StepDevices
from spile.run.step.step import Step
from support import families, saes, tiny
from support.marks import some
from support.meshes import make_batch, make_step, pooled, scored, shards_of

CUT_THREE_WAYS, SQUARE = Layout(2, 2, 2), Layout(2, 1, 2)
LAYOUTS = [Layout(8), Layout(1, 1, 8), Layout(1, 8), Layout(4, 1, 2), SQUARE, CUT_THREE_WAYS]
TAPS = (
    "embed,q:1,k:0,attn_pattern:0,z:all,mlp_hidden:1,resid_post:all,final_norm,logits,entropy,"
    "top_logits,attn_top:1.h0+h3,attn_summary:0+1.h2"
)


def together(stats: list[TapStats], width: int) -> TapStats:
    total = TapStats.empty(width)
    for each in stats:
        total.merge(each)
    return total


@pytest.mark.parametrize(
    ("layout", "keep"),
    some(
        [
            *((each, False) for each in LAYOUTS),
            *((each, True) for each in (Layout(8), Layout(1, 1, 3), CUT_THREE_WAYS)),
        ],
        (CUT_THREE_WAYS, True),
    ),
    ids=str,
)
def test_rows_and_statistics_are_those_of_one_device(
    model: Path, layout: Layout, keep: bool
) -> None:
    batch = make_batch(24, keep=keep)
    one, mesh = (make_step(model, TAPS, each)(batch) for each in (None, layout))
    assert mesh.tokens == one.tokens
    for tap in one.batches[0].rows:
        wanted, found = one.rows_of(tap), mesh.rows_of(tap)
        assert found.shape == wanted.shape and len(found) == batch.counts.sum()
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))
        if wanted.dtype.kind == "i":  # ids of the likeliest tokens, and keys that heads weigh most
            assert np.array_equal(found, wanted)
        width = int(np.prod(wanted.shape[1:]))
        exact, cut = (together(each.stats_of(tap), width) for each in (one, mesh))
        assert (cut.count, cut.nonfinite) == (exact.count, 0)
        np.testing.assert_allclose(cut.mean, exact.mean, atol=1e-5)
        np.testing.assert_allclose(cut.variance, exact.variance, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "keep"),
    [(SQUARE, True), (SQUARE, False), (CUT_THREE_WAYS, True), (Layout(1, 8), True)],
    ids=str,
)  # fmt: skip
def test_gradients_are_those_of_one_device(model: Path, layout: Layout, keep: bool) -> None:
    batch = make_batch(24, keep=keep)
    taps = "embed_grad,resid_pre_grad:0,z_grad:all,mlp_hidden_grad:1,resid_post_grad:all,z_attr:1"
    one, mesh = (make_step(model, taps, each)(batch) for each in (None, layout))
    assert len(one.batches[0].rows) == 10
    for tap in one.batches[0].rows:
        wanted, found = one.rows_of(tap), mesh.rows_of(tap)
        assert found.shape == wanted.shape and len(found) == batch.counts.sum()
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.parametrize("layout", [SQUARE, Layout(1, 1, 3), CUT_THREE_WAYS], ids=str)
def test_gaps_of_an_engine_are_those_of_one_device(model: Path, layout: Layout) -> None:
    batch = scored(make_batch(24), 5)
    everything = make_step(model, "logprob", None)(make_batch(24))
    assert everything.gaps[0].size == 0
    one, mesh = (
        make_step(model, "resid_post:0", each, compares=True)(batch) for each in (None, layout)
    )
    docs, gaps = one.gaps
    row, place = np.nonzero(batch.scored_docs)
    assert len(docs) == len(row) and np.array_equal(docs, batch.scored_docs[row, place] - 1)
    ends = np.cumsum(batch.counts) - batch.counts
    own = everything.rows_of("logprob")[ends[row] + batch.scored[row, place]]
    np.testing.assert_allclose(gaps, np.abs(own + 1.0), atol=1e-5)
    assert np.array_equal(mesh.gaps[0], docs)
    np.testing.assert_allclose(mesh.gaps[1], gaps, atol=1e-5)


@pytest.mark.parametrize("gathers", some([False, True], True))
@pytest.mark.parametrize(
    ("layout", "keep"),
    some(
        [(SQUARE, False), (SQUARE, True), (Layout(1, 1, 3), True), (Layout(8), True)],
        (SQUARE, True),
    ),
    ids=str,
)
def test_pooled_parts_are_numpys_on_one_device_and_on_a_mesh(
    model: Path, layout: Layout, keep: bool, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gathers`: as in several processes, every device gets the parts of all."""
    if gathers:
        monkeypatch.setattr(StepDevices, "gathers", lambda place, pool: place.shards is not None)
    taps, plain = "embed,q:1,z:all,resid_post:all,logprob", make_batch(24, keep=keep)
    batch, whole = pooled(plain, 4), make_step(model, taps, None)(plain)
    assert batch.slots is not None and batch.sizes is not None
    used = np.count_nonzero(batch.sizes, axis=1)
    spans = np.concatenate([
        row_spans + slots[:count]
        for row_spans, slots, count in zip(np.cumsum(used) - used - 1, batch.slots, batch.counts,
                                           strict=True)
    ])  # fmt: skip
    for by, reduce in (("mean", np.sum), ("max", np.max)):
        # (Tests share the programs of equal settings. Parts are float32, whatever is stored.)
        stored = "bfloat16" if gathers else "float32"
        one, mesh = (
            make_step(model, taps, each, stored, pool=by)(batch) for each in (None, layout)
        )
        assert mesh.num_rows == one.num_rows == used.sum()
        for tap in one.batches[0].rows:
            rows = whole.rows_of(tap).astype(np.float64)
            wanted = np.stack([reduce(rows[spans == span], axis=0) for span in range(used.sum())])
            close = dict[str, float](rtol=0, atol=2e-5 * max(1, np.abs(wanted).max()))
            np.testing.assert_allclose(one.rows_of(tap), wanted, **close)
            np.testing.assert_allclose(mesh.rows_of(tap), wanted, **close)
            assert not mesh.nonfinite_of(tap).any()


@pytest.mark.parametrize("gathers", some([False, True], False))
@pytest.mark.parametrize("layout", some([None, SQUARE, Layout(1, 1, 3)], SQUARE), ids=str)
def test_products_of_labels_are_numpys_on_one_device_and_on_a_mesh(
    model: Path, layout: Layout | None, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathers:
        monkeypatch.setattr(StepDevices, "gathers", lambda place, pool: place.shards is not None)
    taps, plain = "embed,z:1.h1,resid_post:1,logprob", make_batch(24, keep=True)
    batch, whole = pooled(plain, 4, labels=3), make_step(model, taps, None)(plain)
    stored = "bfloat16" if gathers else "float32"  # (as above)
    output = make_step(model, taps, layout, stored, pool=COVARIANCE)(batch)
    assert batch.slots is not None and batch.labels is not None
    said = np.concatenate([
        [np.flatnonzero(row == slot)[0] for slot in slots[:count]]
        for row, slots, count in zip(batch.labels, batch.slots, batch.counts, strict=True) if count
    ])  # fmt: skip
    for tap in output.batches[0].rows:
        rows = whole.rows_of(tap).astype(np.float64).reshape(len(said), -1)
        products = output.batches[0].products_of(tap)
        assert len(products) == (1 if gathers or layout is None else layout.size)
        for label in range(3):
            own = rows[said == label] - rows[said == label].mean(axis=0)
            wanted = own.T @ own
            found = sum(each[label].astype(np.float64) for each in products)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(8), CUT_THREE_WAYS], ids=str)
def test_latents_are_those_of_one_device(model: Path, tmp_path: Path, layout: Layout) -> None:
    sae = open_sae(str(saes.write_sae(tmp_path)), decodes=True)
    encoder = SparseEncoder.of(sae, 7, error_of="resid_post")
    encoders = {"resid_post.1": (encoder, load_arrays(encoder.sae)[0])}
    batch = make_batch(24, keep=True)
    one, mesh = (
        make_step(model, "resid_post:1,mlp_out:0", each, encoders=encoders)(batch)
        for each in (None, layout)
    )
    stored = ("resid_post_latents.1", "resid_post_latent_ids.1", "resid_post_error.1")
    names = {*stored, "mlp_out.0"}
    assert {*mesh.batches[0].rows} == {*one.batches[0].rows} == names
    for name in sorted(names):
        np.testing.assert_allclose(mesh.rows_of(name), one.rows_of(name), atol=1e-4)
    counts = [
        sum(s.truncated for s in each.stats_of("resid_post_latents.1")) for each in (one, mesh)
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(8), CUT_THREE_WAYS], ids=str)
def test_errors_across_layers_are_those_of_one_device(
    model: Path, tmp_path: Path, layout: Layout
) -> None:
    folder = saes.write_cross_layer(tmp_path, range(2))
    arch, taps = open_checkpoint(str(model)).arch, "resid_mid:0-1,mlp_out:1"
    recipe = Recipe(encode=str(folder), latents=7, encode_error=True)
    encoders = find_encoders(recipe, parse_taps(taps, arch), arch)
    loaded = {tap: (each, load_arrays(each.sae)[0]) for tap, each in encoders.items()}
    batch = make_batch(24, keep=True)
    one, mesh = (make_step(model, taps, each, encoders=loaded)(batch) for each in (None, layout))
    assert [name for name in one.batches[0].rows if "error" in name] == ["resid_mid_error.1"]
    for name in one.batches[0].rows:
        np.testing.assert_allclose(mesh.rows_of(name), one.rows_of(name), atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_changes_are_those_of_one_device(model: Path, tmp_path: Path, layout: Layout) -> None:
    """In the scan and behind it, with heads cut over devices, and with an autoencoder on each."""
    np.save(tmp_path / "two.npy", np.random.default_rng(0).standard_normal((2, 32)))
    np.save(tmp_path / "head.npy", np.ones(8))
    splice = (
        f"ablate:resid_post:0-1={tmp_path}/two.npy,steer:z:1.h3={tmp_path}/head.npy*2,zero:q:0.h1,"
        f"replace-with-sae:mlp_in.0={saes.write_sae(tmp_path / 'sae')},zero:mlp_hidden:2,"
        f"replace-with-sae:mlp_in.1={saes.write_transcoders(tmp_path / 'all', range(2))}"
    )
    checkpoint, batch = open_checkpoint(str(model)), make_batch(24)
    changes = find_splices(splice, parse_taps("logits", checkpoint.arch), checkpoint.arch)
    found = [
        make_step(model, "z:1,resid_post:all,logits", each, splices=made)(batch)
        for each, made in (
            (None, {}),
            (None, load_changes(changes, "float32", None)[0]),
            (layout, load_changes(changes, "float32", shards_of(checkpoint, layout))[0]),
        )
    ]
    for tap in found[0].batches[0].rows:
        clean, one, mesh = (each.rows_of(tap) for each in found)
        np.testing.assert_allclose(mesh, one, atol=1e-5 * max(1, np.abs(one).max()))
        assert np.abs(one - clean).max() > 0.1


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
KINDS = {
    "all heads": EIGHT_HEADS,
    "few keys": {**EIGHT_HEADS, "num_key_value_heads": 2},
    "odd heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    "odd inner width": {**EIGHT_HEADS, "intermediate_size": 50},
}
MORE_KINDS = ("all heads", "few keys", "odd inner width")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.full) for k in ("odd heads", *MORE_KINDS)],
)
def test_what_cannot_be_cut_is_whole_on_every_device(kind: str, tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "m", **KINDS[kind])
    batch = make_batch(8)
    one, mesh = (
        make_step(directory, "resid_post:all,z:0", each)(batch) for each in (None, Layout(2, 1, 4))
    )
    for tap in one.batches[0].rows:
        np.testing.assert_allclose(mesh.rows_of(tap), one.rows_of(tap), atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("store_dtype", "tap"),
    [("float8_e4m3", "embed"), ("float8_e4m3", "resid_post.1"), ("int8", "resid_post.1")],
)
def test_eight_bits_are_those_of_one_device(model: Path, store_dtype: str, tap: str) -> None:
    scales = {tap: np.full(32, 0.05, np.float32)} if store_dtype == "int8" else None
    batch = make_batch(8)
    one, mesh = (
        make_step(model, tap, layout, store_dtype, scales=scales)(batch)
        for layout in (None, Layout(2, 2, 2))
    )
    pieces = [list(each.pieces_of(tap)) for each in (one, mesh)]
    rows = [np.concatenate([r for r, _ in each]).astype(np.float32) for each in pieces]
    apart = np.abs(rows[0] - rows[1])
    assert (apart > 0).mean() < 0.01, "rounding may fall either way, rarely"
    if store_dtype == "float8_e4m3":
        by_row = [np.concatenate([s for _, s in each if s is not None]) for each in pieces]
        np.testing.assert_allclose(by_row[1], by_row[0], rtol=1e-5)


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(step: Step, rows: int) -> set[str]:
    (programs,) = step.compile(make_batch(rows))
    text = "\n".join(program.as_text() for program in programs)
    return {kind for kind in COLLECTIVES if f" {kind}(" in text or f" {kind}-start(" in text}


def test_devices_that_read_different_rows_send_each_other_nothing(model: Path) -> None:
    taps = "resid_post:all,q:0,attn_pattern:1,logprob"
    assert collectives(make_step(model, taps, Layout(8)), 16) == set()


@pytest.mark.parametrize(
    ("layout", "kind"),
    some(
        [(Layout(1, 8), "all-gather"), (Layout(1, 1, 2), "all-reduce")],
        (Layout(1, 1, 2), "all-reduce"),
    ),
    ids=str,
)
def test_devices_that_share_weights_send_each_other_what_they_need(
    model: Path, layout: Layout, kind: str
) -> None:
    assert kind in collectives(make_step(model, "resid_post:0", layout), 16)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(1, 4), Layout(1, 1, 2)], ids=str)
def test_float8_weights_and_scales_are_cut_alike(model: Path, layout: Layout) -> None:
    given = "bfloat16", "float8_e4m3"
    whole, cut = (make_step(model, "resid_post:all", each, *given) for each in (None, layout))
    values, scale = cut.params.cycle[0]["w_up"]
    parts = layout.fsdp * layout.model
    assert values.addressable_shards[0].data.size * parts == values.size
    assert scale.addressable_shards[0].data.size * layout.model == scale.size
    batch = make_batch(8)
    for tap in ("resid_post.0", "resid_post.1"):
        one, other = (np.asarray(step(batch).rows_of(tap), np.float64) for step in (whole, cut))
        # A sum in another order may round a value to the next one of float8.
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(one)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(1, 1, 2)], ids=str)
def test_experts_in_float8_are_cut_alike(tmp_path: Path, layout: Layout) -> None:
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": tiny.VOCAB}
    made = families.randomised(partial(families.FAMILIES["qwen3moe-gqa"], **wide))
    model = tmp_path / "model"
    families.save(made, model)
    tiny.write_tokenizer(model)
    given = "bfloat16", "float8_e4m3"
    whole, cut = (make_step(model, "mlp_out:0", each, *given) for each in (None, layout))
    values, scale = cut.params.cycle[0]["w_up"]
    assert values.addressable_shards[0].data.size * layout.fsdp * layout.model == values.size
    assert scale.addressable_shards[0].data.size < scale.size
    batch = make_batch(8)
    one, other = (np.asarray(step(batch).rows_of("mlp_out.0"), np.float64) for step in (whole, cut))
    # A token near a tie between experts may choose the other one.
    apart = np.linalg.norm(one - other, axis=1) / np.linalg.norm(one, axis=1)
    assert np.median(apart) < 0.02


def test_each_device_holds_its_share_of_the_weights(model: Path) -> None:
    step = make_step(model, "resid_post:all", Layout(2, 2, 2))
    for name, ways in {"wq": 4, "wo": 4, "w_up": 4, "attn_norm": 1}.items():
        array = step.params.cycle[0][name]
        assert array.addressable_shards[0].data.size * ways == array.size, name
    assert len(jax.devices()) >= 8


@pytest.mark.full
@pytest.mark.parametrize("gathers", [False, True])
def test_sums_of_jacobians_are_those_of_one_device(
    model: Path, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gathers:
        monkeypatch.setattr(StepDevices, "gathers", lambda place, pool: place.shards is not None)
    batch, last = pooled(make_batch(16, keep=True), 4), Tap("resid_post", 2)
    stored = "bfloat16" if gathers else "float32"
    one, mesh = (
        # (Tests share the programs of equal settings. Sums are float32, whatever is stored.)
        make_step(model, "resid_post:all", each, stored, pool=JACOBIAN, beside=last)(batch)
        for each in (None, SQUARE)
    )
    for tap in ("resid_post.0", "resid_post.1"):
        wanted, found = (sum(each.batches[0].products_of(tap)) for each in (one, mesh))
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
        prompts = [each.batches[0].parts_of(tap).sum() for each in (one, mesh)]
        assert prompts[0] == prompts[1] > 4


@pytest.mark.full
def test_a_lens_predicts_on_a_mesh_what_it_does_on_one_device(model: Path) -> None:
    rng, width = np.random.default_rng(0), open_checkpoint(str(model)).arch.width
    arrays = {
        "matrix": rng.normal(size=(width, width)).astype(np.float32) / width,
        "bias": rng.normal(size=width).astype(np.float32),
    }
    batch, lens = make_batch(16, keep=True), {"lens_logsumexp.1": arrays}
    taps = "resid_post:0,lens_top:1,top_logits"
    one, mesh = (make_step(model, taps, each, lens=lens)(batch) for each in (None, SQUARE))
    for tap in one.batches[0].rows:
        np.testing.assert_allclose(mesh.rows_of(tap), one.rows_of(tap), atol=2e-5, err_msg=tap)
