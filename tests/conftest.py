"""What every kind of test shares: tests marked gpu are skipped where there is no CUDA device."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only now: unit tests start faster without it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
