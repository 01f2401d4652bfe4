"""Tests of the held-out loss: a mean over tokens, not over batches."""

from typing import Any

import numpy as np
import pytest

from jaxopt_llm.run.compile import LossSum, measure_loss

pytestmark = pytest.mark.core


def test_every_token_counts_alike_whatever_its_batch() -> None:
    sums: list[Any] = [(np.float32(12), np.int32(2)), (np.float32(3), np.int32(1)), (np.float32(5), np.int32(7))]
    assert measure_loss(lambda state, batch: batch, "state", sums) == LossSum(20, 10)  # type: ignore[arg-type]
