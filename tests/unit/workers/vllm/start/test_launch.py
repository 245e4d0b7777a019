"""How vLLM is started, as far as it can be seen without it."""

import gc
from types import SimpleNamespace

import pytest

from workers.vllm.start.launch import garbage_may_wait, lone_rank_in_core


@pytest.mark.parametrize(
    ("asked", "chosen", "ranks", "replicas"),
    [
        pytest.param("mp", "mp", 1, 1, id="the operator's choice"),
        pytest.param(None, "mp", 2, 1, id="two ranks"),
        pytest.param(None, "mp", 1, 2, id="two replicas"),
        pytest.param(None, "uni", 1, 1, id="in the core anyway"),
    ],
)
def test_where_ranks_compute_is_left_alone(
    asked: str | None, chosen: str, ranks: int, replicas: int
) -> None:
    parallel = SimpleNamespace(
        distributed_executor_backend=chosen, world_size=ranks, data_parallel_size=replicas
    )
    with lone_rank_in_core(
        SimpleNamespace(distributed_executor_backend=asked),
        SimpleNamespace(parallel_config=parallel),
    ):
        assert parallel.distributed_executor_backend == chosen


def test_garbage_is_looked_for_again_after_a_start_that_failed() -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), garbage_may_wait():
        fail()
    assert gc.isenabled()
