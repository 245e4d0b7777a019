"""How vLLM is started, as far as it can be seen without it."""

import argparse
import asyncio
import gc
import os
from types import SimpleNamespace

import psutil
import pytest

from poc_core.errors import SettingsError
from workers.vllm.start.launch import (
    garbage_may_wait,
    names_grammars,
    parsed,
    send_no_comments,
    shut_down,
    speed_up_sums,
)


@pytest.mark.xdist_group("engines")  # whose process has loaded vLLM
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
    from workers.vllm.release.engine_core import lone_rank_in_core

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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "1", "--bogus"], "unrecognized arguments: --bogus"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--seed"], "argument --seed: expected one argument"),
    ],
)
def test_what_vllm_does_not_take_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    assert parsed(parser, ["--seed", "1"]).seed == 1
    with pytest.raises(SettingsError, match=f"^vLLM does not take its arguments: {says}"):
        parsed(parser, words)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "are_named"),
    [
        (["--structured-outputs-config.backend", "guidance"], True),
        (["--structured_outputs_config.backend=auto"], True),
        (["--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "x"}'], True),
        (["--structured-outputs-config", '{"disable_any_whitespace": true}'], False),
        (["--distributed-executor-backend", "mp"], False),
        ([], False),
    ],
)
def test_an_operators_own_compiler_of_grammars_is_seen(words: list[str], are_named: bool) -> None:
    assert names_grammars(words) == are_named


def test_streams_get_no_comments_whatever_the_operator_says() -> None:
    args = argparse.Namespace(sse_keep_alive_interval=15)
    send_no_comments(args)
    assert args.sse_keep_alive_interval == 0
    send_no_comments(argparse.Namespace())  # an earlier release's


@pytest.mark.parametrize(
    ("ranks", "on_hopper", "before", "after"),
    [
        (2, True, {}, {"NCCL_MIN_CTAS": "64", "NCCL_BUFFSIZE": "524288"}),
        (2, True, {"NCCL_MIN_CTAS": "8"}, {"NCCL_MIN_CTAS": "8"}),
        (2, True, {"NCCL_BUFFSIZE": "9"}, {"NCCL_MIN_CTAS": "64", "NCCL_BUFFSIZE": "9"}),
        (4, True, {}, {}),
        (2, False, {}, {}),
    ],
)
def test_sums_over_two_ranks_use_more_blocks(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    on_hopper: bool,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    speed_up_sums(ranks, on_hopper)
    assert os.environ == after


class Llm:
    """As vLLM's, whose engine process ends while it is being killed."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.engine_core = SimpleNamespace(resources=lambda: self.ended.append("sockets"))
        self._is_there = True

    def shutdown(self) -> None:
        if self._is_there:
            self._is_there = False
            raise psutil.NoSuchProcess(7)
        self.ended.append("output task")


def test_an_engine_process_that_ends_while_vllm_kills_it_is_no_error() -> None:
    llm = Llm()
    asyncio.run(shut_down(llm))
    assert llm.ended == ["sockets", "output task"]
