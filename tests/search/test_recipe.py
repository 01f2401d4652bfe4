"""A configuration written as a recipe comes back as it was."""

import dataclasses
from pathlib import Path

import pytest

from jaxopt_llm import config as configuration
from jaxopt_llm.config import RECIPES
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.search.recipe import source


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.py")))
def test_round_trip(name: str, tmp_path: Path) -> None:
    remat = RematConfig(("attention", "mlp_up"), offload=("block_input",))
    config = dataclasses.replace(configuration.load(name), remat=remat)
    file = tmp_path / "found.py"
    file.write_text(source(config, 'Says """this""", and \\that.'))
    assert configuration.load(str(file)) == config
    assert max(map(len, file.read_text().splitlines())) <= 120


def test_it_reads_as_the_others_do(tmp_path: Path) -> None:
    text = source(configuration.load("llama2_7b.py"), "Found.\n")
    assert text.startswith('"""Found.\n"""\n\nfrom jaxopt_llm.config import RunConfig, TrainConfig\n')
    assert "        training=TrainingConfig(steps=500_000, sequence_length=4096),\n" in text
    assert '        run=RunConfig(directory="runs/llama2_7b"),\n' in text
    assert "zero_stage" not in text, "what is the default's is left out"
