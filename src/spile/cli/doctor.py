"""The verb that reports what this machine has, what is missing, and how to get it."""

import argparse
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from spile import __version__
from spile.cli.flags import Verbs
from spile.core.cache_dir import cache_directory
from spile.core.errors import SpileError
from spile.core.humanize import size

# Each extra, a package that it installs, and its purpose.
_EXTRAS = (
    ("hub", "huggingface_hub", "models and corpora of the Hugging Face Hub, spile push"),
    ("cloud", "obstore", "gs:// and s3://"),
    ("chat", "jinja2", "chat templates (--messages)"),
    ("check", "transformers", "spile check"),
    ("demo", "gguf", "--model demo, spile convert"),
    ("datasets", "datasets", "corpora that only the datasets library reads"),
    ("ray", "ray", "--engine ray"),
    ("tensorboard", "tensorboardX", "--metrics tensorboard:DIR"),
    ("wandb", "wandb", "--metrics wandb:PROJECT"),
    ("prometheus", "prometheus_client", "--metrics prometheus:PORT"),
)
# Where each service's own tools look for credentials. Only their presence is checked.
_CREDENTIALS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "Hugging Face": (
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        ("${HF_HOME:-~/.cache/huggingface}/token",),
    ),
    "Google Cloud": (
        ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"),
        ("~/.config/gcloud/application_default_credentials.json",),
    ),
    "AWS": (("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN"), ("~/.aws/credentials",)),
}


@dataclass(frozen=True)
class Diagnosis:
    """What a machine has for Spile.

    Attributes:
        problem: the reason why no device could be started.
        slow: the missing attention kernels, each with the reason.
        extras: versions by extra; None if not installed.
        credentials: where they were found, by service; None if missing.
    """

    spile: str
    python: str
    jax: str
    platform: str
    device: str
    devices: int
    device_memory: int | None
    problem: str | None
    slow: str | None
    cores: int
    memory: int
    extras: Mapping[str, str | None]
    credentials: Mapping[str, str | None]
    cache: str
    cache_free: int


def add_doctor(verbs: Verbs) -> None:
    verbs.add("doctor", doctor, "report what this machine has for Spile, and what is missing")


def doctor(arguments: argparse.Namespace) -> int:
    found = diagnose()
    print(json.dumps(asdict(found)) if arguments.json else doctor_text(found))
    return 0 if found.problem is None else SpileError.exit_code


def diagnose() -> Diagnosis:
    """Examine this machine. Starts its devices; contacts no other machine."""
    name, count, kind, limit, problem, slow = "none", 0, "", None, None, None
    try:
        from spile.models.forward.kernels.attention import missing_kernels
        from spile.run.world.devices import devices_here, memory_limit, prepared_device

        limit = memory_limit(prepared_device())
        name, count, kind = devices_here()
        missing = dict(missing_kernels()) if name == "gpu" else dict[str, str]()
        slow = "; ".join(f"{kernel}: {why}" for kernel, why in missing.items()) or None
    except SpileError as error:
        problem = str(error)
    cache = cache_directory()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return Diagnosis(
        spile=__version__,
        python=platform.python_version(),
        jax=_version("jax") or "none",
        platform=name,
        device=kind,
        devices=count,
        device_memory=limit,
        problem=problem,
        slow=slow,
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        extras={extra: _version(package) for extra, package, _ in _EXTRAS},
        credentials={service: _found(*where) for service, where in _CREDENTIALS.items()},
        cache=str(cache),
        cache_free=shutil.disk_usage(there).free,
    )


def doctor_text(found: Diagnosis) -> str:
    """Format a diagnosis, about twenty lines."""
    lines = [
        f"spile {found.spile}, Python {found.python}, jax {found.jax}, "
        f"{platform.system()} {platform.machine()}",
        f"host         {found.cores} cores, {size(found.memory)} of memory",
    ]
    if found.problem:
        lines.append(f"devices      none could be started: {found.problem}")
    else:
        each = f", {size(found.device_memory)} each" if found.device_memory else ""
        lines.append(f"devices      {found.devices} x {found.device} ({found.platform}{each})")
    kernel = {
        "gpu": "all kernels are here",
        "tpu": "splash attention",
        "cpu": "in blocks, no extra",
    }
    told = f"without {found.slow}" if found.slow else kernel.get(found.platform, "in blocks")
    lines.append(f"attention    {told}")
    lines.append(f"cache        {found.cache}, {size(found.cache_free)} free")
    for number, (service, where) in enumerate(found.credentials.items()):
        title = "" if number else "credentials"
        lines.append(f"{title:13}{service}: {where or 'none found'}")
    for number, (extra, package, purpose) in enumerate(_EXTRAS):
        title, version = "" if number else "extras", found.extras[extra]
        state = f"{package} {version}" if version else f"missing: pip install 'spile[{extra}]'"
        lines.append(f"{title:13}{extra:12} {state}  ({purpose})")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _found(variables: Sequence[str], files: Sequence[str]) -> str | None:
    """Return the name of the first that exists, never its content."""
    for name in variables:
        if os.environ.get(name):
            return f"${name}"
    for file in files:
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        path = Path(file.replace("${HF_HOME:-~/.cache/huggingface}", home)).expanduser()
        if path.is_file():
            return str(path)
    return None
