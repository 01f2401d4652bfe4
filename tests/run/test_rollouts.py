"""Runs that train on answers which the model draws itself: batches, records, meshes, and resumes to the bit."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy
from commands import checkpoint, metrics
from drawing import make_config, records, run

from jaxopt_llm import train as training
from jaxopt_llm.config import fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.prompts import Prompt, check_room
from jaxopt_llm.execution import scan
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.planning.step_plan import count_rollout_bytes
from jaxopt_llm.run.directory import hash_functions
from jaxopt_llm.run.rollouts import Answer, find_advantages, measure_answers, pack_answers


def test_a_run_that_continues_ends_equal_to_the_bit(tmp_path: Path) -> None:
    """The checkpoint is between the two steps that train on the same answers, which are read from the log."""
    settings: dict[str, Any] = {"rollouts.updates": 2, "evaluation.every": 3, "data.held_out": 0.3}
    whole = run(make_config(tmp_path, **settings, **{"run.directory": str(tmp_path / "whole")}))
    parts = run(make_config(tmp_path, **settings, **{"training.steps": 3}))
    with (parts / "rollouts.jsonl").open("a") as log:  # of a step after the checkpoint, which a killed run lost
        log.write(json.dumps(records(parts)[-1] | {"step": 5}) + "\n")
    run(make_config(tmp_path, **settings))
    assert records(parts) == records(whole)
    assert [record["step"] for record in records(whole)] == [1, 1, 3, 3, 5, 5]
    jax.tree.map(np.testing.assert_array_equal, checkpoint(parts, 6), checkpoint(whole, 6))
    found, expected = ([{**each, "rollout_seconds": 0} for each in metrics(each)] for each in (parts, whole))
    assert found == expected
    by_step = {each["step"]: each for each in expected}
    assert by_step[2]["sampler_kl"] > 100 * by_step[1]["sampler_kl"] and by_step[3]["sampler_kl"] < 1e-9
    assert by_step[6]["eval_rewards/mean"] == -by_step[6]["eval_loss"]
    assert len({tuple(answer["tokens"]) for record in records(whole) for answer in record["answers"]}) > 20


def test_what_is_rewarded_is_learned(tmp_path: Path) -> None:
    """Half of the tokens that an untrained model draws are below 128."""
    rewards = (f"{tmp_path / 'mine.py'}:lowness",)
    config = make_config(tmp_path, **{"rollouts.rewards": rewards, "training.steps": 30, "checkpoint.every": 100})
    means = [each["rewards/mean"] for each in metrics(run(config))]
    assert 0.3 < means[0] < 0.7 and np.mean(means[-5:]) > 0.9


def test_a_function_with_another_source_continues_no_run(tmp_path: Path) -> None:
    """Another path changes nothing, and the change can be allowed. What is not learned from may change."""
    run(make_config(tmp_path, **{"training.steps": 1}))
    moved = tmp_path / "moved.py"
    moved.write_text((tmp_path / "mine.py").read_text())
    settings = {"rollouts.rewards": (f"{moved}:evenness",)}
    run(make_config(tmp_path, **settings, **{"training.steps": 2}))
    moved.write_text(moved.read_text().replace("== is_odd", "!= is_odd"))
    with pytest.raises(InputError) as raised:
        run(make_config(tmp_path, **settings, **{"training.steps": 3}))
    assert re.search(
        r"holds another run: rollouts.rewards names \S*moved.py:evenness, whose source differs from the run's; set "
        "another --run.directory, or allow the change with --run.allow-change rollouts.rewards$",
        str(raised.value),
    )
    allowed = {"run.allow_change": ("rollouts.rewards",)}
    run(make_config(tmp_path, **settings, **allowed, **{"training.steps": 3}))
    assert len(metrics(run(make_config(tmp_path, **settings, **{"training.steps": 4})))) == 4
    recorded = make_config(tmp_path, **settings)
    assert hash_functions(recorded).keys() == {"rollouts.rewards"}
    assert hash_functions(fields.replace_fields(recorded, {"training.objective": "distill"})) == {}


def test_a_function_that_fails_keeps_the_steps_before(tmp_path: Path) -> None:
    rewards = (f"{tmp_path / 'mine.py'}:fails_in_step_4",)
    config = make_config(tmp_path, **{"rollouts.rewards": rewards, "checkpoint.every": 100})
    with pytest.raises(InputError, match=r"mine.py, line \d+: ZeroDivisionError"):
        run(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()] == ["3"]


def test_a_function_that_fails_in_an_evaluation_keeps_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "few.py"
    path.write_text("def few(completions, **columns):\n    return [1 / (len(completions) > 5)] * len(completions)\n")
    settings = {
        "rollouts.rewards": (f"{path}:few",),
        "checkpoint.every": 100,
        "evaluation.every": 2,
        "data.held_out": 0.3,
    }
    with pytest.raises(InputError, match="ZeroDivisionError"):
        run(make_config(tmp_path, **settings))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()] == ["2"]


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}], ids=["fsdp, tensor", "stages"])
def test_sampler_and_step_agree_on_every_mesh(tmp_path: Path, axes: dict[str, int]) -> None:
    """The sampler's log-probabilities are those of the step, for each token, so that nothing is clipped."""
    settings = {f"mesh.{axis}": size for axis, size in axes.items()}
    config = make_config(tmp_path, **settings, **{"training.steps": 1, "training.accumulation": 2})
    (record,) = metrics(run(config))
    answers = [answer for each in records(tmp_path / "run") for answer in each["answers"]]
    drawn = np.concatenate([answer["log_probabilities"] for answer in answers])
    assert 0 <= record["sampler_kl"] < 1e-9 and record["clipped"] == 0
    assert record["entropy"] == pytest.approx(-drawn.mean(), rel=1e-5)
    assert record["rewards/mean"] == np.mean([answer["rewards"]["evenness"] for answer in answers])
    sizes = [len(answer["tokens"]) for answer in answers]
    advantages = np.repeat([answer["advantage"] for answer in answers], sizes)
    assert record["loss"] == pytest.approx(-advantages.mean(), abs=1e-6)


def test_rows_hold_the_answers_whole(tmp_path: Path) -> None:
    config, random = make_config(tmp_path), np.random.default_rng(0)
    groups = []
    for size in (1, 3):
        prompt = Prompt(random.integers(1, 250, size).astype(np.int32), {"prompt": ""})
        groups.append((prompt, [make_answer(random, n) for n in (1, 6, 2, 5)]))
    batch = pack_answers(groups, config)
    assert batch.tokens.shape == (4, 24) and int(batch.loss_mask.sum()) == 2 * 14
    found = {}
    for row in range(4):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            inside, counted = (batch.segment_ids[row] == segment), batch.loss_mask[row]
            places = inside & counted
            assert (batch.positions[row][inside] == np.arange(inside.sum())).all()
            ids = [*batch.tokens[row][inside], batch.targets[row][places][-1]]
            found[tuple(ids)] = batch.targets[row][places], batch.sampled[row][places], batch.labels[row][inside]
    for prompt, answers in groups:
        for answer in answers:
            targets, sampled, labels = found.pop((*prompt.ids, *answer.ids))
            np.testing.assert_array_equal(targets, answer.ids)
            np.testing.assert_array_equal(sampled, answer.log_probabilities)
            assert (labels == np.float32(answer.advantage)).all()
    assert not found


def make_answer(random: np.random.Generator, size: int, reward: float = 0.0, ended: bool = True) -> Answer:
    ids, found = random.integers(1, 250, size).astype(np.int32), random.normal(size=size).astype(np.float32)
    return Answer(ids, found, "", ended, {"a": reward, "b": None}, float(random.normal()))


def test_advantages_compare_with_the_group() -> None:
    rewards = np.array([[1.0, 0, 0, 3], [2, 2, 2, 2]])
    np.testing.assert_allclose(find_advantages(rewards, "none"), [[0, -1, -1, 2], [0] * 4])
    np.testing.assert_allclose(
        find_advantages(rewards, "std"), [np.array([0, -1, -1, 2]) / (np.sqrt(2) + 1e-4), [0] * 4]
    )


def test_metrics_of_answers() -> None:
    random = np.random.default_rng(0)
    groups = [(Prompt(np.ones(1, np.int32), {}), [make_answer(random, n, r) for n, r in pairs]) for pairs in PAIRS]
    found = measure_answers(groups)
    assert found == pytest.approx(
        {"rewards/mean": 1.0, "rewards/std": np.sqrt(1.375), "rewards/equal_groups": 0.5, "rewards/a": 1.0}
        | {"answers/length": 2.5, "answers/truncated": 0.0}
    )


PAIRS = [((1, 0.0), (2, 3.0)), ((3, 0.5), (4, 0.5))]


def test_a_batch_has_room_for_the_longest_answers(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    check_room(3, config)  # three documents of 8 tokens a row
    with pytest.raises(InputError, match="have up to 9 tokens each, and need 4 rows .* to at least 4$"):
        check_room(4, fields.replace_fields(config, {"training.batch_size": 3}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.content": "text"}, "reads prompts without answers: set --data.content prompt"),
        (
            {"training.objective": "next_token"},
            "needs texts or answers, not prompts alone; set --training.objective grpo",
        ),
        ({"rollouts.rewards": ()}, "name it with --rollouts.rewards FILE:FUNCTION"),
        ({"rollouts.rewards": ("mine.py",)}, "mine.py: must be FILE:FUNCTION"),
        ({"grpo.beta": 0.1}, "grpo.beta=0.1 compares with the model without its adapters"),
        ({"training.ema_decay": 0.9}, "grpo does not support training.ema_decay=0.9: set --training.ema-decay 0"),
        ({"evaluation.tasks": ("sums",)}, "grpo does not support evaluation.tasks=sums: leave it out"),
        ({"grpo.max_ratio": 1.2}, "grpo.max_ratio=1.2: must be above 1"),
        (
            {"rollouts.server": "gpu3:8000"},
            "rollouts.server=gpu3:8000: must be an address such as http://127.0.0.1:8000",
        ),
        ({"rollouts.server": "http://x/v1"}, "model.pretrained is empty: name the model that the server has"),
        (
            {"rollouts.server": "http://x/v1", "training.trainable": ("*",)},
            "trains some of the weights: set it to ()",
        ),
    ],
)
def test_what_does_not_suit_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    config = fields.replace_fields(make_config(tmp_path), settings)
    assert any(message in problem for problem in config.problems())


def test_what_the_data_do_not_allow_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "taken.jsonl").write_text('{"prompt": "a", "completions": 1}\n' * 9)
    for settings, message in (
        ({"rollouts.prompts": 9}, "need 18 rows"),
        ({"rollouts.max_new_tokens": 24}, "no prompt has at most 1 tokens"),
        ({"data.paths": (str(tmp_path / "taken.jsonl"),)}, "the column completions has the name of an argument"),
    ):
        with pytest.raises(InputError, match=message):
            run(fields.replace_fields(config, settings))


def test_the_command_refuses_a_function_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, **{"rollouts.rewards": (f"{tmp_path}/mine.py:absent",)})
    (tmp_path / "config.json").write_text(fields.to_json(config))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(tmp_path / "config.json")])
    with pytest.raises(InputError, match="mine.py:absent: the file defines no function absent$"):
        training.main()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_planned_cache_is_that_of_the_sampler(tmp_path: Path, kv_heads: int) -> None:
    config = make_config(tmp_path, **{"mesh.fsdp": 2, "mesh.tensor": 2, "model.kv_heads": kv_heads})
    placement = toy.placement(3, fsdp=2, tensor=2)
    rows, slots = 8, config.training.sequence_length + 1
    made = jax.jit(lambda: scan.make_caches(Decoder(config.model), rows, slots, "float32", placement))()
    assert count_rollout_bytes(config) == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(made))
    others = {"rollouts.server": "http://127.0.0.1:8000/v1"}, {"training.objective": "next_token"}
    assert [count_rollout_bytes(fields.replace_fields(config, other)) for other in others] == [0, 0]
