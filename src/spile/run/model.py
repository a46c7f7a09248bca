"""A whole model as a function: its taps for given tokens, with any of them spliced.

model = spile.load_model("demo")
logits = model("The capital of France is Paris.")["logits"]
last = model(["a", "longer text"], "resid_post:9").last()  # [2, width]
clean = model.loss("The capital of France is Paris.")
cut = model.to("1d")  # over all devices of this process
steered = model.loss("The capital of France is Paris.", splice={"resid_post.9": added(vector)})
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.tree_util import Partial

from spile.core.config import COMPUTE_DTYPES, Runtime, activation_dtype
from spile.core.errors import ConfigError
from spile.core.tensors import DTYPES_BY_NAME
from spile.corpus.tokenize import TextTokenizer
from spile.models.config.arch import Arch
from spile.models.config.kernel_choice import BLOCKED, no_gradient
from spile.models.config.specs import array_axes, axis_sizes
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.forward.decoder import (
    Beside,
    Inputs,
    by_stage,
    changed_places,
    of_any_block,
    stage_kinds,
)
from spile.models.forward.ops import gpu_capability
from spile.models.forward.sharding import Shards, make_mesh, put
from spile.models.forward.splice import Change, at_tokens, replaced
from spile.models.forward.streamed import Passing, SweptModel, load_blocks, walk
from spile.models.forward.weight_loader import ArrayLoader, load_params
from spile.models.forward.weights import LayerSchedule, Params, WeightArrays, moved_params
from spile.models.layout import ONE_DEVICE, Cuts, parse_layout
from spile.models.objectives import FUNCTION, LOGIT_DIFF, LOGPROB, LOSS, Objective
from spile.models.sites import ATTRIBUTION, GRADIENT, SPLICED
from spile.models.taps import Tap, parse_taps, with_tops
from spile.plan.compute_dtype import settled_compute_dtype
from spile.plan.lenses import refuse_lens
from spile.plan.objectives import find_objective
from spile.plan.residency import Machine, Residency, choose_residency
from spile.plan.roofline import Workload
from spile.run.model_baselines import Compared, GivenBaseline
from spile.run.pipeline.display import waiting
from spile.run.step.devices import StepDevices
from spile.run.step.settings import Stage, StepSettings
from spile.run.tap_values import TapValues, blanked
from spile.run.world.devices import memory_limit, prepared_device

_LONG = 2048  # tokens of a long context

# [rows, seq], or contexts of any lengths, or texts to encode.
Tokens = np.ndarray | Sequence[np.ndarray] | str | Sequence[str]
# By tap: a function of its values [rows, seq, ...], or the values to replace them with.
SplicedTaps = Mapping[str, Change | jax.Array | np.ndarray]
# By tap: from its values [rows, seq, ...] to a number for each token.
ObjectiveFunctions = Mapping[str, Callable[[jax.Array], jax.Array]]


@waiting("loading the model", late=True)
def load_model(
    name: str,
    lora: str | None = None,
    *,
    compute_dtype: str | None = None,
    special_tokens: str = "tokenizer",
    mesh: str = "1",
    weights: str = "auto",
) -> "Model":
    """Load all blocks of a model and its head.

    Args:
        name: as in `spile extract --model`; so are the others that are not listed here.
        compute_dtype: if it is not given, float32 on a CPU, float16 on GPUs without bfloat16 (a
            T4), and bfloat16 elsewhere.
        mesh: how to lay it out on this process's devices, as in `--mesh`, except `auto`.
        weights: where blocks are kept, as in `--weights`. A call copies those that are not on the
            device one after another, so give it many tokens.
    """
    if compute_dtype not in (None, *COMPUTE_DTYPES):
        choices = ", ".join(COMPUTE_DTYPES)
        raise ConfigError(f"compute_dtype must be one of {choices}, got {compute_dtype!r}")
    checkpoint, device = open_checkpoint(name, lora), prepared_device()
    arch, tokenizer = checkpoint.arch, TextTokenizer(checkpoint.directory, special_tokens)
    computed = settled_compute_dtype(compute_dtype, device.platform, gpu_capability())
    settings = StepSettings(
        arch=arch,
        taps=(),
        schedule=LayerSchedule.of(arch, arch.num_layers, whole=True),
        place=_placed(device, arch, mesh),
        compute_dtype=computed,
        store_dtype=activation_dtype(computed),
    )
    kept = _residency(settings, weights, checkpoint)
    dtype, shards = DTYPES_BY_NAME[computed], settings.place.shards
    if kept.streams:
        settings = replace(settings, schedule=settings.schedule.one_by_one)
        loader = ArrayLoader(checkpoint, settings.schedule, dtype, shards)
        blocks = load_blocks(loader, kept.kept, device)
        outer = loader.outer(head=True)
        model = SweptModel(blocks, outer, check=loader.check)
        return Model(name, settings, tokenizer, model)
    params, _ = load_params(checkpoint, settings.schedule, head=True, dtype=dtype, shards=shards)
    return Model(name, settings, tokenizer, params)


def _placed(device: Any, arch: Arch, mesh: str) -> StepDevices:
    layout = parse_layout(mesh, jax.local_device_count(), 1, None)
    if layout is None:
        raise ConfigError("mesh: say which, e.g. 1, 1d, 2d or data=2,model=2; not auto")
    if layout.size == 1:
        return StepDevices(device)
    cuts = Cuts.of(layout, axis_sizes(arch))
    mesh_of_all = make_mesh(layout, jax.local_devices())
    return StepDevices(device, Shards(mesh_of_all, cuts, array_axes(arch)))


def _residency(settings: StepSettings, weights: str, checkpoint: Checkpoint) -> Residency:
    """Decide where blocks are kept, for calls with the logits of one long context."""
    arch, place = settings.arch, settings.place
    work = Workload(
        arch=arch,
        taps=parse_taps("logits", arch),
        cuts=place.shards.cuts if place.shards else ONE_DEVICE,
        seq_len=min(_LONG, arch.max_positions),
        rows=1,
        compute_dtype=settings.compute_dtype,
        store_dtype=settings.store_dtype,
        whole=True,
        packed=checkpoint.packed_bytes() if place.shards is None else {},
    )
    return choose_residency(
        lambda rows: replace(work, rows=rows),
        (1, 1),
        Runtime(weights=weights),
        Machine(place.device.platform, memory_limit(place.device)),
        most_rows=1,
    )


class Model:
    """A whole model, on one device or on a mesh of them; `load_model` loads one."""

    def __init__(
        self,
        name: str,
        settings: StepSettings,
        tokenizer: TextTokenizer,
        weights: Params | SweptModel,
    ) -> None:
        self.arch = settings.arch
        self._name, self._settings, self._tokenizer = name, settings, tokenizer
        self._weights = weights
        self._run = jax.jit(
            self._forward, static_argnames=("taps", "spliced", "attention", "objective", "steps")
        )
        self._run_jacobian = jax.jit(self._one_jacobian, static_argnames=("source", "objective"))
        self._run_stage = jax.jit(self._one_stage, static_argnames="stage")

    def to(self, mesh: str) -> "Model":
        """Return the same model on another mesh; its weights are moved, not read again.

        The original stays where it is until it is freed: `model = model.to("1d")`.
        """
        if isinstance(self._weights, SweptModel):
            raise ConfigError(
                "to: a model whose blocks are streamed stays on its mesh; load it again"
            )
        place = _placed(self._settings.place.device, self.arch, mesh)
        if place.shards is None:
            moved = jax.device_put(self._weights, place.device)
        else:
            moved = moved_params(self._weights, place.shards)
        return Model(self._name, replace(self._settings, place=place), self._tokenizer, moved)

    def __repr__(self) -> str:
        arch, place = self.arch, self._settings.place
        return (
            f"<spile.Model {self._name}: {arch.num_layers} layers, width {arch.width}, "
            f"{self._settings.compute_dtype} on {place.device.platform}"
            + (f", mesh {place.shards.layout}>" if place.shards else ">")
        )

    def encode(self, texts: str | Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, with the special tokens that the model expects."""
        return self._tokenizer.encode([texts] if isinstance(texts, str) else list(texts))

    def decode(self, ids: int | Sequence[int] | np.ndarray | jax.Array) -> str:
        """Return one text's token ids, or a single id, as text, including special tokens."""
        given = np.asarray(ids)
        if given.ndim > 1:
            raise ConfigError("decode: one text at a time: [model.decode(row) for row in ids]")
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise ConfigError(f"decode: token ids are integers, not {given.dtype}")
        self._check_ids(given)
        return self._tokenizer.decode(given.reshape(-1).tolist())

    def __call__(
        self,
        tokens: Tokens,
        taps: str = "logits",
        *,
        splice: SplicedTaps | None = None,
        attn_top: int | None = None,
        top_logits: int | None = None,
    ) -> TapValues:
        """Return every tap's values [rows, seq, ...], by name; NaN beyond the end of a context.

        One text is one row. `encode` returns the tokens of a text. The result knows how long each
        context is: `.lengths`, `.mask`, `.last(tap)` and `.mean(tap)`.

        `top_logits` and `attn_top` say how many values the taps of that name keep.

        A new function in `splice` compiles a new program: put arrays that change from call to call
        into a `jax.tree_util.Partial`. jax can differentiate the values with respect to them.
        """
        ids, segments = self._padded(tokens)
        tops = {"attn_top": attn_top, "top_logits": top_logits}
        chosen = with_tops(parse_taps(taps, self.arch), tops, self.arch, ids.shape[1])
        refuse_lens(chosen, f"taps={taps!r}")
        if gradients := [tap for tap in chosen if tap.kind.of]:
            raise ConfigError(
                f"{gradients[0].name}: use model.grad(text, {gradients[0].source.name!r})"
            )
        return self._values(ids, segments, chosen, splice)

    def grad(
        self,
        tokens: Tokens,
        sites: str,
        *,
        objective: str | ObjectiveFunctions = LOGPROB,
        baseline: GivenBaseline | None = None,
        steps: int | None = None,
        splice: SplicedTaps | None = None,
    ) -> TapValues:
        """Return the gradient of an objective with respect to sites [rows, seq, ...], by name.

        `model.grad(text, "resid_post:4")["resid_post.4"]` says how the sum of the log-probabilities
        of each text's next tokens changes with the stream of each token. Values beyond the end of
        a context are NaN.

        Args:
            sites: as in `--taps`, of those in `spile.SPLICE_SITES`.
            objective: `logprob`; `direction:TAP=FILE.npy`, the sum of dot products with a vector;
                or functions by tap, each from values [rows, seq, ...] to a number for each token:
                the objective is their sum over all tokens of a text.
            baseline: where the path of `steps` begins, as in `attr`.
            steps: the mean gradient at so many points of the path from the baseline to the values.
            splice: as in a call.
        """
        if baseline is not None and not steps:
            raise ConfigError("grad: a baseline is where a path begins; give steps=N, or use attr")
        return self._backward(tokens, sites, GRADIENT, objective, (baseline, steps), splice)

    def attr(
        self,
        tokens: Tokens,
        sites: str,
        *,
        objective: str | ObjectiveFunctions = LOGPROB,
        baseline: GivenBaseline | None = None,
        steps: int | None = None,
        splice: SplicedTaps | None = None,
    ) -> TapValues:
        """Return attributions by name: gradients times values, summed over a site's last axis.

        That is a number for each token [rows, seq], or for each head where a site has heads. To
        first order, the objective would fall by it if the values were those of the baseline.

        Args:
            sites: as in `grad`; so are the arguments that are not listed here.
            baseline: by tap, the values to compare with: of other texts of as many tokens, as a
                call returns them (attribution patching), or of one token. Zero if not given.
            steps: integrated gradients: their mean at so many points of the path from there.
        """
        return self._backward(tokens, sites, ATTRIBUTION, objective, (baseline, steps), splice)

    def _backward(
        self,
        tokens: Tokens,
        sites: str,
        ending: str,
        objective: str | ObjectiveFunctions,
        path: tuple[GivenBaseline | None, int | None],
        splice: SplicedTaps | None,
    ) -> TapValues:
        ids, segments = self._padded(tokens)
        found = sorted(self._sites(sites), key=lambda tap: tap.name)
        taps = tuple(replace(tap, site=tap.site + ending) for tap in found)
        chosen = self._objective(objective, taps)
        self._refuse_no_gradient("grad" if ending == GRADIENT else "attr")
        compared = Compared.of(*path, taps, self.arch, segments > 0)
        values = self._values(ids, segments, taps, splice, chosen, compared)
        named = {tap.source.name: values[tap.name] for tap in taps}
        return TapValues(named, tuple(int(length) for length in values.lengths))

    def jacobian(self, tokens: Tokens, source: str, target: str, *, at: int = -1) -> jax.Array:
        """Return the Jacobian of a tap at one token with respect to another at every token.

        Args:
            tokens: of one text.
            source: one tap, as in `grad`.
            target: one tap with values for each token.
            at: the token of the text at which the target is read; -1: the last.

        Returns:
            [values of the target, tokens, values of the source], in the compute dtype: a backward
            pass for each value of the target.
        """
        ids, segments = self._padded(tokens)
        length = ids.shape[1]
        if len(ids) > 1 or not -length <= at < length:
            raise ConfigError(
                f"jacobian: give one text, and a token of it; got {len(ids)} texts of up to "
                f"{length} tokens, and at={at}"
            )
        (first,) = self._one(self._sites(source), source)
        (last,) = self._one(parse_taps(target, self.arch), target)
        self._refuse_no_gradient("jacobian")
        aim = Objective(kind=FUNCTION, identity=f"jacobian {last.name}", aims=(last,))
        if self._settings.place.shards is not None:
            raise ConfigError("jacobian: move the model to one device first: model.to('1')")
        return self._run_jacobian(
            self._weights, ids, segments, at % length, source=first, objective=aim
        )

    def _one(self, taps: Sequence[Tap], named: str) -> Sequence[Tap]:
        if len(taps) != 1:
            raise ConfigError(f"jacobian: {named!r} is {len(taps)} taps; name one")
        return taps

    def _sites(self, named: str) -> tuple[Tap, ...]:
        """Parse the taps whose gradients are wanted."""
        taps = parse_taps(named, self.arch)
        for tap in taps:
            if not tap.kind.spliced:
                raise ConfigError(f"{tap.name} has no gradient; choose from {', '.join(SPLICED)}")
        return taps

    def _objective(self, given: str | ObjectiveFunctions, taps: tuple[Tap, ...]) -> Objective:
        if isinstance(given, str):
            found = find_objective(given, taps, self.arch, self._settings.compute_dtype)
            assert found
            if found.kind in (LOSS, LOGIT_DIFF):
                raise ConfigError(
                    f"objective {given}: needs a corpus; give functions by tap, as in "
                    '{"logits": lambda values: values[..., 5] - values[..., 7]}'
                )
            return found
        aims = [self._one(parse_taps(name, self.arch), name)[0] for name in given]
        functions = {aim.name: each for aim, each in zip(aims, given.values(), strict=True)}
        return Objective(kind=FUNCTION, identity=FUNCTION, aims=tuple(aims), functions=functions)

    def _refuse_no_gradient(self, asked: str) -> None:
        settings, why = self._settings, None
        if isinstance(self._weights, SweptModel):
            why = "streamed blocks are gone when the gradient needs them; give weights='resident'"
        if settings.compute_dtype not in ("float32", "bfloat16"):
            why = f"products in {settings.compute_dtype} have none; give compute_dtype='float32'"
        if why:
            raise ConfigError(f"{asked}: {why}")

    def _values(
        self,
        ids: np.ndarray,
        segments: np.ndarray,
        chosen: tuple[Tap, ...],
        splice: SplicedTaps | None,
        objective: Objective | None = None,
        compared: Compared | None = None,
    ) -> TapValues:
        """Run the model on padded token ids; return the values of taps."""
        changes = self._changes(splice or {}, segments > 0)
        rows, seq = ids.shape
        compared = compared or Compared()
        *inputs, beside = self._divided(ids, segments, compared.beside, spliced=bool(changes))
        attention = self._attention()
        if isinstance(self._weights, SweptModel):
            found = self._block_by_block(self._weights, (inputs[0], inputs[1]), changes, chosen)
        else:
            found = self._run(
                self._weights,
                *inputs,
                tuple(changes.values()),
                beside,
                compared.columns,
                taps=chosen,
                spliced=tuple(changes),
                attention=attention,
                objective=objective,
                steps=compared.steps,
            )
        shaped: dict[str, jax.Array] = {}
        for tap in chosen:
            values = found[tap.name]
            values = values.reshape(*inputs[0].shape, *values.shape[1:])[:rows, :seq]
            shaped[tap.name] = values[..., :seq] if tap.site == "attn_pattern" else values
        return TapValues(shaped, tuple(int(length) for length in segments.sum(axis=1)))

    def _attention(self) -> str:
        """The attention kernel of a call; fused ones cannot be differentiated.

        Raises:
            ConfigError: if jax follows this call's values, and the model cannot be differentiated.
        """
        settings = self._settings
        if trace_state_clean():
            return settings.attention
        why = no_gradient(settings.place.device.platform, self.arch, settings.compute_dtype)
        if isinstance(self._weights, SweptModel):
            why = "streamed blocks are gone when the gradient needs them; give weights='resident'"
        if why:
            raise ConfigError(f"load_model: inside jax.grad, jit or vmap: {why}")
        return BLOCKED

    def _divided(
        self, ids: np.ndarray, segments: np.ndarray, beside: np.ndarray | None, *, spliced: bool
    ) -> tuple[Any, Any, Any]:
        """Pad the inputs until the mesh divides their shape, and put them on it."""
        shards = self._settings.place.shards
        if shards is None:
            return ids, segments, beside
        layout = shards.layout
        more = (-ids.shape[0] % layout.groups, -ids.shape[1] % layout.model)
        if spliced and any(more):
            raise ConfigError(
                f"on the mesh {layout} a splice needs a multiple of {layout.groups} contexts, the "
                f"longest of a multiple of {layout.model} tokens; got {list(ids.shape)}"
            )

        def whole(array: np.ndarray) -> Any:
            ends = [(0, n) for n in (*more, *[0] * (array.ndim - 2))]
            return put(np.pad(array, ends), shards.by_rows)

        return whole(ids), whole(segments), None if beside is None else whole(beside)

    @waiting("computing the loss", late=True)
    def loss(self, tokens: Tokens, *, splice: SplicedTaps | None = None) -> float:
        """Mean cross-entropy of the next token, in nats, over the tokens that have one.

        Inside `jax.grad` and other transformations of jax it is a scalar that jax follows.
        """
        found = self(tokens, "logprob", splice=splice)
        logprob, scored = found["logprob"][:, :-1], found.mask[:, 1:]
        if isinstance(logprob, Tracer):
            return cast(float, -jnp.where(scored, logprob, 0.0).sum() / int(scored.sum()))
        return -float(np.asarray(logprob)[scored].mean(dtype=np.float64))

    def _padded(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [rows, seq], padded; and 1 where there is a token, 0 elsewhere."""
        if isinstance(tokens, str):
            tokens = [tokens]
        if len(tokens) and all(isinstance(context, str) for context in tokens):
            tokens = self.encode([str(text) for text in tokens])
        lengths = [len(context) for context in tokens]
        if not lengths or not min(lengths) or max(lengths) > self.arch.max_positions:
            raise ConfigError(
                f"contexts must have 1 to {self.arch.max_positions} tokens, got {lengths}"
            )
        ids, segments = np.zeros((2, len(lengths), max(lengths)), np.int32)
        for row, context in enumerate(tokens):
            ids[row, : len(context)], segments[row, : len(context)] = context, 1
        self._check_ids(ids)
        return ids, segments

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self.arch.vocab_size):
            raise ConfigError(f"token ids must be 0 to {self.arch.vocab_size - 1}")

    def _changes(self, splice: SplicedTaps, mask: np.ndarray) -> dict[Tap, Partial]:
        """Return the changes by tap; they leave the filler beyond the end of contexts alone."""
        changes: dict[Tap, Partial] = {}
        for name, given in splice.items():
            try:
                taps = parse_taps(name, self.arch)
            except ConfigError as error:
                raise ConfigError(error.message.replace("--taps", "splice", 1)) from None
            change = given if callable(given) else replaced(jnp.asarray(given))
            for tap in taps:
                if tap.heads:
                    raise ConfigError(f"splice {name!r}: all heads are changed together")
                if not tap.kind.spliced:
                    known = ", ".join(SPLICED)
                    raise ConfigError(f"splice {name!r}: only these can be changed: {known}")
                if tap in changes:
                    raise ConfigError(f"splice {name!r}: {tap.name} is changed twice")
                changes[tap] = at_tokens(mask, change)
        return changes

    def _block_by_block(
        self,
        model: SweptModel,
        inputs: tuple[Any, Any],
        changes: Mapping[Tap, Partial],
        taps: tuple[Tap, ...],
    ) -> dict[str, jax.Array]:
        """Return the taps' values, from blocks that come one after another."""
        depth = self.arch.num_layers
        changed_places(changes)
        tapped, spliced = by_stage(taps, depth), by_stage(changes, depth)
        scores_all = any(tap.site == "attn_pattern" for tap in taps)
        kinds = stage_kinds(self.arch, depth)
        values: dict[str, jax.Array] = {}

        def run(
            number: int, weights: WeightArrays, beside: Beside, each: Passing
        ) -> tuple[Any, Any, Any]:
            local = tuple(dict.fromkeys(map(of_any_block, tapped[number])))
            here = tuple(map(of_any_block, spliced[number]))
            stream, onward, found = self._run_stage(
                weights,
                tuple(changes[tap] for tap in spliced[number]),
                (each.stream, beside),
                *inputs,
                stage=Stage(kinds[number + 1], local, here, scores_all),
            )
            values.update({tap.name: found[of_any_block(tap).name] for tap in tapped[number]})
            return stream, onward, stream

        deepest = max(number for number, some in tapped.items() if some)
        walk(kinds[: deepest + 2], model, [Passing()], run)
        model.check()
        return values

    def _one_stage(
        self,
        weights: WeightArrays,
        changes: tuple[Partial, ...],
        entering: tuple[Any, Beside],
        ids: jax.Array,
        segments: jax.Array,
        *,
        stage: Stage,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        inputs = _inputs(ids, segments)
        stream, onward, found = self._settings.stage_values(
            stage, weights, changes, entering, inputs, contexts=1
        )
        return stream, onward, blanked(found, segments)

    def _forward(
        self,
        params: Params,
        ids: jax.Array,
        segments: jax.Array,
        changes: tuple[Partial, ...],
        beside: jax.Array | None,
        columns: Mapping[str, jax.Array],
        *,
        taps: tuple[Tap, ...],
        spliced: tuple[Tap, ...],
        attention: str,
        objective: Objective | None,
        steps: int | None,
    ) -> dict[str, jax.Array]:
        settings = replace(
            self._settings, taps=taps, spliced=spliced, attention=attention, objective=objective,
            steps=steps,
        )  # fmt: skip
        inputs = _inputs(ids, segments)._replace(beside=beside)
        found = settings.values(params, changes, inputs, 1, columns)
        return blanked(found, segments)

    def _one_jacobian(
        self,
        params: Params,
        ids: jax.Array,
        segments: jax.Array,
        at: jax.Array,
        *,
        source: Tap,
        objective: Objective,
    ) -> jax.Array:
        """One row of the Jacobian after another: a backward pass for each value of the target."""
        settings = replace(self._settings, taps=(), objective=objective)
        inputs, (target,) = _inputs(ids, segments), objective.aims
        aims, pullback = settings.linearized(params, inputs, 1, (source,))
        values = aims[target.name]
        shape = values.shape[2:]

        def row(number: jax.Array) -> jax.Array:
            one = (jnp.arange(math.prod(shape)) == number).astype(values.dtype).reshape(shape)
            there = jnp.zeros(values.shape, values.dtype).at[0, at].set(one)
            return pullback({target.name: there})[source.name]

        return jax.lax.map(row, jnp.arange(math.prod(shape)))


def _inputs(ids: jax.Array, segments: jax.Array) -> Inputs:
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return Inputs(ids, jnp.broadcast_to(positions, ids.shape), segments)
