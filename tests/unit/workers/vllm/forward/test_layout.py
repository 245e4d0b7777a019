"""When slices build attention metadata again: after somebody else used the builder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.harness.marks import needs_vllm

if TYPE_CHECKING:
    from workers.vllm.forward.layout import Layout

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

BLOCK = 4


class Builder:
    """Keeps what it built in one buffer, as vLLM's builders do."""

    kv_cache_spec = SimpleNamespace(block_size=BLOCK)

    def __init__(self) -> None:
        self.buffer = torch.zeros(64, dtype=torch.int64)
        self.built = 0

    def build(self, _common_prefix_len: int, common: Any) -> torch.Tensor:
        self.built += 1
        slots = self.buffer[: len(common.slot_mapping)]
        return slots.copy_(common.slot_mapping)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def layout(builder: Builder) -> Layout:
    return layout_of(builder, 2, range(6))


def layout_of(builder: Builder, n: int, positions: range) -> Layout:
    from workers.vllm.forward.kv_isolation import ScratchGroup
    from workers.vllm.forward.layout import BlockTables, Layout

    device = torch.device("cpu")
    group = SimpleNamespace(get_metadata_builder=lambda _index: builder)
    groups = [ScratchGroup(group, BLOCK, ("attn",), 0, False)]
    tables = BlockTables(groups, n, len(positions), 8, device)
    return Layout(tables, positions)


def slots(layout: Layout) -> list[int]:
    found: list[int] = layout.metadata()["attn"].tolist()
    return found


def test_slices_share_what_was_built_once(builder: Builder, layout: Layout) -> None:
    first = slots(layout)
    assert [slots(layout) for _ in range(3)] == [first] * 3
    assert builder.built == 1


def test_it_is_built_again_after_a_chat_step_and_after_another_micro_batch(
    builder: Builder, layout: Layout
) -> None:
    first = slots(layout)
    builder.build(0, SimpleNamespace(slot_mapping=torch.full((12,), -1)))
    assert slots(layout) == first
    other = layout_of(builder, 3, range(4))
    assert slots(other) != first
    assert slots(layout) == first
    assert slots(other) != first


def test_a_step_at_another_position_builds_its_own(builder: Builder) -> None:
    layout = layout_of(builder, 2, range(6, 7))
    first = slots(layout)
    layout.move_to(7)
    assert slots(layout) == [slot + 1 for slot in first]
