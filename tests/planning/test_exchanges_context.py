"""Choice between a ring and an all-to-all for attention over a divided sequence."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxopt_llm import train
from jaxopt_llm.compiler.chips import LinkRates
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.planning.exchanges import FIELD, resolve_context_exchange
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step.validation import validate

RECIPE = cli.load_recipe("llama3_8b_128k.py")  # 32 heads, 8 key-value heads, context 8
EIGHT = Cluster("h200", 1, 8)
SLOW = Cluster("h200", 8, 1)
WINDOW: dict[str, Any] = {"model.pattern": ("sliding",), "model.window": 65_536}


def with_settings(settings: dict[str, Any]) -> Config:
    config: Config = fields.replace_fields(RECIPE, settings)
    validate(config)
    return config


@pytest.mark.core
@pytest.mark.parametrize(
    ("cluster", "settings", "expected"),
    [
        (EIGHT, {}, "all_to_all"),
        (SLOW, {}, "ring"),
        (SLOW, WINDOW, "all_to_all"),
        (SLOW, WINDOW | {"training.attention": "pallas"}, "ring"),
        (SLOW, WINDOW | {"training.attention": "cudnn"}, "all_to_all"),
        (EIGHT, {FIELD: "ring"}, "ring"),
        (SLOW, {FIELD: "all_to_all"}, "all_to_all"),
        (Cluster("h200", 8, 8), {"mesh.context": 64}, "ring"),
        (SLOW, {"training.sequence_length": 32_760}, "all_to_all"),
        (EIGHT, {"mesh.context": 1, "mesh.fsdp": 8, "training.accumulation": 1}, "auto"),
        (None, {}, "ring"),
    ],
    ids=[
        "fast links",
        "slow links",
        "a window, without cuDNN in a ring",
        "a window, by a kernel that supports both",
        "a window, by a kernel that supports one",
        "given",
        "given too",
        "more devices than heads",
        "odd parts",
        "no context",
        "CPUs",
    ],
)
def test_the_choice(cluster: Cluster | None, settings: dict[str, Any], expected: str) -> None:
    config = with_settings(settings)
    resolved = resolve_context_exchange(config, cluster)
    assert resolved == fields.replace_fields(config, {FIELD: expected})
    validate(resolved)


@pytest.mark.parametrize(
    ("settings", "kept", "expected"),
    [
        ({}, "ring", "ring"),
        ({}, "all_to_all", "all_to_all"),
        ({"mesh.context": 64}, "all_to_all", "ring"),
        (WINDOW | {"training.attention": "cudnn"}, "ring", "all_to_all"),
    ],
    ids=["slower", "faster", "sizes", "kernel"],
)
def test_a_run_that_continues_keeps_its_exchange_if_it_can(settings: dict[str, Any], kept: str, expected: str) -> None:
    config = with_settings(settings)
    assert resolve_context_exchange(config, EIGHT, kept).sharding.context_exchange == expected


def test_a_resume_reads_the_exchange_with_which_the_run_began(tmp_path: Path) -> None:
    """CPUs otherwise take a ring. So does a run that continues on another mesh."""
    began = with_settings({FIELD: "all_to_all", "run.directory": str(tmp_path)})
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "config.json").write_text(fields.to_json(began))
    (tmp_path / "device.json").write_text(json.dumps({"kind": jax.devices()[0].device_kind}))
    wanted = {"run.directory": str(tmp_path)}
    changed = wanted | {"mesh.context": 4}
    found = [train._resolve_exchange(with_settings(each), first=True) for each in (wanted, changed)]
    assert [each.sharding.context_exchange for each in found] == ["all_to_all", "ring"]


def test_rates_that_a_run_does_not_know_do_not_change_the_choice() -> None:
    """`plan --nvlink` then describes the program that a run compiles."""
    slow = Cluster("h200", 1, 8, LinkRates(nvlink=1))
    assert resolve_context_exchange(RECIPE, slow) == resolve_context_exchange(RECIPE, EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "faster"), [(EIGHT, "all_to_all"), (SLOW, "ring")], ids=["fast links", "slow links"]
)
def test_the_compiled_steps_agree(cluster: Cluster, faster: str) -> None:
    seconds = {
        exchange: make_plan(
            with_settings({FIELD: exchange}), "h200", cluster.hosts, cluster.gpus_per_host
        ).speed.step_seconds
        for exchange in ("ring", "all_to_all")
    }
    assert min(seconds, key=seconds.__getitem__) == faster
