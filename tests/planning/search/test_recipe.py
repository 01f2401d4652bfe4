"""Recipes that a search writes."""

import dataclasses
from pathlib import Path

import pytest

from jaxopt_llm.config import MeshConfig, PipelineConfig, RematConfig, ShardingConfig, cli
from jaxopt_llm.config.cli import RECIPES
from jaxopt_llm.planning.search.recipe import drop_unread, format_recipe


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.py")))
def test_round_trip(name: str, tmp_path: Path) -> None:
    remat = RematConfig(("attention", "mlp_up"), offload=("block_input",))
    config = dataclasses.replace(cli.load_recipe(name), remat=remat)
    file = tmp_path / "found.py"
    file.write_text(format_recipe(config, 'Says """this""", and \\that.'))
    assert cli.load_recipe(str(file)) == config
    assert max(map(len, file.read_text().splitlines())) <= 120


def test_format_of_a_recipe(tmp_path: Path) -> None:
    text = format_recipe(cli.load_recipe("llama2_7b.py"), "Found.\n")
    assert text.startswith('"""Found.\n"""\n\nfrom jaxopt_llm.config import (\n    Config,\n    MeshConfig,\n')
    assert "        training=TrainingConfig(steps=500_000, sequence_length=4096),\n" in text
    assert '        run=RunConfig(directory="runs/llama2_7b"),\n' in text
    assert "zero_stage" not in text, "default values are left out"


def test_settings_that_the_mesh_does_not_read_are_left_out() -> None:
    recipe = dataclasses.replace(
        cli.load_recipe("10b.py"),
        pipeline=PipelineConfig("interleaved", 4),
        sharding=ShardingConfig(2, sequence_parallel=True),
    )
    whole = drop_unread(dataclasses.replace(recipe, mesh=MeshConfig(fsdp=8)))
    assert (whole.pipeline, whole.sharding) == (PipelineConfig(), ShardingConfig(2))
    text = format_recipe(whole, "Found.")
    assert "interleaved" not in text and "virtual_stages" not in text and "sequence_parallel" not in text
    staged = dataclasses.replace(recipe, mesh=MeshConfig(pipeline=2, tensor=4))
    assert drop_unread(staged) == staged
