"""Which programs form stacks of gradients before they add them, by arithmetic."""

from typing import Any

import pytest

from jaxopt_llm.config import Config, fields
from jaxopt_llm.planning.search.microbatch import adds_in_place


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training.accumulation": 1}, False),
        ({"mesh.pipeline": 2}, False),
        ({"precision.reduce_dtype": "bfloat16"}, False),
        ({"precision.matmul": "fp8"}, True),
        ({"precision.matmul": "fp8", "precision.compute_dtype_layers": 1}, False),
        ({"remat.policy": "full", "remat.every": 2}, False),
    ],
)
def test_only_the_plain_loop_over_layers_adds_in_place(changes: dict[str, Any], expected: bool) -> None:
    """The loops over spans of layers, or over groups of them, are other branches of segments.py."""
    assert adds_in_place(fields.replace_fields(Config(), {"training.accumulation": 2} | changes)) == expected
