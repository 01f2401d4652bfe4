"""Runs with local steps: in parts, with other numbers of groups, and as other commands read them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import checkpoint, some_text, train

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree

SETTINGS = (
    *("--training.local-steps", 3, "--optimizer.learning-rate", 1e-2, "--schedule.decay-steps", 9),
    *("--precision.compute-dtype", "float32", "--training.batch-size", 12, "--checkpoint.every", 3),
)
TREES = ("masters", "moments", "groups")


def run(directory: Path, steps: int, groups: int, *arguments: object) -> Any:
    data = ("--data.paths", directory.parent / "a.jsonl")
    return train(directory, "--mesh.data", groups, "--training.steps", steps, *SETTINGS, *data, *arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 6 steps on two groups, without a break."""
    directory = tmp_path_factory.mktemp("local") / "run"
    some_text(directory.parent / "a.jsonl")
    done = run(directory, 6, 2)
    assert done.returncode == 0, done.stderr
    return directory


def read(directory: Path, step: int) -> dict[str, Any]:
    return checkpoint(directory, step, TREES)


def group(trees: dict[str, Any], index: int) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], trees["groups"])


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, one), jax.tree.map(np.asarray, other))


def test_a_run_in_two_parts_is_equal_to_the_bit(whole: Path, tmp_path: Path) -> None:
    """It stops after step 4, between two outer steps, where the groups differ."""
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    stopped = run(tmp_path / "run", 4, 2)
    assert stopped.returncode == 0, stopped.stderr
    assert "the last 1 of 4 steps are in no outer step" in stopped.stderr + stopped.stdout
    between = read(tmp_path / "run", 4)
    after_3 = read(whole, 3)
    assert_equal(between["masters"], after_3["masters"])
    for index in range(2):
        assert_equal(group(after_3, index)["masters"], after_3["masters"])
    assert any(
        np.any(np.asarray(a) != np.asarray(b))
        for a, b in zip(*(jax.tree.leaves(each["masters"]) for each in (after_3, read(whole, 6))), strict=True)
    )
    assert any(np.any(leaf[0] != leaf[1]) for leaf in jax.tree.leaves(between["groups"]["masters"]))
    assert run(tmp_path / "run", 6, 2).returncode == 0
    assert_equal(read(tmp_path / "run", 6), read(whole, 6))


@pytest.mark.parametrize("groups", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resume_with_other_groups_continues_from_those_of_the_checkpoint(
    whole: Path, tmp_path: Path, groups: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    assert run(tmp_path / "run", 4, 2).returncode == 0
    before = read(tmp_path / "run", 4)
    # Groups that learn nothing show where they began.
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0)
    allowed = ("--run.allow-change", "optimizer.learning_rate", "optimizer.weight_decay")
    done = run(tmp_path / "run", 5, groups, *still, *allowed)
    assert done.returncode == 0, done.stderr
    assert f"has 2 groups in one program, and this run {groups}" in done.stderr + done.stdout
    after = read(tmp_path / "run", 5)
    assert_equal(after["masters"], before["masters"])
    for index in range(groups):
        assert_equal(group(after, index)["masters"], group(before, index % 2)["masters"])


def test_a_loaded_model_has_the_masters_of_the_last_outer_step(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    assert run(tmp_path / "run", 4, 2).returncode == 0
    assert_equal(jaxopt_llm.load_pretrained(tmp_path / "run").params, read(whole, 3)["masters"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sharding.zero_stage": 1}, "does not support sharding.zero_stage=1: set --sharding.zero-stage 3, or"),
        (
            {"sharding.optimizer_over_data": True},
            "support sharding.optimizer_over_data=True: set --sharding.optimizer-",
        ),
        ({"mesh.pipeline": 2}, "does not support mesh.pipeline=2: set --mesh.pipeline 1, or"),
        ({"offload.optimizer": True}, "does not support offload.optimizer=True: set --offload.optimizer False, or"),
        ({"training.ema_decay": 0.9}, "does not support training.ema_decay=0.9: set --training.ema-decay 0, or"),
        ({"training.steps": 2}, "training.local_steps=3 exceeds training.steps=2, so no outer step follows: set"),
        (
            {"model.moe.experts": 4, "mesh.expert": 2},
            "does not support sharding.expert_exchange=auto: set --sharding.expert-exchange gather, or",
        ),
    ],
)
def test_what_local_steps_do_not_support_is_refused(settings: dict[str, Any], says: str) -> None:
    config = replace_fields(Config(), {"training.local_steps": 3, "mesh.data": 2} | settings)
    (problem,) = config.local_step_problems()
    assert says in problem and problem in config.problems()


def test_another_number_of_local_steps_must_be_allowed(whole: Path) -> None:
    done = run(whole, 9, 2, "--training.local-steps", 1)
    assert done.returncode == 2 and "training.local_steps was 3 and is 1" in done.stderr
    assert "--run.allow-change training.local_steps" in done.stderr


STILL = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0)
CHANGES = ("--run.allow-change", "training.local_steps", "optimizer.learning_rate", "optimizer.weight_decay")


def test_groups_begin_from_a_checkpoint_without_local_steps(whole: Path, tmp_path: Path) -> None:
    """Its moments go on, too: DiLoCo's runs begin with steps in which all gradients are summed."""
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    assert run(tmp_path / "run", 2, 2, "--training.local-steps", 1).returncode == 0
    before = checkpoint(tmp_path / "run", 2)
    done = run(tmp_path / "run", 4, 2, *STILL, *CHANGES)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has no groups in one program, and this run 2" in done.stderr + done.stdout
    after = read(tmp_path / "run", 4)
    for index in range(2):
        assert_equal(group(after, index)["masters"], before["masters"])
    # The second moments of four steps: those of the first two, decayed twice, are a part of them.
    for old, new in zip(*map(list_second_moments, (before["moments"], group(after, 0)["moments"])), strict=True):
        assert np.all(new >= 0.95**2 * old * (1 - 1e-6)) and np.any(old > 0)


def list_second_moments(moments: Any) -> list[Any]:
    found = [leaf for path, leaf in tree.leaves_with_path(moments) if "/nu/" in path]
    assert found
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="one device"),
        pytest.param(("--mesh.fsdp", 2, "--sharding.zero-stage", 2), id="fsdp"),
        pytest.param(("--mesh.pipeline", 2, "--offload.optimizer", True), id="pipeline and offload"),
    ],
)
def test_a_run_without_local_steps_continues_from_the_mean_of_the_groups(
    whole: Path, tmp_path: Path, settings: tuple[object, ...]
) -> None:
    """It stops after step 4, between two outer steps, where the groups differ."""
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    assert run(tmp_path / "run", 4, 2).returncode == 0
    groups = read(tmp_path / "run", 4)["groups"]
    done = run(tmp_path / "run", 5, 1, "--training.local-steps", 1, *settings, *STILL, *CHANGES)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has 2 groups in one program, and this run none" in done.stderr + done.stdout
    after = checkpoint(tmp_path / "run", 5)
    assert_equal(after["masters"], jax.tree.map(lambda leaf: leaf.mean(axis=0), groups["masters"]))
    for old, new in zip(*map(list_second_moments, (groups["moments"], after["moments"])), strict=True):
        assert np.all(new >= 0.95 * old[0] * (1 - 1e-6)) and np.any(old[0] > 0)


def test_groups_continue_with_rounds_of_another_length(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes((whole.parent / "a.jsonl").read_bytes())
    assert run(tmp_path / "run", 3, 2).returncode == 0
    done = run(tmp_path / "run", 4, 2, "--training.local-steps", 2, *CHANGES)
    assert done.returncode == 0, done.stderr
    after = read(tmp_path / "run", 4)  # an outer step follows step 4
    for index in range(2):
        assert_equal(group(after, index)["masters"], after["masters"])
