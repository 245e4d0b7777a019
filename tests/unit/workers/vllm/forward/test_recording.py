"""Recorded and replayed work: new inputs are filled in where the recording reads, or refused."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.vllm.forward.recording import NotReplayableError, recorder_for, refill


@dataclass
class Inner:
    lengths: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


@dataclass
class Metadata:
    slots: Tensor
    longest: int = 7
    scale: float | None = None
    inner: Inner = field(default_factory=Inner)
    wrapper: Any = None


def test_tensors_are_filled_in_where_they_lie() -> None:
    kept = Metadata(torch.tensor([1, 2]), inner=Inner(torch.tensor([3]), [torch.tensor([4])]))
    pointers = [kept.slots.data_ptr(), kept.inner.parts[0].data_ptr()]
    refill(
        kept, Metadata(torch.tensor([5, 6]), inner=Inner(torch.tensor([7]), [torch.tensor([8])]))
    )
    assert kept.slots.tolist() == [5, 6]
    assert kept.inner == Inner(torch.tensor([7]), [torch.tensor([8])])
    assert [kept.slots.data_ptr(), kept.inner.parts[0].data_ptr()] == pointers


def test_a_tensor_that_both_have_stays_as_it_is() -> None:
    shared = torch.tensor([1, 2])
    refill(Metadata(shared), Metadata(shared))
    assert shared.tolist() == [1, 2]


@pytest.mark.parametrize(
    "new",
    [
        Metadata(torch.tensor([1, 2, 3])),
        Metadata(torch.tensor([1.0, 2.0])),
        Metadata(torch.tensor([1, 2]), longest=8),
        Metadata(torch.tensor([1, 2]), scale=0.5),
        Metadata(torch.tensor([1, 2]), inner=Inner(torch.tensor([1]))),
        Metadata(torch.tensor([1, 2]), inner=Inner(parts=[torch.tensor([1])])),
        Inner(),
    ],
    ids=[
        "longer",
        "another dtype",
        "a number",
        "another number",
        "one more tensor",
        "one more item",
        "another kind",
    ],
)
def test_what_differs_beyond_the_contents_of_tensors_is_refused(new: Any) -> None:
    with pytest.raises(NotReplayableError):
        refill(Metadata(torch.tensor([1, 2])), new)


def test_an_object_that_may_hide_tensors_is_refused_although_both_have_it() -> None:
    wrapper = object()
    with pytest.raises(NotReplayableError, match="hide"):
        refill(
            Metadata(torch.tensor([1]), wrapper=wrapper),
            Metadata(torch.tensor([1]), wrapper=wrapper),
        )


def test_a_replay_fills_the_same_output_from_what_the_inputs_hold_then() -> None:
    x = torch.tensor([1.0, 2.0])
    replay = recorder_for(torch.device("cpu"), nullcontext).record(lambda: x.add_(1) * 2)
    assert x.tolist() == [1, 2], "nothing has run, or a state would be moved on twice"
    x.fill_(3)
    assert replay().tolist() == [8, 8]


@dataclass
class Plan:
    """As FlashMLA's: made by the first kernel that is given it."""

    have_initialized: bool = False
    splits: Tensor | None = None


def test_a_plan_that_the_recorded_work_makes_stays_its_own() -> None:
    made = torch.tensor([3])
    kept = Metadata(torch.tensor([1]), wrapper=Plan(True, made))
    refill(kept, Metadata(torch.tensor([2]), wrapper=Plan()))
    assert kept.wrapper.splits is made
    assert (kept.slots.tolist(), made.tolist()) == ([2], [3])


def test_a_plan_that_comes_with_the_metadata_is_filled_in() -> None:
    kept = Metadata(torch.tensor([1]), wrapper=Plan(False, torch.tensor([3])))
    refill(kept, Metadata(torch.tensor([1]), wrapper=Plan(False, torch.tensor([4]))))
    assert kept.wrapper.splits.tolist() == [4]


def test_a_plan_of_the_engine_is_ready_with_the_metadata_while_it_is_the_same() -> None:
    """FlashInfer's for sparse attention on Hopper, of which each engine has one."""
    plan = type("_SM90State", (), {})
    kept = plan()
    refill(kept, kept)
    with pytest.raises(NotReplayableError, match="may hide tensors"):
        refill(kept, plan())


def test_what_layers_have_left_in_a_dictionary_may_hide_tensors() -> None:
    refill(Metadata(torch.tensor([1]), wrapper={}), Metadata(torch.tensor([1]), wrapper={}))
    with pytest.raises(NotReplayableError):
        refill(
            Metadata(torch.tensor([1]), wrapper={"layer": torch.tensor([1])}),
            Metadata(torch.tensor([1]), wrapper={}),
        )
