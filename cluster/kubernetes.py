"""A job as manifests of Kubernetes: a JobSet for training, an indexed Job for encoding; with labels for Kueue."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.job import ROOT, Job
from cluster.status import AGAIN, MISTAKE

PORT = 29500
ROLE = "machine"  # name of the JobSet's only kind of pods
QUEUE = "kueue.x-k8s.io/queue-name"
TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
USER = 1000  # of the image
DEFAULT_MEMORY_GB = 16  # of /dev/shm where the pod's memory is not given
# Why a pod ended that did nothing wrong: the machine was drained, or another job came before it.
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
ASKED_TO_STOP = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [AGAIN]}}
MISTAKEN = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [MISTAKE]}}


@dataclass(frozen=True)
class KubernetesOptions:
    """What only Kubernetes has.

    Attributes:
        namespace: of the job; None: the one of kubectl's context.
        queue: LocalQueue of Kueue; None: the job starts without Kueue.
        claim: PersistentVolumeClaim that all pods mount at /precompose/runs (ReadWriteMany).
        secret: Secret whose keys become environment variables, such as the credentials of an object store.
        cache: folder of each machine, mounted at /cache, for shards of remote streams; it outlives the pods.
        topology: label of nodes; Kueue places the pods on nodes with the same value where it can.
    """

    namespace: str | None = None
    queue: str | None = None
    claim: str | None = None
    secret: str | None = None
    cache: str | None = None
    topology: str | None = None


def manifest_of(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """The object that runs a job.

    Raises:
        ValueError: a job without an image or a claim, or with what Kubernetes does not have.
    """
    if job.image is None:
        raise ValueError("--image: Kubernetes runs containers; give the image that the Dockerfile makes")
    if options.claim is None:
        raise ValueError("--claim: without a volume the checkpoints are lost with their pod; name a claim for runs/")
    if job.spares:
        raise ValueError("--spares: Kubernetes replaces a machine from its pool; leave it out")
    if job.hours is not None:
        raise ValueError("--hours: Kubernetes has no limit of time after which a run goes on; leave it out")
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:40].strip("-")
    labels = {"app.kubernetes.io/name": "precompose"} | ({} if options.queue is None else {QUEUE: options.queue})
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    if job.kind == "encode":
        processes = job.machines * job.processes
        # Tasks do not wait for each other: one that fails is tried again alone.
        spec = _job(job, options, name, processes, gpus=min(1, job.gpus), retries=job.retries)
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    inner = _job(job, options, name, job.machines, gpus=job.gpus, retries=None)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            # A mistake in the config fails the Job by its policy; any other failure starts all machines again.
            "failurePolicy": {
                "maxRestarts": job.retries,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": ROLE, "replicas": 1, "template": {"spec": inner}}],
        },
    }


def _job(
    job: Job, options: KubernetesOptions, name: str, pods: int, *, gpus: int, retries: int | None
) -> dict[str, Any]:
    """The spec of an indexed Job.

    Args:
        pods: number of pods, each with a number of its own.
        gpus: of each pod.
        retries: of each pod; None: the first failure is the Job's, since the others cannot go on without it.
    """
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "podReplacementPolicy": "Failed",  # not before the pod is gone, which may be writing a checkpoint
        "podFailurePolicy": {"rules": [MISTAKEN, ASKED_TO_STOP, DISRUPTED]},
        "template": {"spec": _pod(job, options, name, gpus)},
    }
    if retries is None:
        spec["backoffLimit"] = 0
    else:
        spec["backoffLimitPerIndex"] = retries
        spec["podFailurePolicy"]["rules"][0] = MISTAKEN | {"action": "FailIndex"}
    if options.topology is not None:
        spec["template"]["metadata"] = {"annotations": {TOPOLOGY: options.topology}}
    return spec


def _pod(job: Job, options: KubernetesOptions, name: str, gpus: int) -> dict[str, Any]:
    training = job.kind == "train"
    share = job.processes if training else 1
    memory = job.memory_gb if training or job.memory_gb is None else job.memory_gb // job.processes
    resources: dict[str, str | int] = {} if gpus == 0 else {"nvidia.com/gpu": gpus}
    resources |= {} if job.cpus is None else {"cpu": job.cpus * share}
    resources |= {} if memory is None else {"memory": f"{memory}G"}
    # Half of the memory: what data workers hand over counts as the pod's.
    shared = f"{(memory or DEFAULT_MEMORY_GB) // 2 or 1}G"
    volumes = {
        "runs": (f"{ROOT}/runs", {"persistentVolumeClaim": {"claimName": options.claim}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared}}),
    }
    if options.cache is not None:
        volumes["cache"] = ("/cache", {"hostPath": {"path": options.cache, "type": "DirectoryOrCreate"}})
    for number, mount in enumerate(job.mounts):
        outside, inside = mount.split(":")
        volumes[f"mount-{number}"] = (inside, {"hostPath": {"path": outside, "type": "Directory"}})
    container = {
        "name": "precompose",
        "image": job.image,
        "workingDir": ROOT,
        "command": _command(job, gpus),
        "env": _variables(job, name),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, (path, _) in volumes.items()],
    }
    if options.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    return {
        "restartPolicy": "Never",  # as a pod failure policy demands
        "terminationGracePeriodSeconds": job.grace,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, (_, source) in volumes.items()],
    }


def _command(job: Job, gpus: int) -> list[str]:
    if job.kind == "encode":
        return ["python", *job.command]
    sizes = ["--machines", str(job.machines), "--processes", str(job.processes)]
    # A machine that cannot be used fails before the others wait for it. The launcher takes the shell's place, so that
    # it gets the signals.
    script = 'python cluster/check.py --gpus "$1" --output "$2" && shift 2 && exec python cluster/launch.py "$@"'
    return ["bash", "-c", script, "start", str(gpus), job.output, *sizes, "--", *job.command]


def _variables(job: Job, name: str) -> list[dict[str, Any]]:
    variables = dict(job.variables)
    if job.kind == "train":
        variables |= {"MASTER_ADDR": f"{name}-{ROLE}-0-0.{name}", "MASTER_PORT": str(PORT)}
        return [{"name": key, "value": value} for key, value in variables.items()]
    variables |= {"WORLD_SIZE": str(job.machines * job.processes), "LOCAL_RANK": "0"}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [{"name": key, "value": value} for key, value in variables.items()] + [{"name": "RANK", "valueFrom": index}]


def manifest_text(job: Job, options: KubernetesOptions) -> str:
    """`manifest_of` as YAML. Raises as it does."""
    return yaml.safe_dump(manifest_of(job, options), sort_keys=False, width=120)
