"""A job that a client in the cluster sends."""

import json
import subprocess

from tests.cluster.pods import Cluster
from tests.harness.samples import body

_ASK = """\
import os, sys
from urllib.request import Request, urlopen
key = os.environ["POC_API_KEY"]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
url = "http://api:8000/api/v1/pow/generate"
print(urlopen(Request(url, sys.stdin.buffer.read(), headers), timeout=60).read().decode())
"""


def assert_a_job_is_computed(cluster: Cluster) -> None:
    """By a client in the cluster, at the Service's name, with the secret's key."""
    api = cluster.pods["api"].containers["api"]
    done = subprocess.run(
        [
            *("nsenter", "--target", str(api.main), "--mount", "--uts", "--net", "--pid"),
            *("--root", "--wd", "--", "python", "-c", _ASK),
        ],
        input=json.dumps(body(nonces=list(range(20)), wait=True)),
        env=api.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == "completed", answer
    assert [one["nonce"] for one in answer["artifacts"]] == list(range(20))
