"""Settings that a configuration does not read: each is named, and changing it changes nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import toy
from commands import ROOT, command, some_text, tiny, train

from jaxopt_llm.config import Config, MeshConfig, cli, fields
from jaxopt_llm.config.fields import get_field, replace_fields
from jaxopt_llm.config.unread import describe_newly_unread, describe_unread, find_unread, find_without_effect
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import make_program

pytestmark = pytest.mark.core

ROPE = {
    "mscale_all_dim": 2.0, "original_length": 64, "low_frequency_factor": 2.0, "mscale": 2.0,
    "high_frequency_factor": 8.0, "attention_factor": 2.0, "truncate": False,
}  # fmt: skip

RECIPES = sorted(path.name for path in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_set_nothing_that_they_do_not_read(recipe: str) -> None:
    assert not [*describe_unread(cli.load_recipe(recipe))]


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"model.window": 64}, {"model.pattern": ("sliding",)}),
        ({"model.max_positions": 64}, {"model.positions": "learned"}),
        (
            {"model.rope.original_length": 64, "model.rope.mscale": 2.0},
            {"model.rope.factor": 2.0, "model.rope.scaling": "yarn"},
        ),
        ({"model.moe.expert_width": 64, "sharding.expert_room": 3.0}, {"model.moe.experts": 4, "mesh.expert": 2}),
        ({"model.mla.query_rank": 8}, {"model.mla.kv_rank": 8}),
        ({"pipeline.split": (2, 2)}, {"mesh.pipeline": 2}),
        ({"sharding.context_exchange": "all_to_all"}, {"mesh.context": 2}),
        ({"sharding.sequence_parallel": True}, {"mesh.tensor": 2}),
        ({"sharding.fsdp_gradients": "int8"}, {"mesh.fsdp": 2, "sharding.zero_stage": 2}),
        ({"optimizer.momentum": 0.8}, {"optimizer.name": "sgd"}),
        ({"schedule.cooldown_steps": 7}, {"schedule.kind": "wsd"}),
        ({"evaluation.sample_tokens": 7}, {"evaluation.samples": 1}),
        ({"evaluation.task_limit": 7.0, "evaluation.task_folder": "x"}, {"evaluation.tasks": ("a",)}),
        ({"data.separator": "\n"}, {"data.paths": ("a.txt",)}),
        ({"profile.steps": 5}, {"profile.start_step": 1}),
    ],
    ids=str,
)
def test_a_setting_is_unread_until_another_one_needs_it(settings: dict[str, Any], read: dict[str, Any]) -> None:
    assert find_unread(replace_fields(Config(), settings)).keys() == settings.keys()
    assert not find_unread(replace_fields(Config(), settings | read)).keys() & settings.keys()
    assert not find_unread(Config())


def test_settings_are_named_in_one_order() -> None:
    """The order of a set of texts would differ between two starts of Python."""
    settings = {f"model.rope.{name}": value for name, value in ROPE.items()}
    assert [*find_unread(replace_fields(Config(), settings))] == sorted(settings)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("finetune.py", ("--lora.rank", "0")),
        ("finetune.py", ("--evaluation.every", "0")),
        ("finetune.py", ("--evaluation.samples", "0")),
        ("llama3_8b_qlora.py", ("--lora.base", "float")),
        ("llama2_70b_pipeline.py", ("--mesh.pipeline", "1")),
        ("qwen3_30b_a3b.py", ("--model.moe.experts", "0")),
        ("quickstart.py", ("--schedule.kind", "constant")),
    ],
)
def test_what_flags_switch_off_is_not_named(recipe: str, flags: tuple[str, ...]) -> None:
    """The user of a recipe did not give its settings. Their values are then the defaults, also in config.json."""
    config = cli.parse_config(["--config", recipe, *flags], "train")
    assert not [*describe_unread(config)] and not config.lora.problems()
    read = {name for name in fields.FIELDS if get_field(cli.load_recipe(recipe), name) != get_field(config, name)}
    named = flags[0].removeprefix("--")
    assert read - {named} <= {*find_without_effect(replace_fields(cli.load_recipe(recipe), {named: cast(flags[1])}))}


def cast(text: str) -> Any:
    return int(text) if text.isdigit() else text


def test_what_was_given_without_effect_is_named() -> None:
    flags = ["--config", "finetune.py", "--lora.rank", "0", "--lora.alpha", "8", "--optimizer.momentum", "0.5"]
    config = cli.parse_config(flags, "train")
    assert config.lora.problems() == [
        "lora.alpha=8.0 has no effect with lora.rank=0, which trains no adapters: set --lora.rank, or leave out "
        "--lora.alpha"
    ]
    assert [*describe_unread(config)] == ["no effect: optimizer.momentum=0.5, because optimizer.name=adamw"]


def test_what_a_recipe_itself_gives_without_effect_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from jaxopt_llm.config import Config\n"
        "def get_config(): return Config(lora=dict(alpha=8.0), optimizer=dict(momentum=0.5))\n"
    )
    config = cli.parse_config(["--config", str(recipe), "--training.steps", "3"], "train")
    assert config.lora.alpha == 8.0 and config.lora.problems()
    assert [*describe_unread(config)] == ["no effect: optimizer.momentum=0.5, because optimizer.name=adamw"]


def test_what_a_choice_leaves_unread_is_named() -> None:
    """Only that: the rest was named before the choice."""
    given = {"model.moe.experts": 8, "mesh.expert": 2, "sharding.expert_room": 1.5, "optimizer.momentum": 0.5}
    config = replace_fields(Config(), given)
    assert not [*describe_newly_unread(replace_fields(config, {"sharding.expert_exchange": "all_to_all"}), config)]
    gathers = replace_fields(config, {"sharding.expert_exchange": "gather"})
    assert [*describe_newly_unread(gathers, config)] == [
        "no effect: sharding.expert_room=1.5, because sharding.expert_exchange=gather"
    ]


def test_a_pretrained_model_decides_its_own_fields() -> None:
    assert not find_unread(replace_fields(Config(), {"model.pretrained": "folder", "model.window": 64}))


# Settings that the program of `lowered` does not read, with other values than the defaults.
UNREAD: dict[str, Any] = {
    "model.window": 7,
    "model.max_positions": 5,
    "model.rope.scaling": "yarn",
    "model.rope.low_frequency_factor": 2.0,
    "model.rope.high_frequency_factor": 8.0,
    "model.rope.original_length": 99,
    "model.rope.mscale": 2.0,
    "model.rope.mscale_all_dim": 1.0,
    "model.mla.query_rank": 8,
    "model.mla.rotary_head_dim": 4,
    "model.mla.value_head_dim": 8,
    "model.moe.experts_per_token": 1,
    "model.moe.expert_width": 8,
    "model.moe.shared_expert_width": 8,
    "model.moe.dense_layers": 1,
    "model.moe.expert_every": 2,
    "model.moe.router": "sigmoid",
    "model.moe.router_renormalises": False,
    "model.moe.router_scale": 2.0,
    "model.moe.router_groups": 2,
    "model.moe.router_groups_per_token": 2,
    "model.moe.router_bias": True,
    "model.moe.router_bias_rate": 1.0,
    "model.moe.balance_loss": 1.0,
    "model.moe.router_z_loss": 1.0,
    "model.moe.capacity_factor": 2.0,
    "training.grouped_matmul": "xla",
    "sharding.expert_exchange": "gather",
    "sharding.expert_room": 3.0,
    "sharding.context_exchange": "all_to_all",
    "sharding.sequence_parallel": True,
    "pipeline.schedule": "gpipe",
    "pipeline.virtual_stages": 2,
    "pipeline.split": (1, 2),
    "optimizer.epsilon": 1e-3,
    "optimizer.momentum": 0.5,
    "optimizer.decay_groups": ("*=2",),
    "schedule.cooldown_steps": 7,
}


def dense(settings: dict[str, Any]) -> Config:
    """Return the settings of a dense model on eight devices along `fsdp`."""
    fixed = {"training.batch_size": 8, "training.sequence_length": 16, "optimizer.name": "lion"}
    config = Config(model=dataclasses.replace(toy.UNIFORM, pattern=("global",)), mesh=MeshConfig(fsdp=8))
    return replace_fields(config, {**fixed, "optimizer.weight_decay": 0.0, **settings})


def lowered(settings: dict[str, Any]) -> str:
    """Return the text of the step, before it is compiled."""
    config = dense(settings)
    program = make_program(config, Placement(make_mesh(config.mesh), config.sharding, config.precision))
    return str(program.step.lower(program.state, program.batch).as_text())


def test_programs_do_not_depend_on_unread_settings() -> None:
    # The groups multiply a weight decay of 0, which is an argument of the program.
    unread = {name: value for name, value in UNREAD.items() if name != "optimizer.decay_groups"}
    assert find_unread(dense(UNREAD)).keys() == UNREAD.keys() and lowered(unread) == lowered({})
    assert lowered({"model.mlp_width": 48}) != lowered({})  # the comparison sees a difference


def test_the_start_names_them(tmp_path: Path) -> None:
    done = train(
        tmp_path / "run", *some_text(tmp_path / "a.jsonl"), "--training.steps", 1, "--model.moe.dense-layers", 1
    )
    assert done.returncode == 0
    assert done.stderr == "warning: no effect: model.moe.dense_layers=1, because model.moe.experts=0\n"


def test_the_plan_names_them() -> None:
    done = command("plan", *tiny(Path("unused")), "--model.moe.dense-layers", 1, "--gpu", "h100", "--gpus-per-host", 1)
    assert done.returncode == 0
    assert done.stderr == "warning: no effect: model.moe.dense_layers=1, because model.moe.experts=0\n"
