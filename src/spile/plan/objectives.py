"""`--objective`: find what gradients are of. No jax.

logprob                      the sum of the log-probabilities of all next tokens
loss:assistant               less that sum over the tokens of a role alone
logit-diff:COLUMN_A,COLUMN_B the logit of one token less that of another, at a document's last
direction:TAP=FILE.npy       the sum over tokens of a tap's dot product with a vector
FILE.py:FUNCTION             returns {tap: a function of its values}: a number for each token
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spile.core.errors import ConfigError, InputError
from spile.core.identity import full_digest
from spile.core.pool import SPEAKERS
from spile.models.config.arch import Arch
from spile.models.objectives import DIRECTION, FUNCTION, LOGIT_DIFF, LOGPROB, LOSS, Objective
from spile.models.sites import LENSES
from spile.models.splices import digest
from spile.models.taps import Tap, computed_as, parse_taps, place_of
from spile.plan.splices import read_rows, returned_by_tap

_PROGRAM = re.compile(r"(.+\.py):(\w+)")
_DIRECTION = re.compile(rf"{DIRECTION}:([^=]+)=(.+)")
_COLUMNS = re.compile(rf"{LOGIT_DIFF}:([^,\s]+),([^,\s]+)")
_APART = ("attn_pattern", "delta_state_norm")  # computed beside the model, if they are stored
_KINDS = (
    f"{LOGPROB}, {LOSS}:ROLE, {LOGIT_DIFF}:COLUMN_A,COLUMN_B, {DIRECTION}:TAP=FILE.npy, "
    "FILE.py:FUNCTION"
)
_COMPUTED = ("float32", "bfloat16")


def objective_source(given: str | None, change: Callable[[str], str]) -> str | None:
    """Return `--objective` with its path changed; that of a program becomes absolute."""
    if given is None:
        return None
    if program := _PROGRAM.fullmatch(given):
        return f"{os.path.abspath(program[1])}:{program[2]}"
    if found := _DIRECTION.fullmatch(given):
        return f"{DIRECTION}:{found[1]}={change(found[2])}"
    return given


def names_program(given: str | None) -> bool:
    """Return whether an objective is a user's function, which no store may run."""
    return given is not None and _PROGRAM.fullmatch(given) is not None


def find_objective(
    given: str | None, taps: Sequence[Tap], arch: Arch, compute_dtype: str
) -> Objective | None:
    """Return the objective of a recipe; None if it taps no gradient. Calls the user's function.

    Raises:
        ConfigError: if it is unknown, does not fit the model, or no gradient is tapped.
    """
    gradients = [tap for tap in taps if tap.kind.of]
    if not gradients:
        if given is not None:
            raise ConfigError(
                f"--objective {given}: no tap holds a gradient; add e.g. resid_post_grad:4"
            )
        return None
    if compute_dtype not in _COMPUTED:
        raise ConfigError(
            f"{gradients[0].name}: gradients are computed in bfloat16 or float32, not "
            f"{compute_dtype}; give --compute-dtype"
        )
    found = _found(given or LOGPROB, arch)
    for tap in gradients:
        source, *aims = (
            place_of(computed_as(each), arch)[:3] for each in (tap.source, *found.aims)
        )
        if source > max(aims):
            raise ConfigError(
                f"--objective {given or LOGPROB}: does not depend on {tap.source.name}, which is "
                "computed later; leave out the tap"
            )
    return found


def _found(given: str, arch: Arch) -> Objective:
    if given == LOGPROB:
        return Objective(kind=LOGPROB, identity=given, aims=(Tap("logprob"),))
    kind, _, role = given.partition(":")
    if kind == LOSS:
        if role not in SPEAKERS:
            raise ConfigError(f"--objective {given}: write {LOSS}:ROLE, of {', '.join(SPEAKERS)}")
        return Objective(kind=LOSS, identity=given, aims=(Tap("logprob"),))
    if _COLUMNS.fullmatch(given):
        return Objective(kind=LOGIT_DIFF, identity=given, aims=(Tap("logits"),))
    if found := _DIRECTION.fullmatch(given):
        (tap,) = _taps(given, found[1], arch, single=True)
        shape = tap.shape(arch, 1)
        flag = f"--objective {given}"
        (vector,) = read_rows(flag, found[2], shape, several=False)
        told = f"{DIRECTION} {tap.name} {digest(vector)}"
        return Objective(kind=DIRECTION, identity=told, aims=(tap,), vector=vector.reshape(shape))
    if program := _PROGRAM.fullmatch(given):
        return _program(Path(os.path.abspath(program[1])), program[2], arch)
    raise ConfigError(f"--objective {given}: choose from {_KINDS}")


def _taps(given: str, named: str, arch: Arch, *, single: bool = False) -> tuple[Tap, ...]:
    try:
        taps = parse_taps(named, arch)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--taps", f"--objective {given}:", 1)) from None
    if single and len(taps) > 1:
        raise ConfigError(f"--objective {given}: name one tap, not {len(taps)}")
    for tap in taps:
        kind = tap.kind
        indirect = tap.site in (*_APART, *LENSES)
        if tap.heads or kind.of or kind.of_chosen or kind.largest_of or indirect:
            raise ConfigError(
                f"--objective {given}: {tap.name} cannot be differentiated; name a whole tap whose "
                "values are numbers"
            )
        if tap.dtype("float32") != "float32":
            raise ConfigError(f"--objective {given}: {tap.name} holds ids")
    return taps


def _program(path: Path, name: str, arch: Arch) -> Objective:
    shown = f"--objective {path}:{name}"
    returned = returned_by_tap("--objective", path, name, "(values**2).sum(-1)")
    functions: dict[str, Callable[[Any], Any]] = {}
    aims: list[Tap] = []
    for named, each in returned.items():
        (tap,) = _taps(f"{path.name}:{name}", str(named), arch, single=True)
        if not callable(each):
            raise InputError(f"{shown}: {named}: not a function of the tap's values")
        functions[tap.name] = each
        aims.append(tap)
    told = f"{FUNCTION} {name} {full_digest(path)}"
    return Objective(kind=FUNCTION, identity=told, aims=tuple(aims), functions=functions)
