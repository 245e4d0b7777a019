"""Marlin's products of rows that are put in order first."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm
from workers.vllm.kernels.ordered_rows import MARLIN, OrderedRows, sorted_rows

# As the operation's schemas of vLLM 0.25.1 and 0.30 call them, between others.
NAMES = ["a", "sorted_token_ids", "expert_ids", "num_tokens_past_padded", "w", "moe_block_size"]
X, EXPERTS, N_USED = torch.ones(3, 2), torch.zeros(1), torch.tensor([4])


class Products:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.default = "of vLLM's"

    def __call__(self, *args: Any, **named: Any) -> str:
        self.calls.append(args)
        return "products"


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows that were put in order, on what passes for a GPU."""
    found: list[Tensor] = []

    def in_order(rows: Tensor, experts: Tensor, n_used: Tensor, block: int) -> Tensor:
        assert (experts, n_used, block) == (EXPERTS, N_USED, 4)
        found.append(rows)
        return rows.sort().values

    monkeypatch.setitem(
        sys.modules, "workers.vllm.kernels.row_order", SimpleNamespace(in_order=in_order)
    )
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def call(products: OrderedRows, rows: Tensor) -> str:
    return str(products(X, rows, EXPERTS, N_USED, "w", 4))


def test_both_products_of_a_layer_get_its_rows_in_order(ordered: list[Tensor]) -> None:
    own = Products()
    products = OrderedRows(own, NAMES)
    first, second = torch.tensor([2, 0, 1, 3]), torch.tensor([3, 2, 1, 0])
    assert [call(products, rows) for rows in (first, first, second)] == ["products"] * 3
    assert [args[1].tolist() for args in own.calls] == [[0, 1, 2, 3]] * 3
    assert all((args[0], *args[2:]) == (X, EXPERTS, N_USED, "w", 4) for args in own.calls)
    # Of a shape the first rows are tried first.
    assert [rows.tolist() for rows in ordered] == [*[first.tolist()] * 2, second.tolist()]
    assert products.default == "of vLLM's"


def test_rows_where_others_lay_are_put_in_order_too(ordered: list[Tensor]) -> None:
    """Memory is used again: what counts is the tensor."""
    products = OrderedRows(Products(), NAMES)
    memory = torch.tensor([1, 0, 3, 2])
    for _ in range(2):
        call(products, memory.view(-1))
    assert len(ordered) == 3, "a trial, and each tensor"


def test_what_it_does_not_know_is_vllms_own_affair(ordered: list[Tensor]) -> None:
    own = Products()
    assert OrderedRows(own, NAMES)(X, EXPERTS) == "products"
    assert own.calls == [(X, EXPERTS)]
    assert not ordered
    with pytest.raises(ValueError, match="moe_block_size"):
        OrderedRows(own, NAMES[:-1])


@needs_vllm
@pytest.mark.xdist_group("engines")  # whose process has loaded vLLM
def test_a_release_with_other_arguments_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.kernels.quick_operations import QuickOperations
    from workers.vllm.release import custom_ops

    own = {MARLIN: Products()}
    monkeypatch.setattr(custom_ops, "operation", own.get)
    monkeypatch.setattr(custom_ops, "argument_names", lambda _products: ["rows"])
    QuickOperations()
    [said] = caplog.messages
    assert said.startswith("Marlin's experts may give other bits each time: ")


def test_a_cpu_keeps_its_order() -> None:
    own, rows = Products(), torch.tensor([1, 0])
    call(OrderedRows(own, NAMES), rows)
    assert own.calls[0][1] is rows


def test_a_kernel_that_does_not_compile_is_not_used(
    ordered: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_args: Any) -> Tensor:
        raise RuntimeError("no such target")

    monkeypatch.setattr(sys.modules["workers.vllm.kernels.row_order"], "in_order", fails)
    own = Products()
    for _ in range(2):
        assert call(OrderedRows(own, NAMES), torch.tensor([2, 0, 1, 3])) == "products"
    assert [args[1].tolist() for args in own.calls] == [[2, 0, 1, 3]] * 2
    assert caplog.messages == ["ordering 4 rows of experts cannot be used: no such target"] * 2


def test_a_kernel_that_orders_wrongly_is_not_used(
    ordered: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def twice_the_first(rows: Tensor, *_args: Any) -> Tensor:
        ordered.append(rows)
        return torch.tensor([0, 0, 1, 3])

    monkeypatch.setattr(sys.modules["workers.vllm.kernels.row_order"], "in_order", twice_the_first)
    own = Products()
    products = OrderedRows(own, NAMES)
    for _ in range(2):
        call(products, torch.tensor([2, 0, 1, 3]))
    assert [args[1].tolist() for args in own.calls] == [[2, 0, 1, 3]] * 2
    assert len(ordered) == 1
    assert caplog.messages == ["ordering 4 rows of experts gives other bits: not used"]


def test_nothing_is_tried_while_a_graph_is_recorded(
    ordered: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Products()
    products = OrderedRows(own, NAMES)
    is_recording = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_recording)
    call(products, torch.tensor([2, 0, 1, 3]))
    is_recording = False
    call(products, torch.tensor([2, 0, 1, 3]))
    is_recording = True
    call(products, torch.tensor([3, 0, 1, 2]))
    assert [args[1].tolist() for args in own.calls] == [[2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_sorting_keeps_each_experts_rows_in_its_blocks() -> None:
    rows = torch.tensor([9, 5, 1, 9, 3, 2, 8, 0, 4, 9, 7, 6, 9, 8], dtype=torch.int32)
    experts = torch.tensor([0, 0, 4, -1, 2, 2], dtype=torch.int32)
    expected = [1, 5, 9, 9, 2, 3, 0, 8, 4, 9, 7, 6, 9, 8]
    assert sorted_rows(rows, experts, 10, 2).tolist() == expected
