"""A lone rank's groups open no ports and return what it gave them; several ranks keep Gloo's."""

import subprocess
import sys
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from workers.vllm import plugin

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded torch

ALONE = """
import psutil, torch, torch.distributed as dist
from workers.vllm import plugin

plugin.listen_to_nobody()
dist.init_process_group(
    backend="gloo", init_method="tcp://127.0.0.1:1", world_size=1, rank=0, timeout=None
)
group = dist.new_group([0], backend="gloo")
given = torch.arange(4.0)
summed, gathered, sent = given.clone(), [torch.zeros(4)], [{"a": 1}]
dist.all_reduce(summed, group=group)
dist.broadcast(summed, 0, group=group)
dist.all_gather(gathered, given, group=group)
dist.broadcast_object_list(sent, src=0, group=group)
dist.barrier(group=group)
assert summed.equal(given) and gathered[0].equal(given) and sent == [{"a": 1}]
assert not [one for one in psutil.Process().net_connections() if one.status == "LISTEN"]
print("done")
"""


def test_a_lone_rank_listens_to_nobody() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert ended.stdout == "done\n", ended.stderr


@pytest.mark.parametrize(
    ("backend", "ranks", "made"),
    [
        ("gloo", 1, ("fake", None)),
        ("cpu:gloo,cuda:nccl", 1, ("cpu:fake,cuda:nccl", "file:///x")),
        ("nccl", 1, ("nccl", "file:///x")),
        ("gloo", 2, ("gloo", "file:///x")),
        ("cpu:gloo,cuda:nccl", 2, ("cpu:gloo,cuda:nccl", "file:///x")),
    ],
)
def test_what_several_ranks_or_gpus_share_stays(
    monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int, made: tuple[str, str | None]
) -> None:
    import torch.distributed as dist

    seen: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, at, *_, **__: seen.append((backend, at))
    )
    monkeypatch.setattr(dist, "new_group", lambda _ranks, _timeout, backend: seen.append(backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    plugin.listen_to_nobody()
    dist.init_process_group(backend, init_method="file:///x", world_size=ranks, rank=0, store=None)
    for wanted in ("gloo", "nccl"):
        dist.new_group([0], backend=wanted)
    assert seen == [made, "fake" if ranks == 1 else "gloo", "nccl"]
