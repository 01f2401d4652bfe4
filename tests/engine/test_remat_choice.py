"""The choice of `remat.policy auto` of an engine: by the memory of the compiled step, and only where it is open."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_users_attention
from flax import nnx
from marks import slow
from test_equality import FSDP, Setting, assert_equal_to_optax
from test_step_bytes import LENGTH, ROWS, Model, loss

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.engine import plan, steps
from jaxopt_llm.engine.plan import EnginePlan
from jaxopt_llm.engine.program import Fitting, compile_fitting
from jaxopt_llm.planning import free_memory

pytestmark = pytest.mark.core


def plan_step(memory: float, monkeypatch: pytest.MonkeyPatch, policy: Any = "auto", **model: bool) -> EnginePlan:
    """Plan on H200s of which XLA may use so many bytes."""
    given = {"listed": False, "remat": False} | model
    config = Config(mesh={"fsdp": 8}, remat={"policy": policy})  # type: ignore[arg-type]
    # Long rows, so that activations outweigh the gradients of several layers that XLA reduces together in a list.
    batch = {name: jax.ShapeDtypeStruct((ROWS, 8 * LENGTH), jnp.int32) for name in ("ids", "next")}
    made = jaxopt_llm.initialize(lambda: Model(**given, layers=8, rngs=nnx.Rngs(0)), loss, batch, config)
    monkeypatch.setattr(free_memory, "MEMORY_FRACTION", memory / plan.CHIPS["h200"].memory_bytes)
    return made.plan("h200")


@pytest.mark.parametrize("listed", [False, *slow(True)])
def test_layers_are_kept_if_they_fit_and_computed_again_otherwise(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = plan_step(2**36, monkeypatch, listed=listed)
    assert roomy.chosen.startswith("remat.policy none, which needs") and f"\nchosen: {roomy.chosen}\n" in str(roomy)
    exact = roomy.memory.peak / 0.95
    fits, tight = (plan_step(exact + extra, monkeypatch, listed=listed) for extra in (1024, -1024))
    full = plan_step(2**36, monkeypatch, policy="full", listed=listed)
    assert full.memory.peak < 0.7 * roomy.memory.peak and full.chosen == ""
    assert (fits.memory.peak, tight.memory.peak) == (roomy.memory.peak, full.memory.peak)
    assert tight.chosen.startswith("remat.policy full, because none needs")


@pytest.mark.parametrize("listed", [False, *slow(True)])
def test_nothing_is_open_where_the_model_rematerialises_its_layers(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_step(2**20, monkeypatch, remat=True, listed=listed).chosen == ""


def test_attention_is_kept_before_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three candidates in their order, each tried where the one before does not fit."""
    made = test_users_attention.engine(test_users_attention.Shape(listed=True, setting="auto"))

    def choose(*peaks: int) -> Fitting[int]:
        left = iter(peaks)
        program = made.program
        return compile_fitting(made._job, program, limit=100, compile=lambda program: next(left), count_peak=int)

    assert [choose(95).chosen[:18], choose(96, 95).chosen[:27]] == ["remat.policy none,", "remat.policy save_attention"]
    last = choose(96, 96, 0)
    assert last.chosen.startswith("remat.policy full, because save_attention") and last.program.model.saved == ()
    assert choose(96, 0).program.model.saved == ("attention",)


@pytest.mark.parametrize(("limit", "policy"), [(2**40, "none, which"), (1, "full, because none")])
def test_a_run_chooses_before_its_first_step(
    limit: int, policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "find_limit", lambda device: limit)
    assert_equal_to_optax(Setting("scanned", 3, FSDP, 1))
    assert f"chosen: remat.policy {policy} needs" in capsys.readouterr().err
