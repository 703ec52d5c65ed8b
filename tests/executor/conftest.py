"""Shared by the executor's tests in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """The process group of one test must not reach the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
