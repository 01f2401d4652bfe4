"""Marks of tests, which pyproject.toml explains."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return the cases of a parametrised test, marked as slow. A case is a tuple of arguments or a single one."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
