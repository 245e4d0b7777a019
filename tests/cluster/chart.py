"""The chart's objects as Helm renders them, and what of them tests ask again and again."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import yaml

from scripts.manifest import rendered
from tests.cluster.values import SETS, Values

Object = dict[str, Any]
RUNNING = ("Deployment", "StatefulSet")


def objects(values: Values) -> list[Object]:
    """CalledProcessError: as of `rendered`."""
    return [found for found in yaml.safe_load_all(rendered(text=yaml.safe_dump(values))) if found]


@cache  # rendered once for the tests of one process
def objects_of(name: str) -> tuple[Object, ...]:
    """The objects of one of the sets."""
    return tuple(objects(SETS[name]))


def key_of(found: Object) -> tuple[str, str]:
    return found["kind"], found["metadata"]["name"]


def running(found: Sequence[Object]) -> dict[str, Object]:
    """Deployments and StatefulSets, by name."""
    return {one["metadata"]["name"]: one for one in found if one["kind"] in RUNNING}


def pod_of(controller: Object) -> Object:
    return dict(controller["spec"]["template"]["spec"])


def labels_of(controller: Object) -> dict[str, str]:
    return dict(controller["spec"]["template"]["metadata"]["labels"])


def containers(found: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """(controller's name, container) of every container."""
    for name, controller in running(found).items():
        for container in pod_of(controller)["containers"]:
            yield name, container


def environment(found: Sequence[Object], container: Object) -> dict[str, Any]:
    """What a container's processes find: values, or where Kubernetes takes them from."""
    shared: dict[str, Any] = {}
    for source in container.get("envFrom", []):
        (settings,) = (
            one for one in found if key_of(one) == ("ConfigMap", source["configMapRef"]["name"])
        )
        shared |= settings["data"]
    return shared | {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in container.get("env", [])
    }
