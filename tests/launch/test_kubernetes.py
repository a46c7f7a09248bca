"""Manifests: valid by the real schemas, exact, and safe from Kubernetes's own expansion."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from spile.core.errors import ConfigError
from spile.launch.job import LaunchJob
from spile.launch.kubernetes import Kubernetes, Tpu, parse_tpu
from support.launches import EXTRACT, HOSTILE, IMAGE, contained, hostile_job, job

FIXTURE = Path(__file__).parents[1] / "fixtures/kubernetes/jobset.json"
VERSIONS = ("1.29", "1.31", "1.37")  # of Kubernetes; per-index retries are in all of them
LABELS = {"app.kubernetes.io/name": "spile", "app.kubernetes.io/instance": "run1"}
DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def strict(schema: Any) -> Any:
    """The API server drops fields it does not know; here they are errors."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", None):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
        for inner in schema.values():
            strict(inner)
    elif isinstance(schema, list):
        for inner in schema:
            strict(inner)
    return schema


def jobset_schema() -> Any:
    schema = strict(copy.deepcopy(json.loads(FIXTURE.read_text())["schema"]))
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def validate(manifest: dict[str, Any]) -> None:
    """Validate a JobSet by its own schema, and its contents as the Job that it becomes."""
    if manifest["kind"] == "JobSet":
        jsonschema.Draft202012Validator(jobset_schema()).validate(manifest)
        for replicated in manifest["spec"]["replicatedJobs"]:
            spec = replicated["template"]["spec"]
            validate(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
            )
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def applied(target: Kubernetes, of: LaunchJob) -> list[dict[str, Any]]:
    """Return the manifests as kubectl would read them."""
    (command,) = target.render(of)
    assert command.stdin is not None
    manifests = list(yaml.safe_load_all(command.stdin))
    assert manifests == target.manifests(of)
    for manifest in manifests:
        validate(manifest)
    return manifests


def inside(**changes: Any) -> LaunchJob:
    return job(container=contained(), **changes)


@pytest.mark.parametrize(
    "target",
    [
        Kubernetes(),
        Kubernetes(slices=8, gpus=1, spot=True, cpus="8", memory="64Gi"),
        Kubernetes(slices=2, world_size=4, gpus=8, claim=("data:/data", "out:/out")),
        Kubernetes(slices=3, tpu=parse_tpu("v5e:8x8"), spot=True, service_account="me"),
        Kubernetes(tpu=parse_tpu("v6e:2x4"), key="google:key.json"),
        Kubernetes(tpu=parse_tpu("v5p:4x4x4")),
    ],
)
def test_manifests_are_valid_by_the_real_schemas(target: Kubernetes) -> None:
    applied(target, inside())
    applied(target, hostile_job(container=contained()))


def test_the_schemas_refuse_what_is_wrong() -> None:
    (jobset,) = Kubernetes(world_size=2).manifests(inside())
    for path, value in [
        (("spec", "failurePolicy", "maxRestart"), 1),
        (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "two"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "nodeselector"), {}),
    ]:
        wrong = copy.deepcopy(jobset)
        place: Any = wrong
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(wrong)


def test_slices_of_one_host_are_an_indexed_job() -> None:
    target = Kubernetes(slices=32, gpus=1, claim=("shared:/data",), service_account="me")
    secret, made = applied(target, inside(secrets={"TOKEN": "hf_shh"}, env={"A": "1"}))
    assert secret == {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": {"name": "run1-env", "labels": LABELS}, "stringData": {"TOKEN": "hf_shh"},
    }  # fmt: skip
    assert made == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "run1", "labels": LABELS},
        "spec": {
            "completionMode": "Indexed",
            "completions": 32,
            "parallelism": 32,
            "backoffLimitPerIndex": 6,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [2]}},
                    {"action": "Ignore", "onPodConditions": [DISRUPTED]},
                ]
            },
            "template": {
                "metadata": {"labels": LABELS},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 60,
                    "serviceAccountName": "me",
                    "securityContext": {"fsGroup": 1000},
                    "volumes": [
                        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "shared"}}
                    ],
                    "containers": [
                        {
                            "name": "spile",
                            "image": IMAGE,
                            "args": ["supervise", "--", "extract", *EXTRACT],
                            "env": [
                                {"name": "A", "value": "1"},
                                {
                                    "name": "TOKEN",
                                    "valueFrom": {
                                        "secretKeyRef": {"name": "run1-env", "key": "TOKEN"}
                                    },
                                },
                                {
                                    "name": "MACHINE_ID",
                                    "valueFrom": {"fieldRef": {"fieldPath": INDEX}},
                                },
                                {"name": "TOTAL_MACHINES", "value": "32"},
                            ],
                            "securityContext": {
                                "runAsNonRoot": True,
                                "runAsUser": 1000,
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "resources": {
                                "requests": {"nvidia.com/gpu": 1},
                                "limits": {"nvidia.com/gpu": 1},
                            },
                            "volumeMounts": [{"name": "claim-0", "mountPath": "/data"}],
                        }
                    ],
                },
            },
        },
    }


def test_a_tpu_slice_of_several_hosts_is_a_jobset_of_its_own() -> None:
    first, second = applied(Kubernetes(slices=2, tpu=parse_tpu("v5e:8x8"), spot=True), inside())
    assert first["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert second["metadata"] == {
        "name": "run1-1", "labels": LABELS,
        "annotations": {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
    }  # fmt: skip
    assert first["spec"]["failurePolicy"] == {
        "maxRestarts": 100,
        "rules": [
            {
                "name": "permanent",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    (replicated,) = second["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("slice", 1)
    spec = replicated["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (16, 16, 0)
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "8x8",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["securityContext"] == {"privileged": True}
    assert container["env"] == [
        {"name": "COORDINATOR_ADDRESS", "value": "run1-1-slice-0-0.run1-1:8476"},
        {"name": "NUM_HOSTS", "value": "16"},
        {"name": "HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        {"name": "MACHINE_ID", "value": "1"},
        {"name": "TOTAL_MACHINES", "value": "2"},
    ]


def test_a_google_key_is_mounted_read_only() -> None:
    (made,) = applied(Kubernetes(key="google:key.json"), inside())
    pod = made["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "key", "secret": {"secretName": "google"}}]
    (container,) = pod["containers"]
    assert container["volumeMounts"] == [
        {"name": "key", "mountPath": "/credentials", "readOnly": True}
    ]
    key = {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/credentials/key.json"}
    assert key in container["env"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a text as the kubelet does: replace $(NAME), and turn $$ into $."""
    found = r"\$(\$|\((.*?)\))"
    return re.sub(
        found, lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]), text, flags=re.DOTALL
    )


def test_hostile_words_survive_the_clusters_own_expansion() -> None:
    secret, made = applied(Kubernetes(slices=2), hostile_job(container=contained()))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    variables = {"NAME": "wrong", "HOME": "wrong"}
    arguments = [expanded(word, variables) for word in container["args"]]
    assert arguments == ["supervise", "--", "extract", *HOSTILE]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    for number, value in enumerate(HOSTILE):
        assert expanded(str(values[f"E{number}"]), variables) == value
        assert secret["stringData"][f"S{number}"] == value


def test_what_is_shown_holds_no_secret() -> None:
    (command,) = Kubernetes().render(inside(secrets={"TOKEN": "hf_shh"}).masked())
    assert "hf_shh" not in str(command)
    assert 'TOKEN: "***"' in str(command)


def test_kubectl_is_told_exactly_this() -> None:
    several = Kubernetes(world_size=2, slices=4, namespace="team", context="gke")
    kubectl = ("kubectl", "--context=gke", "--namespace=team")
    chosen = "--selector=app.kubernetes.io/name=spile,app.kubernetes.io/instance=run1"
    of, kind = inside(), "jobsets.jobset.x-k8s.io"
    assert several.render(of)[0].argv == (*kubectl, "apply", "--filename=-")
    assert several.status(of)[0].argv == (*kubectl, "get", f"{kind},pods", chosen)
    assert several.stop(of)[0].argv == (*kubectl, "delete", f"{kind},secrets", chosen)
    assert several.logs(of, 9)[0].argv == (
        *kubectl, "logs", chosen, "--tail=9", "--prefix", "--max-log-requests=8",
    )  # fmt: skip
    assert Kubernetes().stop(of)[0].argv == ("kubectl", "delete", "jobs.batch,secrets", chosen)


@pytest.mark.parametrize(
    ("text", "tpu"),
    [
        ("v5e:8x8", Tpu("tpu-v5-lite-podslice", "8x8", 16, 4)),
        ("v5e:2x4", Tpu("tpu-v5-lite-podslice", "2x4", 1, 8)),
        ("v6e:16x16", Tpu("tpu-v6e-slice", "16x16", 64, 4)),
        ("v5p:2x2x1", Tpu("tpu-v5p-slice", "2x2x1", 1, 4)),
        ("v4:4x4x4", Tpu("tpu-v4-podslice", "4x4x4", 16, 4)),
    ],
)
def test_a_tpu_is_named_by_its_generation_and_topology(text: str, tpu: Tpu) -> None:
    assert parse_tpu(text) == tpu


@pytest.mark.parametrize(
    "text", ["v5e", "v3:2x2", "v5e:8", "v5e:2x2x2", "v4:2x2", "v5e:0x4", "v4:3x1x1"]
)
def test_a_tpu_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tpu"):
        parse_tpu(text)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Kubernetes(claim=("x",)), "--claim"),
        (lambda: Kubernetes(key="x"), "--credentials-secret"),
        (lambda: Kubernetes(tpu=parse_tpu("v5e:8x8"), world_size=2), "--world-size 2"),
        (lambda: Kubernetes(tpu=parse_tpu("v5e:8x8"), gpus=2), "--gpus"),
        (lambda: Kubernetes().render(job()), "--container"),
        (lambda: Kubernetes().render(inside(setup="true")), "--setup"),
    ],
)
def test_what_does_not_go_together_is_refused(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()
