"""Kubernetes: an Indexed Job for slices of one host, or a JobSet for each slice of several.

Each slice of several hosts has its own JobSet, so that restarting one leaves the others alone.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spile.core.errors import ConfigError
from spile.launch.command import Command
from spile.launch.job import GOOGLE_KEY, GRACE, PORT, LaunchJob
from spile.launch.target import (
    LaunchTarget,
    TargetFlags,
    TargetRow,
    check_counts,
    from_flags,
    to_yaml,
)

# GKE's machine names of each generation, and the chips per host of a larger slice.
_TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
_CHIPS = 4
_ONE_HOST = {"1x1": 1, "2x2": 4, "2x4": 8}  # for v5e and v6e
_PERMANENT = [2]  # exit codes of errors that a restart cannot fix
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}  # preempted, or its node drained
_BACKOFF = 6  # of a pod that fails by itself
_RESTARTS = 100  # of a slice: each lost host costs one
_KEY_FOLDER = "/credentials"
_SECRET_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?):([A-Za-z0-9_.-]+)")
_CLAIM = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?):(/.*)", re.DOTALL)
_USER = 1000  # of the image
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class Tpu:
    """A slice of TPU chips, in GKE's terms."""

    accelerator: str
    topology: str
    hosts: int
    chips: int  # of each host


def parse_tpu(text: str) -> Tpu:
    """Parse `v5e:8x8`."""
    generation, _, topology = text.partition(":")
    sizes = topology.split("x")
    if generation not in _TPUS or not all(size.isdecimal() and int(size) for size in sizes):
        known = ", ".join(_TPUS)
        raise ConfigError(f"--tpu must be like v5e:8x8, of {known}; got {text!r}")
    flat = generation in ("v5e", "v6e")
    if len(sizes) != (2 if flat else 3):
        raise ConfigError(f"--tpu {text}: {generation} has {2 if flat else 3} axes, like "
                          f"{'8x8' if flat else '4x4x4'}")  # fmt: skip
    chips = math.prod(map(int, sizes))
    each = _ONE_HOST[topology] if flat and topology in _ONE_HOST else _CHIPS
    if chips % each:
        raise ConfigError(f"--tpu {text}: {chips} chips are not whole hosts of {each}")
    return Tpu(_TPUS[generation], topology, chips // each, each)


@dataclass(frozen=True, kw_only=True)
class Kubernetes(LaunchTarget):
    slices: int = 1
    world_size: int = 1
    tpu: Tpu | None = None
    gpus: int = 0  # of each host
    cpus: str | None = None
    memory: str | None = None
    spot: bool = False
    namespace: str | None = None
    context: str | None = None
    service_account: str | None = None
    claim: tuple[str, ...] = ()  # CLAIM:/PATH
    key: str | None = None  # SECRET:KEY of a service account

    def __post_init__(self) -> None:
        check_counts(slices=self.slices, world_size=self.world_size)
        for claim in self.claim:
            if not _CLAIM.fullmatch(claim):
                raise ConfigError(f"--claim must be CLAIM:/PATH, got {claim!r}")
        if self.key is not None and not _SECRET_KEY.fullmatch(self.key):
            raise ConfigError(f"--credentials-secret must be SECRET:KEY, got {self.key!r}")
        if self.tpu and self.world_size not in (1, self.tpu.hosts):
            raise ConfigError(
                f"--world-size {self.world_size}: such a TPU slice has {self.tpu.hosts} hosts, "
                "which are one world"
            )
        if self.tpu and self.gpus:
            raise ConfigError("--tpu and --gpus: a host has one kind of device")

    @property
    def processes(self) -> int:
        """Processes of each slice."""
        return self.tpu.hosts if self.tpu else self.world_size

    def render(self, job: LaunchJob) -> Sequence[Command]:
        text = "---\n".join(to_yaml(manifest) for manifest in self.manifests(job))
        return [Command(argv=(*self._kubectl(), "apply", "--filename=-"), stdin=text)]

    def manifests(self, job: LaunchJob) -> list[dict[str, Any]]:
        """The manifests to apply, as data."""
        if job.container is None:
            raise ConfigError("--container IMAGE@sha256:DIGEST is missing: what should pods run?")
        if job.setup or job.folder or job.credentials:
            raise ConfigError(
                "--setup, --folder and --credentials are for hosts; pods take an image, and "
                "--credentials-secret SECRET:KEY"
            )
        found: list[dict[str, Any]] = []
        if job.secrets:
            metadata = self._metadata(job, _secret(job))
            head = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
            found.append({**head, "type": "Opaque", "stringData": dict(job.secrets)})
        if self.processes == 1:
            return [*found, self._indexed_job(job)]
        return [*found, *(self._jobset(job, number) for number in range(self.slices))]

    def status(self, job: LaunchJob) -> Sequence[Command]:
        kinds = "jobs.batch,pods" if self.processes == 1 else f"{self._kind},pods"
        return [Command(argv=(*self._kubectl(), "get", kinds, self._selector(job)))]

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        pods = self.slices * self.processes
        argv = (*self._kubectl(), "logs", self._selector(job), f"--tail={lines}", "--prefix",
                f"--max-log-requests={max(5, pods)}")  # fmt: skip
        return [Command(argv=argv)]

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        argv = (*self._kubectl(), "delete", f"{self._kind},secrets", self._selector(job))
        return [Command(argv=argv)]

    @property
    def _kind(self) -> str:
        return "jobs.batch" if self.processes == 1 else "jobsets.jobset.x-k8s.io"

    def _kubectl(self) -> tuple[str, ...]:
        context = () if self.context is None else (f"--context={self.context}",)
        namespace = () if self.namespace is None else (f"--namespace={self.namespace}",)
        return ("kubectl", *context, *namespace)

    @staticmethod
    def _selector(job: LaunchJob) -> str:
        return f"--selector=app.kubernetes.io/name=spile,app.kubernetes.io/instance={job.name}"

    @staticmethod
    def _labels(job: LaunchJob) -> dict[str, str]:
        return {"app.kubernetes.io/name": "spile", "app.kubernetes.io/instance": job.name}

    def _metadata(self, job: LaunchJob, name: str) -> dict[str, Any]:
        return {"name": name, "labels": self._labels(job)}

    def _indexed_job(self, job: LaunchJob) -> dict[str, Any]:
        """Slices of one host each; a pod that fails is retried by itself."""
        env: list[dict[str, Any]] = []
        if self.slices > 1:
            index = {"name": "MACHINE_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
            env = [index, {"name": "TOTAL_MACHINES", "value": str(self.slices)}]
        rules = [
            {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": _PERMANENT}},
            {"action": "Ignore", "onPodConditions": [_DISRUPTED]},
        ]
        spec = {
            "completionMode": "Indexed", "completions": self.slices, "parallelism": self.slices,
            "backoffLimitPerIndex": _BACKOFF, "podFailurePolicy": {"rules": rules},
            "template": self._pod(job, env),
        }  # fmt: skip
        metadata = self._metadata(job, job.name)
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}

    def _jobset(self, job: LaunchJob, number: int) -> dict[str, Any]:
        """A slice of several hosts, which end together and restart together."""
        name = f"{job.name}-{number}"
        metadata = self._metadata(job, name)
        if self.tpu:
            # A slice's pods share one node pool, which no other slice uses.
            topology = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            metadata["annotations"] = {topology: "cloud.google.com/gke-nodepool"}
        env: list[dict[str, Any]] = [
            {"name": "COORDINATOR_ADDRESS", "value": f"{name}-slice-0-0.{name}:{PORT}"},
            {"name": "NUM_HOSTS", "value": str(self.processes)},
            {"name": "HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        ]
        if self.slices > 1:
            env.append({"name": "MACHINE_ID", "value": str(number)})
            env.append({"name": "TOTAL_MACHINES", "value": str(self.slices)})
        rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": _PERMANENT}}]
        spec = {
            "completionMode": "Indexed", "completions": self.processes,
            "parallelism": self.processes, "backoffLimit": 0, "podFailurePolicy": {"rules": rules},
            "template": self._pod(job, env),
        }  # fmt: skip
        permanent = {"name": "permanent", "action": "FailJobSet",
                     "onJobFailureReasons": ["PodFailurePolicy"]}  # fmt: skip
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
            "spec": {
                "failurePolicy": {
                    "maxRestarts": _RESTARTS if job.restarts is None else job.restarts,
                    "rules": [permanent],
                },
                "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": spec}}],
            },
        }  # fmt: skip

    def _pod(self, job: LaunchJob, seat: list[dict[str, Any]]) -> dict[str, Any]:
        assert job.container is not None
        env: list[dict[str, Any]] = [
            {"name": name, "value": _literal(value)} for name, value in job.env.items()
        ]
        for name in job.secrets:
            source = {"secretKeyRef": {"name": _secret(job), "key": name}}
            env.append({"name": name, "valueFrom": source})
        volumes, mounts = self._volumes()
        if self.key is not None:
            env.append({"name": GOOGLE_KEY, "value": f"{_KEY_FOLDER}/{self.key.partition(':')[2]}"})
        container: dict[str, Any] = {
            "name": "spile", "image": job.container.image,
            "args": [_literal(word) for word in job.arguments], "env": [*env, *seat],
            "securityContext": {"privileged": True} if self.tpu else _UNPRIVILEGED,
        }  # fmt: skip
        resources = self._resources()
        if resources:
            container["resources"] = {"requests": resources, "limits": resources}
        spec: dict[str, Any] = {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE,
            "containers": [container],
        }  # fmt: skip
        selector: dict[str, str] = {}
        if self.tpu:
            selector["cloud.google.com/gke-tpu-accelerator"] = self.tpu.accelerator
            selector["cloud.google.com/gke-tpu-topology"] = self.tpu.topology
        if self.spot:
            selector["cloud.google.com/gke-spot"] = "true"
            spec["tolerations"] = [{"key": "cloud.google.com/gke-spot", "operator": "Equal",
                                    "value": "true", "effect": "NoSchedule"}]  # fmt: skip
        if selector:
            spec["nodeSelector"] = selector
        if self.service_account is not None:
            spec["serviceAccountName"] = self.service_account
        if volumes:
            spec["volumes"] = volumes
            container["volumeMounts"] = mounts
        if not self.tpu:
            spec["securityContext"] = {"fsGroup": _USER}
        return {"metadata": {"labels": self._labels(job)}, "spec": spec}

    def _resources(self) -> dict[str, Any]:
        wanted = {
            "google.com/tpu": self.tpu.chips if self.tpu else None,
            "nvidia.com/gpu": self.gpus or None,
            "cpu": self.cpus,
            "memory": self.memory,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def _volumes(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        volumes: list[dict[str, Any]] = []
        mounts: list[dict[str, Any]] = []
        for number, claim in enumerate(self.claim):
            name, _, path = claim.partition(":")
            source = {"claimName": name}
            volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": source})
            mounts.append({"name": f"claim-{number}", "mountPath": path})
        if self.key is not None:
            source = {"secretName": self.key.partition(":")[0]}
            volumes.append({"name": "key", "secret": source})
            mounts.append({"name": "key", "mountPath": _KEY_FOLDER, "readOnly": True})
        return volumes, mounts


_UNPRIVILEGED = {
    "runAsNonRoot": True, "runAsUser": _USER, "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}  # fmt: skip


def _secret(job: LaunchJob) -> str:
    return f"{job.name}-env"


def _literal(text: str) -> str:
    """Escape $: Kubernetes replaces $(NAME) in arguments and values, and $$ stands for $."""
    return text.replace("$", "$$")


def _add_flags(flags: TargetFlags) -> None:
    flags.slices()
    flags.world_size()
    flags.add("--tpu", "TPU of each slice on GKE, e.g. v5e:8x8", "KIND:TOPOLOGY")
    flags.number("--gpus", "GPUs of each host [0]", 0)
    flags.add("--service-account", "service account of the pods", "NAME")
    flags.add("--namespace", "namespace of the pods [kubectl's default]", "NAME")
    flags.add("--context", "context of kubectl [its default]", "NAME")
    flags.many("--claim", "CLAIM:/PATH", "mount this volume claim")
    flags.add("--credentials-secret", "secret with a Google key, mounted read-only",
              "SECRET:KEY", dest="key")  # fmt: skip
    flags.machine()


def _build(arguments: argparse.Namespace) -> Kubernetes:
    arguments.tpu = parse_tpu(arguments.tpu) if arguments.tpu else None
    return from_flags(Kubernetes, arguments)


KUBERNETES = TargetRow(
    "kubernetes",
    "a Kubernetes cluster, GKE's TPUs included",
    _add_flags,
    _build,
    on_hosts=False,
    contained=True,
    mount_flag="--claim",
)
