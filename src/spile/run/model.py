"""A whole model as a function: its taps for given tokens, with any of them spliced.

model = spile.load_model("demo")
logits = model("The capital of France is Paris.")["logits"]
clean = model.loss("The capital of France is Paris.")
cut = model.to("1d")  # over all devices of this process
steered = model.loss("The capital of France is Paris.", splice={"resid_post.9": added(vector)})
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from spile.core.config import COMPUTE_DTYPES, Runtime, activation_dtype
from spile.core.errors import ConfigError
from spile.core.tensors import DTYPES_BY_NAME
from spile.corpus.tokenize import TextTokenizer
from spile.models.config.arch import Layer
from spile.models.config.specs import array_axes, axis_sizes
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.forward.decoder import (
    after_blocks,
    before_blocks,
    forward,
    of_any_block,
    one_block,
    stage_of,
)
from spile.models.forward.kernels import for_platform
from spile.models.forward.sharding import Shards, make_mesh, put
from spile.models.forward.splice import Change, replaced
from spile.models.forward.streamed import StreamedBlocks, load_blocks
from spile.models.forward.weights import (
    ArrayLoader,
    LayerSchedule,
    Params,
    load_params,
    moved_params,
)
from spile.models.layout import ONE_DEVICE, Cuts, parse_layout
from spile.models.sites import SPLICED
from spile.models.taps import Tap, computed_as, parse_taps
from spile.plan.residency import Machine, Residency, choose_residency
from spile.plan.roofline import Workload
from spile.run.world.devices import memory_limit, prepared_device

_LONG = 2048  # tokens of a long context

# [rows, seq], or contexts of any lengths, or texts to encode.
Tokens = np.ndarray | Sequence[np.ndarray] | str | Sequence[str]
# By tap: a function of its values [rows, seq, ...], or the values to replace them with.
Splice = Mapping[str, Change | jax.Array | np.ndarray]


class Model:
    """All blocks of a model and its head, on one device or on a mesh of them."""

    def __init__(
        self,
        name: str,
        lora: str | None = None,
        *,
        compute_dtype: str | None = None,
        special_tokens: str = "tokenizer",
        mesh: str = "1",
        weights: str = "auto",
    ) -> None:
        """Args:
        mesh: how to lay it out on this process's devices, as in `--mesh`, except `auto`.
        weights: where blocks are kept, as in `--weights`; a call brings those that are not on the
            device one after another, so give it many tokens.

        The others are as in `spile extract`; the dtype defaults to float32 on a CPU, bfloat16
        elsewhere.
        """
        if compute_dtype not in (None, *COMPUTE_DTYPES):
            choices = ", ".join(COMPUTE_DTYPES)
            raise ConfigError(f"compute_dtype must be one of {choices}, got {compute_dtype!r}")
        checkpoint = open_checkpoint(name, lora)
        self._name = name
        self._device = prepared_device()
        self._dtype = compute_dtype or ("float32" if self._device.platform == "cpu" else "bfloat16")
        self.arch = checkpoint.arch
        self._tokenizer = TextTokenizer(checkpoint.directory, special_tokens)
        self._schedule = LayerSchedule.of(self.arch, self.arch.num_layers, whole=True)
        dtype = DTYPES_BY_NAME[self._dtype]
        self._shards = self._laid_out(mesh)
        self._streamed: StreamedBlocks | None = None
        kept = self._kept(weights, checkpoint)
        if kept.streams:
            self._schedule = self._schedule.one_by_one
            loader = ArrayLoader(checkpoint, self._schedule, dtype, self._shards)
            self._streamed = load_blocks(loader, kept.kept, self._device)
            self._params = Params(loader.outer(head=True), (), ())
        else:
            self._params, _ = load_params(
                checkpoint, self._schedule, head=True, dtype=dtype, shards=self._shards
            )
        self._compile()

    def _compile(self) -> None:
        self._run = jax.jit(self._forward, static_argnames=("taps", "spliced"))
        chosen = ("kind", "taps", "spliced", "scores_all")
        self._stage = jax.jit(self._one_stage, static_argnames=chosen)

    def _kept(self, weights: str, checkpoint: Checkpoint) -> Residency:
        """Where blocks are kept, for calls with the logits of one long context."""
        work = Workload(
            arch=self.arch,
            taps=parse_taps("logits", self.arch),
            cuts=self._shards.cuts if self._shards else ONE_DEVICE,
            seq_len=min(_LONG, self.arch.max_positions),
            rows=1,
            compute_dtype=self._dtype,
            store_dtype=activation_dtype(self._dtype),
            whole=True,
            packed=checkpoint.packed_bytes() if self._shards is None else {},
        )
        return choose_residency(
            lambda rows: replace(work, rows=rows),
            (1, 1),
            Runtime(weights=weights),
            Machine(self._device.platform, memory_limit(self._device)),
            most_rows=1,
        )

    def to(self, mesh: str) -> "Model":
        """Return the same model on another mesh; its weights are moved, not read again.

        The original stays where it is until it is freed: `model = model.to("1d")`.
        """
        if self._streamed is not None:
            raise ConfigError(
                "to: a model whose blocks are streamed stays on its mesh; load it anew"
            )
        other = copy.copy(self)
        other._shards = self._laid_out(mesh)
        if other._shards is None:
            other._params = jax.device_put(self._params, self._device)
        else:
            other._params = moved_params(self._params, other._shards)
        other._compile()
        return other

    def _laid_out(self, mesh: str) -> Shards | None:
        layout = parse_layout(mesh, jax.local_device_count(), 1, None)
        if layout is None:
            raise ConfigError("mesh: say which, e.g. 1, 1d, 2d or data=2,model=2; not auto")
        if layout.size == 1:
            return None
        cuts = Cuts.of(layout, axis_sizes(self.arch))
        return Shards(make_mesh(layout, jax.local_devices()), cuts, array_axes(self.arch))

    def __repr__(self) -> str:
        arch = self.arch
        return (
            f"<spile.Model {self._name}: {arch.num_layers} layers, width {arch.width}, "
            f"{self._dtype} on {self._device.platform}"
            + (f", mesh {self._shards.layout}>" if self._shards else ">")
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text."""
        return self._tokenizer.encode(list(texts))

    def __call__(
        self, tokens: Tokens, taps: str = "logits", *, splice: Splice | None = None
    ) -> dict[str, jax.Array]:
        """Return every tap's values [rows, seq, ...], by name; undefined beyond a context's end.

        One text is one row. `encode` returns the tokens of a text.

        A new function in `splice` compiles a new program: put arrays that change from call to call
        into a `jax.tree_util.Partial`.
        """
        ids, segments = self._padded(tokens)
        changes = self._changes(splice or {})
        chosen = parse_taps(taps, self.arch)
        rows, seq = ids.shape
        inputs = self._divided(ids, segments, spliced=bool(changes))
        if self._streamed is not None:
            found = self._in_turn(self._streamed, *inputs, changes, chosen)
        else:
            found = self._run(
                self._params,
                *inputs,
                tuple(changes.values()),
                taps=chosen,
                spliced=tuple(changes),
            )
        shaped: dict[str, jax.Array] = {}
        for tap in chosen:
            values = found[tap.name]
            values = values.reshape(*inputs[0].shape, *values.shape[1:])[:rows, :seq]
            shaped[tap.name] = values[..., :seq] if tap.site == "attn_pattern" else values
        return shaped

    def _divided(self, ids: np.ndarray, segments: np.ndarray, *, spliced: bool) -> tuple[Any, Any]:
        """Pad the inputs until the mesh divides their shape, and put them on it."""
        if self._shards is None:
            return ids, segments
        layout = self._shards.layout
        more = (-ids.shape[0] % layout.groups, -ids.shape[1] % layout.model)
        if spliced and any(more):
            raise ConfigError(
                f"on the mesh {layout} a splice needs a multiple of {layout.groups} contexts, the "
                f"longest of a multiple of {layout.model} tokens; got {list(ids.shape)}"
            )
        padded = (np.pad(array, [(0, n) for n in more]) for array in (ids, segments))
        first, second = (put(array, self._shards.by_rows) for array in padded)
        return first, second

    def loss(self, tokens: Tokens, *, splice: Splice | None = None) -> float:
        """Mean cross-entropy of the next token, in nats, over the tokens that have one."""
        _, segments = self._padded(tokens)
        logprob = np.asarray(self(tokens, "logprob", splice=splice)["logprob"])
        return -float(logprob[:, :-1][segments[:, 1:] > 0].mean(dtype=np.float64))

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
        if ids.min() < 0 or ids.max() >= self.arch.vocab_size:
            raise ConfigError(f"token ids must be 0 to {self.arch.vocab_size - 1}")
        return ids, segments

    def _changes(self, splice: Splice) -> dict[Tap, Partial]:
        changes: dict[Tap, Partial] = {}
        for name, given in splice.items():
            try:
                taps = parse_taps(name, self.arch)
            except ConfigError as error:
                raise ConfigError(str(error).replace("--taps", "splice", 1)) from None
            change = given if callable(given) else replaced(jnp.asarray(given))
            for tap in taps:
                if tap.heads:
                    raise ConfigError(f"splice {name!r}: all heads are changed together")
                if not tap.kind.spliced:
                    known = ", ".join(SPLICED)
                    raise ConfigError(f"splice {name!r}: only these can be changed: {known}")
                if tap in changes:
                    raise ConfigError(f"splice {name!r}: {tap.name} is changed twice")
                changes[tap] = change if isinstance(change, Partial) else Partial(change)
        return changes

    def _in_turn(
        self,
        blocks: StreamedBlocks,
        ids: Any,
        segments: Any,
        changes: Mapping[Tap, Partial],
        taps: tuple[Tap, ...],
    ) -> dict[str, jax.Array]:
        """The taps' values, from blocks that come one after another."""
        depth = self.arch.num_layers
        if len({computed_as(tap) for tap in changes}) < len(changes):
            raise ConfigError(
                "splice: resid_pre of a block is resid_post of the one before; name one"
            )
        tapped: dict[int, list[Tap]] = {stage: [] for stage in range(-1, depth + 1)}
        for tap in taps:
            tapped[stage_of(tap, depth)].append(tap)
        deepest = max(stage for stage, some in tapped.items() if some)
        values: dict[str, jax.Array] = {}
        stream: Any = None
        own: tuple[Any, ...] = ()
        lent: dict[int | None, Any] = {}
        for stage in range(-1, deepest + 1):
            inside = 0 <= stage < depth
            kind = self.arch.layers[stage] if inside else None
            borrowed = lent[kind.window] if kind and kind.borrows else None
            spliced = {tap: c for tap, c in changes.items() if stage_of(tap, depth) == stage}
            stream, onward, found = self._stage(
                blocks.take(stage) if inside else self._params.outer,
                stream,
                (own[stage] if kind and own else None, borrowed),
                ids,
                segments,
                tuple(spliced.values()),
                kind=kind or stage == depth,
                taps=tuple(dict.fromkeys(map(of_any_block, tapped[stage]))),
                spliced=tuple(map(of_any_block, spliced)),
                scores_all=any(tap.site == "attn_pattern" for tap in taps),
            )
            if kind:
                blocks.used(stage, stream)
                lent |= {} if onward is None else {kind.window: onward}
            elif stage < 0:
                own = onward
            values |= {tap.name: found[of_any_block(tap).name] for tap in tapped[stage]}
        return values

    def _one_stage(
        self,
        weights: Any,
        stream: Any,
        beside: Any,
        ids: jax.Array,
        segments: jax.Array,
        changes: tuple[Partial, ...],
        *,
        kind: Layer | bool,
        taps: tuple[Tap, ...],
        spliced: tuple[Tap, ...],
        scores_all: bool,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """A block of a kind; or what is before the blocks (False), or after them (True).

        `beside` is what a block reads besides the stream, and returned is what goes on with that:
        see `run/step/sweep.py`.
        """
        computed, seq = activation_dtype(self._dtype), ids.shape[1]
        positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), ids.shape)
        inputs = (ids, positions, segments, None)
        given: dict[str, Any] = {"arch": self.arch, "taps": taps, "shards": self._shards}
        given["store_dtype"] = computed
        splice = dict(zip(spliced, changes, strict=True))
        with jax.default_matmul_precision("highest" if self._dtype == "float32" else "default"):
            if kind is True:
                return stream, None, after_blocks(weights, stream, inputs, **given)
            if kind is False:
                return before_blocks(weights, None, inputs, splice=splice, **given)
            attention = for_platform(
                self._device.platform, self.arch, computed, seq_len=seq, contexts=1
            )
            return one_block(
                weights,
                stream,
                inputs,
                layer=kind,
                own=beside[0],
                lent=beside[1],
                attention=attention,
                scores_all=scores_all,
                splice=splice,
                **given,
            )

    def _forward(
        self,
        params: Params,
        ids: jax.Array,
        segments: jax.Array,
        changes: tuple[Partial, ...],
        *,
        taps: tuple[Tap, ...],
        spliced: tuple[Tap, ...],
    ) -> dict[str, jax.Array]:
        seq, computed = ids.shape[1], activation_dtype(self._dtype)
        positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), ids.shape)
        attention = for_platform(
            self._device.platform, self.arch, computed, seq_len=seq, contexts=1
        )
        with jax.default_matmul_precision("highest" if self._dtype == "float32" else "default"):
            return forward(
                params,
                ids,
                positions,
                segments,
                arch=self.arch,
                taps=taps,
                attention=attention,
                schedule=self._schedule,
                store_dtype=computed,
                shards=self._shards,
                splice=dict(zip(spliced, changes, strict=True)),
            )
