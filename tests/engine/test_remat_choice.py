"""The choice of `remat.policy auto` of an engine: by the memory of the compiled step, and only where it is open."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_equality import FSDP, Setting, assert_equal_to_optax
from test_step_bytes import LENGTH, ROWS, Model, loss

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.engine import engine, plan
from jaxopt_llm.engine.plan import EnginePlan

pytestmark = pytest.mark.core


def plan_step(memory: float, monkeypatch: pytest.MonkeyPatch, policy: Any = "auto", **model: bool) -> EnginePlan:
    """Plan on H200s of which XLA may use so many bytes."""
    given = {"listed": False, "remat": False} | model
    config = Config(mesh={"fsdp": 8}, remat={"policy": policy})  # type: ignore[arg-type]
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("ids", "next")}
    made = jaxopt_llm.initialize(lambda: Model(**given, layers=8, rngs=nnx.Rngs(0)), loss, batch, config)
    monkeypatch.setattr(plan, "MEMORY_FRACTION", memory / plan.CHIPS["h200"].memory_bytes)
    return made.plan("h200")


def test_layers_are_kept_if_they_fit_and_computed_again_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = plan_step(2**36, monkeypatch)
    assert roomy.chosen.startswith("remat.policy none, which needs") and f"\nchosen: {roomy.chosen}\n" in str(roomy)
    exact = roomy.memory.peak / 0.95
    fits, tight = (plan_step(exact + extra, monkeypatch) for extra in (1024, -1024))
    full = plan_step(2**36, monkeypatch, policy="full")
    assert full.memory.peak < 0.7 * roomy.memory.peak and full.chosen == ""
    assert (fits.memory.peak, tight.memory.peak) == (roomy.memory.peak, full.memory.peak)
    assert tight.chosen.startswith("remat.policy full, because none needs")


@pytest.mark.parametrize("model", [{"remat": True}, {"listed": True}])
def test_nothing_is_open_without_a_loop_that_keeps_its_layers(
    model: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_step(2**20, monkeypatch, **model).chosen == ""


@pytest.mark.parametrize(("limit", "policy"), [(2**40, "none, which"), (1, "full, because none")])
def test_a_run_chooses_before_its_first_step(
    limit: int, policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "find_limit", lambda device: limit)
    assert_equal_to_optax(Setting("scanned", 3, FSDP, 1))
    assert f"chosen: remat.policy {policy} needs" in capsys.readouterr().err
