"""A host of its own for each process, as NCCL sees it."""

import os

os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
