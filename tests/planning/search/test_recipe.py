"""Recipes that a search writes."""

import dataclasses
from pathlib import Path

import pytest

from jaxopt_llm.config import RematConfig, cli
from jaxopt_llm.config.cli import RECIPES
from jaxopt_llm.planning.search.recipe import format_recipe


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
