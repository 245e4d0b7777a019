"""Mistakes in values are errors with their path."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from poc_core.settings import Settings
from scripts.manifest import CHART, HELM
from tests.cluster.chart import objects
from tests.cluster.values import Values

pytestmark = pytest.mark.xdist_group("kubernetes")  # one process reads the schemas

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# What the chart sets itself.
OWN = {
    *("POC_REDIS_URL", "POC_REDIS_PASSWORD_FILE", "POC_API_KEY", "POC_API_KEYS_FILE"),
    *("POC_API_PORT", "POC_CHAT_HOST", "POC_CHAT_ADVERTISE_HOST", "POC_HOST_NAME"),
    *("POC_CALLBACK_CLIENT_CERT", "POC_CALLBACK_TRUSTED_CERTS"),
}
# What the schema refuses, all in one: each is told with its path.
MISTAKES = {
    "workers": [
        *({"name": "a", "gpus": "2"}, {"name": "b", "gpu": 2}, {"gpus": 2}, {"name": "No name"}),
        {"name": "c", "resources": {"requests": {"memory": "20GB"}}},
    ],
    "worker": {"engineArgs": ["--max-model-len", 8192]},
    "settings": {
        "POC_CHAT_POLICI": "off",
        "POC_REDIS_PASSWORD_FILE": "/elsewhere",  # the chart's own
        "POC_MAX_QUEUED_NONCES": 5_000_000,  # Helm would write 5e+06
    },
    "redis": {"url": "redis://:secret@host:6379/0", "memory": "4Gi"},
    "api": {"replicas": 0},
    "networkPolicies": "no",
    "curier": {},
    "images": {"prefix": "registry.example"},
}
TOLD = [
    *("workers.0.gpus: Invalid type. Expected: integer", "workers.1: Additional property gpu "),
    *("workers.2: name is required", "workers.3.name: Does not match"),
    *("workers.4.resources.requests.memory: Does not match", "worker.engineArgs.1: Invalid type"),
    *("settings: Additional property POC_CHAT_POLICI", "settings: Additional property POC_REDIS"),
    *("settings.POC_MAX_QUEUED_NONCES: Invalid type. Expected: string", "redis.url: Does not"),
    *("redis.memory: Does not match", "api.replicas: Must be greater", "networkPolicies: Invalid"),
    *("Additional property curier", "images.prefix: Does not match"),
]


def test_a_mistake_is_an_error_with_its_path() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        objects(MISTAKES)
    assert [told for told in TOLD if told not in caught.value.stderr] == []


@pytest.mark.parametrize(
    "url",
    [
        *("redis.example:6379", "redis://", "redis://u:p@a", "redis://a:6379,b:6379/0"),
        *("redis+sentinel://a:26379", "redis+sentinel://a:26379/0", "redis+sentinel://u:p@a/mine"),
    ],
)
def test_a_redis_that_processes_would_refuse_is_refused_before(url: str) -> None:
    pattern = SCHEMA["properties"]["redis"]["properties"]["url"]["pattern"]
    assert not re.search(pattern, url)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"workers": [{"name": "a"}, {"name": "b", "gpus": 3, "tensorParallel": 2}]},
            "workers[1].gpus: 3 is no multiple of tensorParallel x pipelineParallel, 2",
        ),
        ({"workers": [{"name": "a", "gpus": 0, "tensorParallel": 2}]}, "workers[0].gpus: 0, and"),
        (
            {"workers": [{"name": "a", "hosts": 2, "gpus": 8, "tensorParallel": 8}]},
            "workers[0].hosts: 2 of 8 GPU(s) are not tensorParallel x pipelineParallel, 8",
        ),
        ({"workers": [{"name": "a"}] * 2}, "workers[1].name: a stands there twice"),
        (
            {"workers": [{"name": "a", "autoscale": {"max": 2}}]},
            "workers[0].autoscale.max: 2, and monitoring.prometheus is empty",
        ),
        (
            {
                "workers": [{"name": "a", "autoscale": {"max": 2, "min": 3}}],
                "monitoring": {"prometheus": "http://prometheus:9090"},
            },
            "workers[0].autoscale.max: 2 is below min, 3",
        ),
        (
            {"redis": {"url": "redis://worker@redis.example:6379/0", "users": True}},
            "redis.users: true, and redis.url names a user",
        ),
        ({"redis": {"caSecret": "redis-ca"}}, "redis.caSecret: redis-ca, and redis.url begins"),
        (
            {"redis": {"url": "redis://redis.example:6379/0", "sentinelPassword": True}},
            "redis.sentinelPassword: true, and redis.url names no Sentinels",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_an_error_with_its_path(
    values: Values, told: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        objects(values)
    assert told in caught.value.stderr


def test_the_schema_knows_every_value_and_setting() -> None:
    """Each default stands in it, and each of our settings, but for the chart's own."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def paths(part: Any, schema: Any, where: str) -> Iterator[str]:
        for key, value in part.items():
            known = schema.get("properties", {})
            if key not in known and "additionalProperties" not in schema:
                yield f"{where}.{key}"
            elif isinstance(value, dict) and "properties" in known.get(key, {}):
                yield from paths(value, known[key], f"{where}.{key}")

    assert list(paths(defaults, SCHEMA, "")) == []
    assert set(SCHEMA["properties"]["worker"]["properties"]) | {"name"} == set(
        SCHEMA["properties"]["workers"]["items"]["properties"]
    )
    known = set(SCHEMA["properties"]["settings"]["properties"])
    ours = {f"POC_{field.upper()}" for field in Settings.model_fields}
    assert known == ours - OWN | {"GONKA_METRICS"}
    assert set(defaults["settings"]) <= known


def test_the_notes_tell_what_is_next(tmp_path: Path) -> None:
    """Helm shows them beside a cluster alone, so they are rendered as an object's text."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "notes")
    (chart / "templates" / "notes.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: notes }\ndata:\n"
        '  text: {{ tpl (.Files.Get "notes") . | toJson }}\n'
    )
    done = subprocess.run(
        [
            *(str(HELM), "template", "node", str(chart), "--namespace", "somewhere"),
            *("--show-only", "templates/notes.yaml"),
            *("--set", "networkPolicies=false", "--set", "workers[0].name=h200"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    notes = yaml.safe_load(done.stdout)["data"]["text"]
    assert "kubectl --namespace somewhere rollout status statefulset/worker-h200" in notes
    assert "http://api.somewhere.svc.cluster.local:8000" in notes
    assert "WARNING: without network policies" in notes
