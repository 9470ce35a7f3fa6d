"""The manifests against the schemas of Kubernetes' API, strictly: `make test-cluster` runs it.

kubernetes-validate bundles the schemas of all versions, 22 MB. uv installs it apart from the environment. It has none
of JobSet and Kueue: of a JobSet, the Job that it makes is checked.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.test_submit import CLOUD, ENCODE, TRAIN, made

VERSIONS = ("1.31", "1.34", "1.37")  # the first is the oldest that docs/cluster.md names
ALL = ["--namespace", "x", "--secret", "keys", "--cache", "/mnt/nvme", "--cpus", "14", "--memory", "800"]
ALL += ["--queue", "research", "--topology", "cloud.example.com/rack", "--mount", "/a:/b", "--env", "A=b"]
CHECK = """
import sys, kubernetes_validate, yaml
job = yaml.safe_load(sys.stdin)
for version in sys.argv[1:]:
    kubernetes_validate.validate(job, version, strict=True)
"""


def validate(job):
    """The outcome of checking a Job with a validator of its own environment."""
    uv = [str(Path(sys.executable).with_name("uv")), "run", "--quiet", "--no-project", "--python", sys.executable]
    words = [*uv, "--with", "kubernetes-validate==1.37.0", "python", "-c", CHECK, *VERSIONS]
    return subprocess.run(words, input=yaml.safe_dump(job), text=True, capture_output=True)


def job_of(*words):
    """A manifest as a Job."""
    found = yaml.safe_load(made("kubernetes", *words, *CLOUD))
    if found["kind"] == "Job":
        return found
    assert found["kind"] == "JobSet"
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": found["metadata"], "spec": spec}


@pytest.mark.parametrize("words", [[TRAIN], [TRAIN, *ALL], [ENCODE], [ENCODE, *ALL]], ids=" ".join)
def test_manifests_fit_the_schemas(words):
    done = validate(job_of(*words, "--machines", "16"))
    assert done.returncode == 0, done.stderr


def test_a_wrong_field_is_found():
    job = job_of(TRAIN, "--machines", "16")
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert "volumeMount" in validate(job).stderr
