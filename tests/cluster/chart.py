"""The chart's objects as Helm renders them, and what of them tests ask again and again."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import yaml

from scripts.manifest import rendered
from tests.cluster.values import SETS, Values

Object = dict[str, Any]
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]  # of Kubernetes
RUNNING = ("Deployment", "StatefulSet", "LeaderWorkerSet")
# What LeaderWorkerSet says to the second pod of a group, by its environment.
SECOND_OF_GROUP = {
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "worker-pair-0.worker-pair.proofline",
}


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
    """Deployments, StatefulSets and LeaderWorkerSets, by name."""
    return {one["metadata"]["name"]: one for one in found if one["kind"] in RUNNING}


def spec_of_pods(controller: Object) -> Object:
    """What a controller says of its pods: their template, and the volumes of each."""
    spec: Object = controller["spec"]
    if "leaderWorkerTemplate" not in spec:
        return spec
    group: Object = spec["leaderWorkerTemplate"]
    return group | {"template": group["workerTemplate"]}


def pod_of(controller: Object) -> Object:
    return dict(spec_of_pods(controller)["template"]["spec"])


def labels_of(controller: Object) -> dict[str, str]:
    return dict(spec_of_pods(controller)["template"]["metadata"]["labels"])


def arguments_of(container: Object) -> list[str]:
    """A container's arguments as Kubernetes expands them, in the second pod of a group."""
    words: list[str] = container["args"]
    for name, value in SECOND_OF_GROUP.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


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
