"""The main command and its run directory: start, stop, resume, finish."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import (
    ENVIRONMENT,
    TIMINGS,
    TINY,
    assert_one_line,
    checkpoint,
    command,
    metrics,
    some_text,
    start,
    tiny,
    train,
)
from folders import folder_with_tokenizer

from jaxopt_llm.config import Config, DataConfig, EvaluationConfig, MeshConfig, cli
from jaxopt_llm.config.fields import from_json
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.run.directory import check_directory_is_free
from jaxopt_llm.run.setup import open_documents, pack_documents


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps without a stop."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    done = train(directory, "--training.steps", 8, "--evaluation.every", 4)
    assert done.returncode == 0, done.stderr
    return directory


def test_metrics_have_every_field(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    fields = {"step", "loss", "grad_norm", "learning_rate", "tokens"} | TIMINGS
    assert all(fields <= set(record) for record in records)
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8]
    assert [record["tokens"] for record in records] == [step * 4 * 32 for step in range(1, 9)]


@pytest.mark.core
@pytest.mark.parametrize(
    "placed",
    [
        (),
        ("--mesh.fsdp", 2, "--mesh.tensor", 2, "--training.accumulation", 2),
    ],
    ids=["same", "another-mesh"],
)
def test_stopped_and_resumed_equals_not_stopped(whole: Path, tmp_path: Path, placed: tuple[object, ...]) -> None:
    directory = tmp_path / "run"
    first = train(directory, "--training.steps", 4, "--evaluation.every", 4)
    assert first.returncode == 0, first.stderr
    # What an interrupted run logs after its last checkpoint is cut back: it is about to happen again.
    with (directory / "metrics.jsonl").open("a") as log:
        log.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    second = train(directory, "--training.steps", 8, "--evaluation.every", 4, *placed)
    assert second.returncode == 0, second.stderr
    assert "continues from step 4" in second.stdout
    if not placed:
        assert metrics(directory) == metrics(whole)
        jax.tree.map(np.testing.assert_array_equal, checkpoint(directory, 8), checkpoint(whole, 8))
    else:
        assert [record["step"] for record in metrics(directory)] == list(range(1, 9))
        for name in ("loss", "grad_norm", "eval_loss"):
            values = [[record[name] for record in metrics(run) if name in record] for run in (directory, whole)]
            np.testing.assert_allclose(*values, rtol=1e-4, err_msg=name)


def test_a_run_that_was_killed_between_records_records_the_same_means(whole: Path, tmp_path: Path) -> None:
    directory, options = tmp_path / "run", ("--training.steps", 8, "--logging.every", 4)
    options += ("--checkpoint.every", 3, "--checkpoint.keep", 3)
    done = train(directory, *options)
    assert done.returncode == 0, done.stderr
    undisturbed = metrics(directory)
    losses = [record["loss"] for record in metrics(whole)]  # recorded after every step
    assert [record["loss"] for record in undisturbed] == [sum(losses[:4]) / 4, sum(losses[4:]) / 4]
    for step in (6, 8):
        shutil.rmtree(directory / "checkpoints" / str(step))
    done = train(directory, *options)
    assert "continues from step 3" in done.stdout, done.stderr
    assert metrics(directory) == undisturbed


@pytest.mark.slow  # tests/step/test_state.py and test_moments.py have one go to a pipeline and back
def test_a_pipelines_checkpoint_is_everyones(tmp_path: Path) -> None:
    """Written by stages and read by one device, and by others, and the run ends as if there had been no pipeline."""
    directory, plain = tmp_path / "run", tmp_path / "plain"
    model = ("--model.layers", 7, "--model.pattern", "global", "--evaluation.every", 2)
    interleaved = ("--pipeline.schedule", "interleaved", "--pipeline.virtual-stages", 2)
    staged = ("--mesh.pipeline", 2, "--mesh.fsdp", 2, "--training.accumulation", 2)
    stops_on_stages = {2: (*staged, *interleaved), 4: interleaved, 6: (*staged, "--pipeline.split", 5, 2)}
    for run, stops in ((plain, {6: ()}), (directory, stops_on_stages)):
        for steps, placed in stops.items():
            done = train(run, "--training.steps", steps, *model, *placed)
            assert done.returncode == 0, done.stderr
            assert all(line.startswith("warning: no effect: pipeline.") for line in done.stderr.splitlines())
    assert command("generate", "--checkpoint", directory, "--prompt", "def ", "--tokens", 2).returncode == 0
    for name in ("loss", "grad_norm", "eval_loss"):
        values = [[record[name] for record in metrics(run) if name in record] for run in (directory, plain)]
        np.testing.assert_allclose(*values, rtol=1e-4, err_msg=name)
    written, expected = (checkpoint(run, 6) for run in (directory, plain))
    assert jax.tree.map(np.shape, written) == jax.tree.map(np.shape, expected)


@pytest.mark.slow
def test_experts_go_on_where_they_are_placed_otherwise(tmp_path: Path) -> None:
    """From devices that have some of the experts each to others that have a part of each, and back."""
    mixed = (
        "--model.moe.experts",
        4,
        "--model.moe.expert-width",
        16,
        "--model.moe.router",
        "sigmoid",
        "--model.moe.router-bias",
        True,
    )
    expert, fsdp = ("--mesh.expert", 2, "--sharding.expert-exchange", "all_to_all"), ("--mesh.fsdp", 2)
    runs = {"plain": {6: ()}, "divided": {2: expert, 4: fsdp, 6: (*expert, "--mesh.fsdp", 2)}}
    for run, stops in runs.items():
        for steps, placed in stops.items():
            done = train(tmp_path / run, "--training.steps", steps, "--evaluation.every", 2, *mixed, *placed)
            assert done.returncode == 0, done.stderr
    for name in ("loss", "grad_norm", "eval_loss", "expert_imbalance"):
        values = [[record[name] for record in metrics(tmp_path / run) if name in record] for run in runs]
        assert values[0]
        np.testing.assert_allclose(*values, rtol=1e-4, err_msg=name)
    biases = [checkpoint(tmp_path / run, 6)["masters"]["segment_0"]["block_0"]["mlp"]["router_bias"] for run in runs]
    assert biases[0].any()
    np.testing.assert_array_equal(*biases)


@pytest.mark.slow
def test_a_sixteen_bit_copy_is_made_again_on_resume(tmp_path: Path) -> None:
    """ZeRO stage 2 rests a copy of the parameters that no checkpoint holds."""
    placed = ("--mesh.fsdp", 2, "--sharding.zero-stage", 2, "--precision.compute-dtype", "bfloat16")
    for directory, stops in ((tmp_path / "whole", (4,)), (tmp_path / "resumed", (2, 4))):
        for steps in stops:
            done = train(directory, "--training.steps", steps, "--evaluation.every", 2, *placed)
            assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, checkpoint(tmp_path / "resumed", 4), checkpoint(tmp_path / "whole", 4))


@pytest.mark.slow
def test_adapters_over_a_frozen_base_resume_and_generate(tmp_path: Path) -> None:
    adapt = ("--lora.rank", 2, "--lora.base", "int8", "--evaluation.every", 2)
    for directory, stops in ((tmp_path / "whole", (4,)), (tmp_path / "resumed", (2, 4))):
        for steps in stops:
            done = train(directory, "--training.steps", steps, *adapt)
            assert done.returncode == 0, done.stderr
    # In both layers 2 × the sum of both sides of query, key, value and output, and of the MLP's three.
    assert "of which 832 are trained" in " ".join(done.stdout.split())
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    trees = ("masters", "moments", "frozen")
    resumed, whole = (checkpoint(tmp_path / name, 4, trees) for name in ("resumed", "whole"))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)

    refused = train(tmp_path / "whole", "--training.steps", 6, *adapt, "--lora.rank", 3)
    assert refused.returncode == 2 and "lora.rank was 2 and is 3" in refused.stderr
    written = command("generate", "--checkpoint", tmp_path / "whole", "--prompt", "def ", "--tokens", 5)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("def ")


def test_a_finished_run_says_so(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    again = train(whole, "--training.steps", 8, "--evaluation.every", 4)
    assert (again.returncode, again.stderr) == (0, "")
    assert "finished" in again.stdout and "no effect" not in again.stdout
    changes = ("--optimizer.learning-rate", 1e-4, "--run.allow-change", "optimizer.learning-rate", "--logging.every", 3)
    again = train(whole, "--training.steps", 8, "--evaluation.every", 4, *changes)
    assert (again.returncode, again.stderr) == (0, "")
    changed = "no step is left to train, so these changes have no effect: optimizer.learning_rate, logging.every\n"
    assert again.stdout.endswith(changed)
    assert (whole / "metrics.jsonl").read_text() == before


def test_another_configuration_does_not_continue_the_run(whole: Path) -> None:
    recorded = (whole / "config.json").read_text()
    other = train(whole, "--training.steps", 12, "--optimizer.learning-rate", 1e-3, "--run.seed", 1)
    assert other.returncode == 2
    assert "optimizer.learning_rate" in other.stderr and "run.seed" in other.stderr
    assert (whole / "config.json").read_text() == recorded


@pytest.mark.parametrize("record", ['{"run": ', "[]", '{"model": {"width": "wide"}}'])
def test_a_broken_record_is_not_overwritten(record: str, whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    (directory / "config.json").write_text(record)
    refused = train(directory, "--training.steps", 12)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert (directory / "config.json").read_text() == record


def test_generation_continues_the_prompt(whole: Path) -> None:
    written = command("generate", "--checkpoint", whole, "--prompt", "def ", "--tokens", 5)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("def ")
    assert command("generate", "--checkpoint", whole, "--prompt", "def ", "--tokens", 5).stdout == written.stdout


def test_divergence_ends_the_run_with_3(tmp_path: Path) -> None:
    broken = ("--training.steps", 16, "--optimizer.learning-rate", 1e38)
    # What is skipped may have spoilt parameters before it: it takes no older checkpoint's place.
    kept = ("--checkpoint.every", 1, "--checkpoint.keep", 1)
    assert train(tmp_path / "saved", *broken, *kept).returncode == 3
    assert [path.name for path in (tmp_path / "saved" / "checkpoints").iterdir()] == ["1"]
    diverged = train(tmp_path / "run", *broken)
    assert diverged.returncode == 3
    assert diverged.stderr.startswith("error: step ") and diverged.stderr.count("\n") == 1
    assert "10 steps in a row were skipped" in diverged.stderr
    assert diverged.stdout.count("gradient norm nan\n") == 9
    # The steps before the limit are in the log, without the numbers that are none.
    first, *skipped = metrics(tmp_path / "run")
    assert first["skipped"] == 0 and [(each["grad_norm"], each["skipped"]) for each in skipped] == [
        (None, count) for count in range(1, 10)
    ]
    # It left no checkpoint, so its directory takes the advice that it gave.
    logged = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = train(tmp_path / "run", "--training.steps", 2)
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "metrics.1.jsonl").read_text() == logged


def test_who_reads_what_it_says_costs_the_run_nothing(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "jaxopt_llm.train", *map(str, tiny(tmp_path)), "--training.steps", "3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(metrics(tmp_path)) == 3


def test_help_lists_every_field_with_its_unit() -> None:
    told = command("train", "--help")
    assert told.returncode == 0
    for name in ("--training.batch-size", "--mesh.tensor", "--sharding.zero-stage", "--precision.reduce-dtype"):
        assert name in told.stdout
    assert "Sequences per step" in " ".join(told.stdout.split())


def test_print_config_says_what_would_be_trained(tmp_path: Path) -> None:
    told = train(tmp_path, "--print-config", "--training.steps", 3)
    assert told.returncode == 0
    config = from_json(told.stdout)
    assert (config.training.steps, config.model.width) == (3, TINY["model.width"])
    assert not list(tmp_path.iterdir())
    refused = train(tmp_path, "--print-config", "--training.steps", 0)
    assert refused.returncode == 2


@pytest.mark.slow
def test_epochs_are_steps_of_the_schedule_too_and_a_longer_run_keeps_its_schedule(tmp_path: Path) -> None:
    directory, recipe = tmp_path / "run", tmp_path / "recipe.py"
    recipe.write_text(
        "from jaxopt_llm.config import *\n\n"
        "def get_config():\n"
        "    return Config(training=TrainingConfig(steps=7), schedule=ScheduleConfig(warmup_steps=1))\n"
    )
    text = some_text(tmp_path / "a.jsonl")
    options = ("--config", recipe, "--run.directory", directory, *tiny(directory)[4:], *text)
    done = command("train", *options, "--training.epochs", 0.25)
    assert done.returncode == 0, done.stderr
    # Of 20 documents one is held out. Each of the others is split into rows of 32 tokens; a step has 4 rows.
    config = cli.load_run_config(directory, "")
    rows = len(pack_documents(config, open_documents(config, SINGLE_PROCESS)).training[0])
    tokens = sum(len(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert 0.9 * tokens / 33 < rows < 1.1 * tokens / 31
    steps = math.ceil(rows / 16)
    assert (config.training.steps, config.training.epochs, config.schedule.decay_steps) == (steps, 0, steps)
    assert metrics(directory)[-1]["step"] == steps
    assert "is finished" in command("train", *options, "--training.epochs", 0.25).stdout
    longer = command("train", *options, "--training.steps", steps + 1)
    assert longer.returncode == 0, longer.stderr
    assert cli.load_run_config(directory, "").schedule.decay_steps == steps
    both = command("train", *options, "--training.epochs", 1, "--training.steps", 3)
    assert both.returncode == 2 and "training.steps=3 and training.epochs=1.0: set one of them to 0" in both.stderr
    never = command("train", *options, "--training.steps", steps + 2, "--schedule.warmup-steps", steps)
    assert never.returncode == 2 and f"must be below schedule.decay_steps={steps}" in never.stderr


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "adapter_model.safetensors", "prepared-plan.json", "essay.txt"):
        directory = tmp_path / name.partition(".")[0]
        directory.mkdir()
        (directory / name).write_text("mine")
        done = train(directory, "--training.steps", 1)
        assert done.returncode == 2
        assert_one_line(done.stderr, f"holds {name}, which no run wrote there: set another --run.directory")
        assert [(path.name, path.read_text()) for path in directory.iterdir()] == [(name, "mine")]


def test_opening_the_data_of_a_run_makes_progress(tmp_path: Path) -> None:
    for name in ("a", "b", "held_out"):
        (tmp_path / f"{name}.txt").write_text("a document")
    data = DataConfig(paths=tuple(str(tmp_path / f"{name}.txt") for name in "ab"))
    processes = Processes(Job("", 1, 0))

    def count_beats(config: Config) -> int:
        processes.main.enter("prepare", 0)
        open_documents(config, processes)
        assert processes.main.progress is not None
        return processes.main.progress.beats

    alone = count_beats(Config(data=data))
    assert alone >= 2 * 2  # for each file, and for its text
    evaluation = EvaluationConfig(paths=(str(tmp_path / "held_out.txt"),))
    assert count_beats(Config(data=data, evaluation=evaluation)) > alone


def test_a_run_that_ended_before_it_began_is_started_again(tmp_path: Path) -> None:
    stacks = ("stacks.0.node7.txt", "stacks.12.host.of.a.domain.txt")
    for name in ("memory.json", "events.jsonl", "metrics.jsonl", "metrics.1.jsonl", "corpus.json", *stacks):
        (tmp_path / name).write_text("")
    check_directory_is_free(tmp_path)
    (tmp_path / "config.json").write_text("")
    check_directory_is_free(tmp_path)
    (tmp_path / "corpus.json").unlink()
    with pytest.raises(InputError, match="holds config.json"):
        check_directory_is_free(tmp_path)


def on_simulated(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `train` where the environment simulates this number of devices."""
    process = start("train", *arguments, JAX_NUM_CPU_DEVICES=str(count))
    output = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


@pytest.mark.core
@pytest.mark.slow
def test_a_recipe_without_a_mesh_takes_every_device_and_learns_the_same(tmp_path: Path) -> None:
    """finetune.py, with its rows and microbatches, on one device and on two."""
    base = folder_with_tokenizer(tmp_path / "base")
    rows = [{"prompt": f"say {number}", "completion": f"{number} " * 5} for number in range(200)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model.pretrained": base,
        "data.paths": tmp_path / "chats.jsonl",
        "data.content": "pairs",
        "data.chat-template": cli.RECIPES / "quickstart_chat.jinja",
        "training.sequence-length": 64,
        "schedule.warmup-steps": 0,
        "precision.compute-dtype": "float32",
        "evaluation.samples": 0,
        "lora.rank": 8,
        "logging.every": 1,
    }
    recipe = ("--config", "finetune.py", *(f"--{name}={value}" for name, value in settings.items()))
    losses = {}
    for count in (1, 2):
        done = on_simulated(count, *recipe, "--training.steps", 3, "--run.directory", tmp_path / f"on-{count}")
        assert done.returncode == 0, done.stderr
        line = "2 devices: mesh.data 2, training.accumulation 16 → 8 (1 row of each device at a time)"
        assert (line in done.stdout) is (count == 2)
        losses[count] = [record["loss"] for record in metrics(tmp_path / f"on-{count}")]
    assert losses[2] == pytest.approx(losses[1], rel=1e-6) and len(losses[1]) == 3
    written = from_json((tmp_path / "on-2" / "config.json").read_text())
    assert written.mesh == MeshConfig(data=2, fsdp=1) and written.training.accumulation == 8
    # A batch size alone: the microbatches of the recipe follow it.
    half = ("--training.batch-size", 8, "--training.steps", 1, "--run.directory", tmp_path / "half")
    done = on_simulated(2, *recipe, *half)
    assert done.returncode == 0, done.stderr
    assert "2 devices: mesh.data 2, training.accumulation 8 → 4 (1 row of each device at a time)" in done.stdout
    # A resume takes what there is then.
    done = on_simulated(1, *recipe, "--training.steps", 4, "--run.directory", tmp_path / "on-2")
    assert done.returncode == 0, done.stderr
    assert from_json((tmp_path / "on-2" / "config.json").read_text()).mesh == MeshConfig(fsdp=1)


def test_numbers_that_leave_devices_without_rows_are_refused(tmp_path: Path) -> None:
    done = on_simulated(2, *tiny(tmp_path / "run"), "--training.batch-size", 3)
    assert done.returncode == 2
    parts = ("2 devices: training.batch_size=3 is not divisible by mesh.fsdp=2", "or set --mesh.fsdp 1, and 1 of them")
    assert_one_line(done.stderr, *parts)
