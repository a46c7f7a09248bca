"""What a step computes: the settings that its programs are compiled for.

`StepSettings.forward` computes a whole model, `stage_values` one stage of it, and `stage_gradients`
a stage on the way back; `stored` brings values into the form that leaves the device.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array

from spile.core.config import activation_dtype
from spile.core.pool import COVARIANCE, JACOBIAN
from spile.corpus.pack import Batch
from spile.dataset.codec.quantization import QUANTIZED
from spile.models.config.arch import GATED_DELTA, Arch, Layer
from spile.models.config.kernel_choice import BLOCKED
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.forward.attention import narrowed
from spile.models.forward.decoder import AFTER, BEFORE, GAPS, Beside, Decoder, Inputs
from spile.models.forward.gradient import (
    Cotangents,
    Pullback,
    attributed,
    cotangents_of,
    kept_beside,
    linearized,
    mean_gradients,
    on_path,
    stage_pulled_back,
)
from spile.models.forward.jacobian import jacobian_sums, prompts_of
from spile.models.forward.kernels.attention import chosen_kernels, for_platform
from spile.models.forward.kernels.chunks import plain_recurrence
from spile.models.forward.lens import LensHead
from spile.models.forward.pooling import Pooling
from spile.models.forward.weights import LayerSchedule, Params, WeightArrays, block_array
from spile.models.objectives import Objective
from spile.models.sites import HEADS_WRITE
from spile.models.taps import Tap, ended_between, sites_on_paths, writes_to
from spile.run.step.devices import StepDevices
from spile.run.step.stored import PRODUCTS, Extras, Reduced, StoredForm, joined


class Computed(NamedTuple):
    """What a program returns, on the device."""

    rows: dict[str, Array]  # as they are stored
    reduced: dict[str, Reduced]  # their statistics
    gaps: Array | None = None  # [rows, scored]: an engine's distances, whole on every device


class StepInputs(NamedTuple):
    """A batch's arrays, on the host or on the device."""

    tokens: Any
    positions: Any
    segments: Any
    counts: Any
    columns: Any
    slots: Any
    sizes: Any
    labels: Any
    scored: Any
    claimed: Any
    aimed: Any
    answers: Any
    beside: Any

    @property
    def read(self) -> Inputs:
        """What the model reads."""
        return Inputs(**{name: getattr(self, name) for name in Inputs._fields})


@dataclass(frozen=True)
class Stage:
    """One stage of a model that runs block by block; equal stages are one program."""

    kind: Layer | str  # of a block; or `BEFORE` or `AFTER`
    taps: tuple[Tap, ...]  # as `of_any_block` returns them; so are `spliced`
    spliced: tuple[Tap, ...]
    scores_all: bool  # attention weights of some block are tapped


@runtime_checkable
class StageBack(Protocol):
    """One stage on the way back of a sweep; see `BackwardStage`."""

    @property
    def kind(self) -> Layer | str: ...
    @property
    def local(self) -> tuple[Tap, ...]: ...
    @property
    def sources(self) -> tuple[Tap, ...]: ...
    @property
    def spliced(self) -> tuple[Tap, ...]: ...
    @property
    def objective(self) -> Objective | None: ...
    @property
    def encoders(self) -> Mapping[str, SparseEncoder]: ...


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that programs are compiled for; holds no arrays."""

    arch: Arch
    taps: tuple[Tap, ...]
    schedule: LayerSchedule
    place: StepDevices
    compute_dtype: str
    store_dtype: str
    attention: str = "auto"  # kernel, as `--attention` has it
    encoders: Mapping[str, SparseEncoder] = field(
        default_factory=dict[str, SparseEncoder], hash=False
    )  # of taps that are stored as latents
    spliced: tuple[Tap, ...] = ()
    pool: str | None = None  # how, if the values of spans are reduced: `core.pool.reduces`
    beside: Tap | None = None  # one of the taps, whose values stand beside those of each other
    compares: bool = False  # whether an engine's log-probabilities are compared
    objective: Objective | None = None  # what gradients among the taps are of
    writers: tuple[Tap, ...] = ()  # that edges come from
    steps: int | None = None  # points on the path of integrated gradients
    remat: bool = True  # blocks are computed again for them, instead of keeping what they need
    lens_adds: bool | None = None  # whether a lens adds its map to the stream; None: there is none

    @property
    def _backward(self) -> bool:
        """Whether the step has a backward pass."""
        return self.objective is not None or self.pool == JACOBIAN

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Options for XLA, besides its flags.

        What a backward pass needs is stored in every block. A GPU would compute a product twice
        whose result is stored and used (`Decoder` prevents that for taps, at less cost).
        """
        if self.place.device.platform == "gpu" and self._backward:
            return {"xla_gpu_enable_dynamic_slice_fusion": False}
        return {}

    @property
    def _summed(self) -> list[Tap]:
        """The taps that hold attributions."""
        return [tap for tap in self.taps if tap.kind.summed]

    @property
    def _multiplies(self) -> bool:
        """Whether gradients of tokens are multiplied with values."""
        return bool(self._summed or self.writers)

    @property
    def gathers(self) -> bool:
        return self.place.gathers(self.pool)

    @property
    def computed(self) -> str:
        """The dtype of activations."""
        return activation_dtype(self.compute_dtype)

    @property
    def _attended(self) -> str:
        """The dtype in which attention takes queries, keys and values."""
        return "float16" if self.compute_dtype == "float16" else self.computed

    def values(
        self,
        params: Params,
        changes: tuple[Partial, ...],
        inputs: Inputs,
        contexts: int,
        baselines: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run the whole model; return the values of each tap.

        Args:
            changes: of the spliced taps, in their order.
            baselines: of attributions, by tap.
            contexts: the most contexts in a row, as `contexts` returns it.
        """
        with self._tracing():
            splice = dict(zip(self.spliced, changes, strict=True))
            attention = self._attention(inputs, contexts)
            summed = [tap.source for tap in self._summed]
            own = (tap for tap in self.taps if not tap.kind.of)
            whole = (replace(writer, heads=()) for writer in self.writers)
            plain = tuple(dict.fromkeys((*own, *summed, *whole)))
            decoder = Decoder(
                self.arch, plain, self._carried, attention, self.place.shards, splice,
                pool=self._pooled_in_decoder,
            )  # fmt: skip
            if self.objective is None:
                return decoder.forward(params, inputs, self.schedule)
            names = [tap.name for tap in self.taps]
            gradients = {tap: tap.source for tap in self.taps if tap.kind.of}
            decoder = replace(
                decoder,
                sites=tuple(dict.fromkeys(gradients.values())),
                aims=self.objective.aims,
                remat=self.remat,
            )
            if self.steps:
                values = replace(decoder, sites=(), aims=()).forward(params, inputs, self.schedule)
                found = self._integrated(decoder, params, inputs, baselines or {})
            else:
                values, aims, pullback = linearized(decoder, params, inputs, self.schedule)
                found = pullback(cotangents_of(self.objective, aims, inputs))
            found = {tap: found[source.name] for tap, source in gradients.items()}
            for tap in self._summed:
                found[tap] = self._attributed(
                    values[tap.source.name], found[tap], (baselines or {}).get(tap.name), inputs,
                    encoded=tap.name in self.encoders,
                )  # fmt: skip
            for tap in (tap for tap in self.taps if tap.kind.crossed):
                written = self._written(params, tap.source, found[tap])
                found[tap] = self._edges(tap, values, written, baselines or {}, inputs)
            kept = {name: each for name, each in values.items() if name in (*names, GAPS)}
            return kept | {tap.name: each for tap, each in found.items()}

    def _integrated(
        self, decoder: Decoder, params: Params, inputs: Inputs, baselines: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the mean gradient of each site on its path: one place at a time is changed.

        Args:
            decoder: with all sites.
            baselines: of attributions by tap, and of whole places.
        """
        assert self.objective and self.steps
        objective = self.objective
        found: dict[str, Array] = {}
        for place, taps in sites_on_paths(self.taps).items():
            sites = tuple(dict.fromkeys(tap.source for tap in taps))
            baseline = baselines.get(place.name)
            if baseline is not None and inputs.beside is not None:
                shape = place.shape(self.arch, 1)
                baseline = inputs.beside[:, :, baseline].reshape(*inputs.tokens.shape, *shape)
            elif baseline is not None:
                baseline = baseline[None, None]

            def gradients(
                share: Array,
                place: Tap = place,
                sites: tuple[Tap, ...] = sites,
                baseline: Array | None = baseline,
            ) -> dict[str, Array]:
                change = partial(on_path, decoder.splice.get(place), share, baseline)
                own = replace(
                    decoder, taps=(), sites=sites, splice={**decoder.splice, place: change}
                )
                _, aims, pullback = linearized(own, params, inputs, self.schedule)
                return pullback(cotangents_of(objective, aims, inputs))

            found |= mean_gradients(self.steps, gradients)
        return found

    def _written(self, params: Params, reader: Tap, gradients: Array) -> Callable[[Tap], Array]:
        """Return a function from a writer to the gradient with respect to its values.

        Args:
            gradients: with respect to the stream that is read: [tokens, width].
        """

        def of(writer: Tap) -> Array:
            own = gradients.astype(jnp.float32)
            if writer.site == HEADS_WRITE:
                arch = self.arch.of(self.arch.layers[writer.layer or 0])
                delta = self.arch.layers[writer.layer or 0].mixer == GATED_DELTA
                matrix = block_array(
                    params, self.schedule, writer.layer or 0, "wdo" if delta else "wo"
                )
                own = jnp.dot(gradients, matrix, preferred_element_type=jnp.dtype("float32"))
                own = own * arch.residual_scale * (1.0 if delta else arch.attn_out_scale)
                own = own.reshape(len(gradients), *writer.shape(self.arch, 1))
            for layer in ended_between(writer, reader) if self.arch.block_scale else ():
                scale = block_array(params, self.schedule, layer, "block_scale")
                own = own * scale.astype(jnp.float32).reshape((1,) * own.ndim)
            return own

        return of

    def _edges(
        self,
        tap: Tap,
        values: Mapping[str, Array],
        gradients: Callable[[Tap], Array],
        baselines: Mapping[str, Array],
        inputs: Inputs,
    ) -> Array:
        """Return the products of writers' values with gradients with respect to them.

        Zero if a writer comes after the stream that is read.
        """
        columns: list[Array] = []
        for whole, several in groupby(self.writers, key=lambda writer: replace(writer, heads=())):
            heads = [head for writer in several for head in writer.heads]
            own = values[whole.name]
            if not writes_to(whole, tap.source, self.arch):
                columns.append(jnp.zeros((len(own), len(heads) or 1), jnp.float32))
                continue
            baseline = baselines.get(whole.name)
            found = self._attributed(own, gradients(whole), baseline, inputs)
            found = found.reshape(len(own), -1)
            columns.append(found[:, np.array(heads)] if 0 < len(heads) < found.shape[1] else found)
        return jnp.concatenate(columns, axis=1)

    def _attributed(
        self,
        values: Array,
        gradients: Array,
        baseline: Array | None,
        inputs: Inputs,
        *,
        encoded: bool = False,
    ) -> Array:
        """Return attributions; of latents, what they are computed from.

        Args:
            baseline: as `Extras.baselines` has it.
            encoded: whether latents have them.
        """
        if encoded:
            flat = (each.reshape(len(each), -1) for each in (values, gradients))
            return jnp.stack([*flat], axis=1)
        if baseline is not None and inputs.beside is not None:
            baseline = kept_beside(inputs, baseline, values, self.place.shards)
        elif baseline is not None:
            baseline = baseline[None]
        return attributed(values, gradients, baseline)

    def stage_values(
        self,
        stage: Stage,
        weights: WeightArrays,
        changes: tuple[Partial, ...],
        entering: tuple[Array | None, Beside],
        inputs: Inputs,
        contexts: int,
    ) -> tuple[Array | None, Any, dict[str, Array]]:
        """Run one stage (`Decoder.stage`); `entering`: the stream, and what is read beside it."""
        with self._tracing():
            splice = dict(zip(stage.spliced, changes, strict=True))
            outside = stage.kind in (BEFORE, AFTER)
            attention = None if outside else self._attention(inputs, contexts)
            decoder = Decoder(
                self.arch, stage.taps, self._carried, attention, self.place.shards, splice,
                stage.scores_all, self._pooled_in_decoder,
            )  # fmt: skip
            return decoder.stage(stage.kind, weights, *entering, inputs)

    def stage_gradients(
        self,
        stage: "StageBack",
        weights: WeightArrays,
        changes: tuple[Partial, ...],
        stream: Array | None,
        left: Array | None,
        inputs: Inputs,
        contexts: int,
        baselines: Sequence[Array | None],
    ) -> tuple[Array | None, list[Array]]:
        """Run one stage back; return its stream's cotangent, and what each of its taps holds.

        Args:
            stream: that entered the stage.
            left: the cotangent of the stream that left it, if a later stage sent one.
            baselines: of each of its taps.
        """
        with self._tracing():
            splice = dict(zip(stage.spliced, changes, strict=True))
            outside = stage.kind in (BEFORE, AFTER)
            pairs = [*zip(stage.local, stage.sources, strict=True)]
            decoder = Decoder(
                self.arch, tuple(dict.fromkeys(own for tap, own in pairs if tap.kind.summed)),
                self._carried, None if outside else self._attention(inputs, contexts),
                self.place.shards, splice, pool=self._pooled_in_decoder,
                sites=tuple(dict.fromkeys(stage.sources)),
                aims=stage.objective.aims if stage.objective else (),
            )  # fmt: skip
            given = Cotangents(left, None, {})
            entered, _, gradients, values = stage_pulled_back(
                decoder, stage.kind, weights, (stream, (None, None)), inputs, given, stage.objective
            )
            return entered, [
                self._attributed(
                    values[own.name],
                    gradients[own.name],
                    baseline,
                    inputs,
                    encoded=str(slot) in stage.encoders,
                )
                if tap.kind.summed
                else gradients[own.name]
                for slot, ((tap, own), baseline) in enumerate(zip(pairs, baselines, strict=True))
            ]

    def stored(
        self,
        values: Mapping[str, Array],
        taps: Mapping[str, Tap],
        encoders: Mapping[str, SparseEncoder],
        extras: Extras,
        inputs: StepInputs,
        part: int,
        outer: WeightArrays,
    ) -> Computed:
        """Bring values into their stored form; see `StoredForm.rows`.

        Args:
            outer: the model's norm and head, if a lens reads them.
        """
        lens = None if self.lens_adds is None else LensHead(self.arch, self.lens_adds, outer)
        form = StoredForm(taps, encoders, self.store_dtype, self.place.shards, lens)
        shards, gaps = self.place.shards, values.get(GAPS)
        if gaps is not None and shards:
            gaps = jax.lax.with_sharding_constraint(gaps, shards.whole)
        tapped = {name: found for name, found in values.items() if name != GAPS}
        return Computed(*self._form(form, tapped, extras, inputs, part), gaps)

    def _form(
        self,
        form: StoredForm,
        values: Mapping[str, Array],
        extras: Extras,
        inputs: StepInputs,
        part: int,
    ) -> tuple[dict[str, Array], dict[str, Reduced]]:
        with self._tracing():
            if self.pool:
                late = Pooling(self.pool, inputs.slots, inputs.sizes.shape[1])
                pooling = None if self._pooled_in_decoder else late
                if self.beside:
                    values = joined(values, self.beside.name)
                return form.parts(values, extras, pooling, inputs.labels, gathers=self.gathers)
            kept = inputs.counts, inputs.columns
            return form.rows(values, extras, kept, inputs.tokens.shape[1], part)

    def forward(
        self, params: Params, extras: Extras, inputs: StepInputs, contexts: int, part: int
    ) -> Computed:
        """Run the whole model; return the rows of each tap as they are stored."""
        if self.pool == JACOBIAN:
            return self._jacobians(params, extras.changes, inputs, contexts)
        values = self.values(params, extras.changes, inputs.read, contexts, extras.baselines)
        taps = {tap.name: tap for tap in self.taps}
        return self.stored(values, taps, self.encoders, extras, inputs, part, params.outer)

    def linearized(
        self, params: Params, inputs: Inputs, contexts: int, sites: tuple[Tap, ...]
    ) -> tuple[dict[str, Array], Pullback]:
        """Run the whole model; return the values of what the objective reads, and the pullback."""
        assert self.objective
        with self._tracing():
            decoder = Decoder(
                self.arch, (), self.computed, self._attention(inputs, contexts),
                self.place.shards, sites=sites, aims=self.objective.aims, remat=self.remat,
            )  # fmt: skip
            _, aims, pullback = linearized(decoder, params, inputs, self.schedule)
        return aims, pullback

    def _jacobians(
        self, params: Params, changes: tuple[Partial, ...], inputs: StepInputs, contexts: int
    ) -> Computed:
        """Run the whole model, and a backward pass for each channel of the tap beside the others.

        The parts of pooled rows are how many prompts a packed row holds.
        """
        assert self.beside
        with self._tracing():
            decoder = Decoder(
                self.arch, (), self.computed, self._attention(inputs.read, contexts),
                self.place.shards, dict(zip(self.spliced, changes, strict=True)),
                sites=tuple(tap for tap in self.taps if tap != self.beside), aims=(self.beside,),
            )  # fmt: skip
            _, aims, pullback = linearized(decoder, params, inputs.read, self.schedule)
            name = self.beside.name
            prompts = prompts_of(inputs.read, inputs.counts)
            sums, finite = jacobian_sums(pullback, name, aims[name], prompts)
        return jacobian_parts(
            sums, finite, prompts.counts, inputs.sizes.shape[1], self.place, gathers=self.gathers
        )

    def contexts(self, batch: Batch) -> int:
        """The number of contexts to compile for; 0 if the kernel takes any number."""
        choices = chosen_kernels(
            self.place.device.platform,
            self.arch,
            self._attended,
            batch.tokens.shape[1],
            self.attention,
            backward=self._backward,
        )
        counted = any(choice.name == "cudnn" for choice in choices.values())
        return batch.contexts if counted else 0

    @property
    def _carried(self) -> str:
        """The dtype of tapped values until they are stored.

        Quantized values, latents and a lens's predictions are made from computed values.
        """
        late = self.store_dtype in QUANTIZED or self.encoders or self.pool == COVARIANCE
        late = late or self._multiplies
        late = late or self.lens_adds is not None
        return self.computed if late else self.store_dtype

    @property
    def _pooled_in_decoder(self) -> str | None:
        """How the decoder pools values; latents are pooled after it, and all other taps with them.

        (Taps of a step are carried in one form.) So are covariances, which need each token again.
        """
        late = self.encoders or self.pool == COVARIANCE or self._multiplies
        return None if late else self.pool

    @contextmanager
    def _tracing(self) -> Generator[None, None, None]:
        # float32 means float32: on accelerators the default would be a faster, coarser product.
        precision = "highest" if self.computed == "float32" else "default"
        with jax.default_matmul_precision(precision), plain_recurrence(self.attention == BLOCKED):
            yield

    def _attention(self, inputs: Inputs, contexts: int) -> Any:
        attention = for_platform(
            self.place.device.platform,
            self.arch,
            self._attended,
            seq_len=inputs[0].shape[1],
            contexts=contexts,
            wanted=self.attention,
            backward=self._backward,
        )
        return (
            partial(narrowed, attention=attention) if self._attended != self.computed else attention
        )


def jacobian_parts(
    sums: Mapping[str, Array],
    finite: Array,
    prompts: Array,
    slots: int,
    place: StepDevices,
    *,
    gathers: bool,
) -> Computed:
    """Return sums of Jacobians in the form of parts of pooled rows, and of products.

    Args:
        sums: by tap, of all prompts.
        finite: of each packed row.
        prompts: how many prompts each packed row holds: its first slot has them.
        slots: of a packed row.
    """
    counts = jnp.where(finite, prompts.astype(jnp.float32), jnp.nan)
    parts = jnp.zeros((len(counts), slots, 1), jnp.float32).at[:, 0, 0].set(counts)
    parts = parts.reshape(-1, 1)
    # Every device has the whole sum; the host adds up what each holds.
    held = {tap: found[None, None] for tap, found in sums.items()}
    if place.shards and not gathers:
        parts = place.shards.runs(parts)
        first = jnp.arange(place.devices)[:, None, None, None] == 0
        held = {tap: place.shards.runs(jnp.where(first, own, 0.0)) for tap, own in held.items()}
    elif place.shards:
        parts = place.shards.runs(parts)
        whole = place.shards.whole
        held = {n: jax.lax.with_sharding_constraint(own, whole) for n, own in held.items()}
    products = {tap: {PRODUCTS: own} for tap, own in held.items()}
    return Computed(dict.fromkeys(sums, parts), products)
