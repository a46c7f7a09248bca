"""The compute dtype of a run: the one that is given, or the one that suits its devices. No jax."""

import logging

from spile.core.config import HAS_BFLOAT16
from spile.core.errors import ConfigError

_log = logging.getLogger("spile.plan")


def settled_compute_dtype(given: str | None, platform: str, capability: float = 0.0) -> str:
    """Return the compute dtype, and log why it is float16, or slow.

    Args:
        given: by the user or by the dataset; None: it depends on the devices.
        capability: the compute capability of NVIDIA GPUs; 0 for other devices.

    Raises:
        ConfigError: if the devices cannot compute in the dtype that is given.
    """
    if given == "float16" and platform == "tpu":
        raise ConfigError("--compute-dtype float16 is for GPUs; TPUs multiply bfloat16")
    if platform == "cpu":
        return given or "float32"
    lacking = f"a GPU of compute capability {capability:g} has no bfloat16"
    if not 0 < capability < HAS_BFLOAT16:
        return given or "bfloat16"
    if given is None:
        _log.info("%s: products are in float16, all else in float32", lacking)
    elif given != "float32" and given != "float16":
        _log.warning(
            "%s and emulates --compute-dtype %s, which is slow; a new dataset can be in float16",
            *(lacking, given),
        )
    return given or "float16"
