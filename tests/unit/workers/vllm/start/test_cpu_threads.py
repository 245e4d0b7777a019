"""How ranks share the CPUs of a machine without GPUs."""

import os
from pathlib import Path
from typing import Any

import pytest

from workers.vllm.start import cpu_threads
from workers.vllm.start.cpu_threads import VARIABLE, divide, environment_of_worker, shares


@pytest.mark.parametrize(
    ("cpus", "n_ranks", "value"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([4, 6, 8, 10, 12], 2, "4,6|8,10"),
        ([0, 1, 2], 3, "0|1|2"),
        ([5], 2, "nobind"),
    ],
)
def test_each_rank_gets_as_many_neighbouring_cpus(cpus: Any, n_ranks: int, value: str) -> None:
    assert shares(cpus, n_ranks) == value


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's NUMA nodes: one."""
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(cpu_threads, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 0}, raising=False)
    monkeypatch.setenv(VARIABLE, "")  # so that what `divide` sets is taken back
    monkeypatch.delenv(VARIABLE)
    return tmp_path


def test_ranks_beyond_the_numa_nodes_share_the_cpus(nodes: Path) -> None:
    divide(2)
    assert os.environ[VARIABLE] == "0|1"


def test_one_rank_is_left_to_vllm(nodes: Path) -> None:
    divide(1)
    assert VARIABLE not in os.environ


def test_a_numa_node_for_each_rank_is_left_to_vllm(nodes: Path) -> None:
    (nodes / "node1").mkdir()
    divide(2)
    assert VARIABLE not in os.environ


def test_what_the_user_chose_stays(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nobind")
    divide(2)
    assert os.environ[VARIABLE] == "nobind"


@pytest.mark.parametrize(
    ("cpus", "n_workers", "n_ranks", "values"),
    [
        ({0, 1}, 2, 1, ["0", "1"]),
        (set(range(8)), 2, 1, ["0,1,2", "4,5,6"]),  # 3 and 7 are for engine cores and servers
        (set(range(8)), 2, 2, ["0|1", "4|5"]),
        ({0, 1, 2, 3}, 2, 2, ["0|1", "2|3"]),
        ({0, 1}, 3, 1, ["nobind"] * 3),
    ],
)
def test_workers_of_one_machine_compute_on_cpus_of_their_own(
    nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpus: Any,
    n_workers: int,
    n_ranks: int,
    values: Any,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
    assert [
        environment_of_worker(i, n_workers, n_ranks).get(VARIABLE) for i in range(n_workers)
    ] == values


def test_a_single_worker_and_a_users_choice_are_left_alone(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_of_worker(0, 1, 1) == {}
    monkeypatch.setenv(VARIABLE, "nobind")
    assert environment_of_worker(0, 2, 1) == {}
