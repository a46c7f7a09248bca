"""The keys of a `config.json`, and the layers that they describe.

Keys are read through the row of their family: spellings, defaults, types. A layer has a mixer, a
window, a rotary setting and an MLP.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.models.config.arch import Layer
from spile.models.config.family import Family
from spile.models.config.rope import positive

KINDS = ("full_attention", "sliding_attention")
_MOST = 1 << 31  # larger than any number in a model: a config is untrusted
_LINEAR = "linear_attention"  # layers that mix tokens by the gated delta rule, or a state space
# Other spellings of kinds of layers, in lists and in patterns.
_SPELLED = {
    "attention": KINDS[0], "*": KINDS[0], "mamba": _LINEAR, "M": _LINEAR, "-": "mlp", "E": "moe",
}  # fmt: skip
_MOST_LAYERS = 4096  # they are listed one by one
_CHUNKED = "chunked_attention"


class ConfigKeys:
    """A config that records which of its keys are read."""

    def __init__(self, values: Mapping[str, Any], family: Family, where: str) -> None:
        self.values, self.family, self.where = values, family, where
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key by its usual name, or the default of transformers if it is missing."""
        spelled = self.family.keys.get(key, key)
        names = (spelled,) if isinstance(spelled, str) else spelled
        self.seen.update(names)
        written = (self.values[name] for name in names if name in self.values)
        return next(written, self.family.defaults.get(key, default))

    def error(self, problem: str) -> InputError:
        return InputError(f"{self.where}: {problem}")

    def extra(self, key: str) -> Any:
        """A key that only some families read; the others refuse it."""
        return self.get(key) if key in self.family.reads else self.family.defaults.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < _MOST:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return value

    def whole(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 <= value < _MOST:
            raise self.error(f"{key} must be a number from 0, got {value!r}")
        return value

    def switch(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(f"{key} must be true or false, got {value!r}")
        return bool(value)

    def amount(self, key: str) -> float | None:
        value = self.extra(key)
        return None if value is None else positive(value, key, self.where)


def are_kinds(given: Any, kinds: tuple[Any, ...]) -> bool:
    return isinstance(given, list) and all(kind in kinds for kind in cast("list[Any]", given))


def read_layers(config: ConfigKeys, ropes: int) -> tuple[Layer, ...]:
    """The kind of every block: full attention, or a sliding window."""
    rule = config.family.windows
    listed = config.extra("layer_types") or config.extra("hybrid_override_pattern")
    written = len(cast("list[Any]", listed)) if isinstance(listed, list | str) else None
    count = config.number("num_hidden_layers", written)
    window = None if rule == "never" else config.extra("sliding_window")
    if count > _MOST_LAYERS:
        raise config.error(f"num_hidden_layers must be at most {_MOST_LAYERS}")
    if config.family.kinds:
        return _hybrid_layers(config, count)
    if "attention_chunk_size" in config.family.reads:
        return _chunked_layers(config, count)
    if "use_sliding_window" in config.family.reads and not config.switch("use_sliding_window"):
        window = None
    if window is not None and (type(window) is not int or not 0 < window < _MOST):
        raise config.error("sliding_window must be a positive number or null")
    given = config.extra("layer_types") if "layer_types" in config.family.reads else None
    rule = "never" if given is not None else rule
    first, pattern = config.extra("max_window_layers"), config.extra("sliding_window_pattern")
    if rule in ("upper", "lower") and (type(first) is not int or first < 0):
        raise config.error(f"max_window_layers must be a number, got {first!r}")
    if rule == "pattern" and (type(pattern) is not int or pattern < 1):
        raise config.error(f"sliding_window_pattern must be a positive number, got {pattern!r}")
    rules: dict[str, Callable[[int], bool]] = {
        "never": lambda i: False,
        "always": lambda i: window is not None,
        "upper": lambda i: window is not None and i >= first,
        "lower": lambda i: window is not None and i < first and i % 2 == 0,
        "pattern": lambda i: (i + 1) % pattern != 0,
        "listed": lambda i: listed[i],
        "unrotated": lambda i: window is not None and not rotated[i],
        "but_fourth": lambda i: (count - 1 - i) % 4 != 0,
    }
    rotated = _rotated(config, count)
    listed = _listed(config, count) if rule == "listed" else []
    slides = rules[rule]
    kinds = [KINDS[slides(i)] for i in range(count)]
    if given is not None:
        if not are_kinds(given, KINDS) or len(given) != count:
            raise config.error(f"layer_types must say {' or '.join(KINDS)} for each layer")
        kinds = list(given)
    if KINDS[1] in kinds and window is None:
        raise config.error("sliding layers, but no sliding_window")
    if config.family.full_unrotated and window is not None:
        rotated = [kind == KINDS[1] for kind in kinds]
    slid = Layer(window, ropes - 1 if ropes else 0)
    layers = [slid if kind == KINDS[1] else Layer() for kind in kinds]
    return tuple(
        replace(layer, rope=layer.rope if turned else None, dense=dense)
        for layer, turned, dense in zip(layers, rotated, _dense(config, count), strict=True)
    )


def with_own_sizes(config: ConfigKeys, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers with heads and MLPs of their own sizes, and those that borrow keys and values."""
    if "per_layer_config" not in config.family.reads:
        return layers
    if layers[-1].window is not None:
        raise config.error(f"layer_types must end in {KINDS[0]}")
    borrowing, alike = config.whole("num_kv_shared_layers"), config.switch("attention_k_eq_v")
    first = len(layers) - borrowing
    if not {layer.window for layer in layers} <= {layer.window for layer in layers[:first]}:
        raise config.error(
            f"num_kv_shared_layers {borrowing} leaves no layer of each kind whose keys "
            "and values the others share"
        )
    sizes = _sizes_by_layer(config, layers, alike)
    doubled = "use_double_wide_mlp" in config.family.reads and config.switch("use_double_wide_mlp")
    wide = 2 * config.number("intermediate_size") if doubled else None
    return tuple(
        replace(
            layer,
            **sizes.get(number, {}),
            keys_as_values=alike and layer.window is None and number < first,
            borrows=number >= first,
            mlp_width=wide if number >= first else None,
        )
        for number, layer in enumerate(layers)
    )


def _sizes_by_layer(
    config: ConfigKeys, layers: tuple[Layer, ...], alike: bool
) -> dict[int, dict[str, int]]:
    """Head sizes and numbers of keys that differ from the others', by layer.

    Full layers have them, by two keys or layer by layer, as transformers writes it.
    """
    names = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    wide = {"head_dim": config.number("global_head_dim")}
    if config.get("num_global_key_value_heads") is not None and alike:
        wide["num_key_value_heads"] = config.number("num_global_key_value_heads")
    full = [number for number, layer in enumerate(layers) if layer.window is None]
    given: Json = config.get("per_layer_config")
    written: dict[int, Any] = dict.fromkeys(full, wide)
    if given is not None:
        keys = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {"": None}
        written = {int(key) if key.isdecimal() else -1: keys[key] for key in keys}
    every = list(written.values())
    found: Any = every[0] if every else {}
    sizes = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {"": found})
    known = set(sizes) <= set(names) and all(
        type(size) is int and 0 < size < _MOST for size in sizes.values()
    )
    if not known or set(written) not in ({*full}, set()) or every[1:] != every[:-1]:
        raise config.error(
            f"per_layer_config must give the same head_dim and num_key_value_heads for "
            f"each {KINDS[0]} layer, and nothing for others"
        )
    own = {names[name]: size for name, size in sizes.items()}
    return dict.fromkeys(full, own)


def _listed(config: ConfigKeys, count: int) -> list[bool]:
    """Which layers slide, from a list of runs: kinds in turn, and how often they are repeated."""
    given = config.get("attention_types")
    runs = cast("list[Any]", given) if isinstance(given, list) else []
    kinds: list[Any] = []
    for run in runs:
        pair = cast("list[Any]", run) if isinstance(run, list) else []
        if (
            len(pair) != 2
            or not are_kinds(pair[0], ("global", "local"))
            or type(pair[1]) is not int
        ):
            break
        kinds += pair[0][: count + 1] * min(pair[1], count + 1)
    if len(kinds) != count:
        raise config.error(
            f"attention_types must say global or local for each layer, as in "
            f'[[["global", "local"], {count // 2}]]'
        )
    return [kind == "local" for kind in kinds]


def _hybrid_layers(config: ConfigKeys, count: int) -> tuple[Layer, ...]:
    """Layers of the kinds that are listed, or spelled by a letter each, or counted."""
    family, reads = config.family, config.family.reads
    names = list(family.kinds)
    kinds: Any = config.extra("layer_types")
    if "hybrid_override_pattern" in reads:
        pattern = config.get("hybrid_override_pattern")
        if kinds is None and not isinstance(pattern, str):
            raise config.error(
                f"hybrid_override_pattern must have a letter for each layer, got {pattern!r}"
            )
        kinds = list(pattern) if kinds is None else kinds
    attend: list[int] | None = None
    if "full_attention_interval" in reads:
        interval = config.number("full_attention_interval")
        attend = list(range(interval - 1, count, interval))
    numbers = tuple(range(family.first_listed, family.first_listed + count))
    if "attention_layers" in reads and (given := config.get("attention_layers")) is not None:
        if not are_kinds(given, numbers):
            raise config.error(f"{given!r} is not a list of the layers that attend")
        attend = [number - family.first_listed for number in given]
        others = sorted({*numbers} - {*given})
        if "linear_layers" in reads and config.get("linear_layers") != others:
            raise config.error(
                f"{family.keys['linear_layers']} must be the layers that do not attend, {others}"
            )
    if kinds is None and attend is not None:
        (other,) = set(names) - {KINDS[0]}
        kinds = [KINDS[0] if i in attend else other for i in range(count)]
    if kinds is None and family.unlisted:
        kinds = [family.unlisted] * count
    if isinstance(kinds, list):
        written = cast("list[Any]", kinds)
        kinds = [_SPELLED.get(kind, kind) if isinstance(kind, str) else kind for kind in written]
    if not are_kinds(kinds, tuple(names)) or len(cast("list[Any]", kinds)) != count:
        raise config.error(f"layer_types must say {' or '.join(names)} for each layer")
    layers = [family.kinds[kind] for kind in cast("list[str]", kinds)]
    if any(kind.dense for kind in family.kinds.values()):
        return tuple(layers)
    return tuple(
        replace(layer, dense=dense)
        for layer, dense in zip(layers, _dense(config, count), strict=True)
    )


def _chunked_layers(config: ConfigKeys, count: int) -> tuple[Layer, ...]:
    """Chunks in the layers that are listed, or in those that rotate q and k."""
    size, rotated = config.number("attention_chunk_size"), _rotated(config, count)
    by_rotation = [_CHUNKED if turned else KINDS[0] for turned in rotated]
    given = config.get("layer_types")
    kinds: Any = by_rotation if given is None else given
    if not are_kinds(kinds, (KINDS[0], _CHUNKED)) or len(kinds) != count:
        raise config.error(f"layer_types must say {KINDS[0]} or {_CHUNKED} for each layer")
    return tuple(
        Layer(rope=0 if turned else None, dense=dense, chunk=size if kind == _CHUNKED else None)
        for kind, turned, dense in zip(kinds, rotated, _dense(config, count), strict=True)
    )


def _dense(config: ConfigKeys, count: int) -> list[bool]:
    """Which layers have a plain MLP, where others have experts."""
    if "dense_size" not in config.family.reads:
        return [False] * count
    listed = config.extra("mlp_layer_types")
    if "first_k_dense_replace" in config.family.reads:
        first = config.whole("first_k_dense_replace")
        if listed is None:
            return [i < first for i in range(count)]
    if "moe_layer_interval" in config.family.reads:
        interval, first = config.number("moe_layer_interval"), config.whole("moe_layer_start_index")
        last = config.get("moe_layer_end_index")
        last = count - 1 if last == -1 else config.whole("moe_layer_end_index")
        return [(i + 1) % interval != 0 or not first <= i <= last for i in range(count)]
    if "moe_layers" in config.family.reads:
        step, given = config.number("interleave_moe_layer_step"), config.get("moe_layers")
        listed = list(range(step - 1, count, step)) if given is None else given
        if not are_kinds(listed, tuple(range(count))):
            raise config.error(f"moe_layers must be a list of layers, got {given!r}")
        return [i not in listed for i in range(count)]
    if "mlp_layer_types" in config.family.reads:
        if listed is None:
            return [i == 0 for i in range(count)]
        if not are_kinds(listed, ("dense", "sparse")) or len(listed) != count:
            raise config.error("mlp_layer_types must say dense or sparse for each layer")
        return [kind == "dense" for kind in listed]
    step, given = config.number("decoder_sparse_step"), config.get("mlp_only_layers")
    if given is not None and not isinstance(given, list):
        raise config.error(f"mlp_only_layers must be a list of layers, got {given!r}")
    plain = cast("list[Any]", given or [])
    return [i in plain or (i + 1) % step != 0 for i in range(count)]


def _rotated(config: ConfigKeys, count: int) -> list[bool]:
    """Which layers rotate q and k: all, but in families that leave some out."""
    if "layer_rope_theta" in config.family.reads:
        return _rotated_by_theta(config, count)
    if "no_rope_layers" not in config.family.reads:
        return [True] * count
    interval, given = config.number("no_rope_layer_interval"), config.extra("no_rope_layers")
    if given is None or given == []:
        return [(i + 1) % interval != 0 for i in range(count)]
    if not are_kinds(given, (0, 1)) or len(given) < count:
        raise config.error("no_rope_layers must say 0 or 1 for each layer")
    return [bool(each) for each in given[:count]]


def _rotated_by_theta(config: ConfigKeys, count: int) -> list[bool]:
    """Which layers rotate, from `layer_rope_theta`: 0 means not; the others share one value."""
    given = config.get("layer_rope_theta")
    if given is None:
        return [(count - 1 - i) % 4 != 0 for i in range(count)]
    bases = cast("list[Any]", given) if isinstance(given, list) else []
    if len(bases) != count or len({base for base in bases if base}) > 1:
        raise config.error(
            "layer_rope_theta must be zero, or one and the same number, for each layer"
        )
    return [bool(base) for base in bases]
