"""One GPU that stands for two: engines of two ranks on a host that has one, to see whether they are
right. How fast they are says nothing, as the ranks take turns on the GPU.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

# Has a sitecustomize.py, which every Python process of the engine runs at its start.
_FOLDER = Path(__file__).parent
# NCCL takes no two ranks of a host to one GPU, so it is told that they are two hosts' (there, a
# name for each process): these exchange by sockets.
_NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
# Else vLLM counts the GPUs, and each rank takes what the other one fills for a fault.
ARGUMENTS = ("--distributed-executor-backend", "mp", "--kv-cache-memory-bytes", str(2**28))


@contextmanager
def as_two() -> Iterator[None]:
    """Within, engines that start with ARGUMENTS have their two ranks on the first GPU. vLLM's own
    sums over ranks, which want memory of one process in another, are there too.
    """
    from vllm.engine.arg_utils import EngineArgs

    with TemporaryDirectory() as cache:
        pairs = {f"{one}->{other}": True for one in range(2) for other in range(2)}
        Path(cache, "gpu_p2p_access_cache_for_0,0.json").write_text(json.dumps(pairs))
        paths = [str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_CACHE_ROOT": cache}
        with (
            mock.patch.dict(os.environ, _NCCL | environment),
            mock.patch.object(EngineArgs, "_resolve_device_ids", return_value=[0, 0]),
        ):
            yield
