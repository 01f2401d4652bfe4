"""Recipes with a model of their own: what `train` and `plan` make of them.

Such a recipe defines `model`, `loss` and `data`, and may define `example`, `optimizer`, `rules`, `evaluation_loss`,
`weights`, `replicated`, `trains`, `loss_over` and `held_out`: arguments of `initialize` and of `fit`. `get_config` may
be left out.
"""

import sys
import warnings

from jaxopt_llm.config import fields
from jaxopt_llm.config.cli import Recipe
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.distributed.watchdog import Watchdog
from jaxopt_llm.engine.batches import read_example
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.fit import train_engine
from jaxopt_llm.engine.initialize import initialize

# Arguments of `initialize` that a recipe may define, besides `example`.
OPTIONAL = ("optimizer", "rules", "evaluation_loss", "weights", "replicated", "trains", "loss_over")


def make_engine(recipe: Recipe, processes: Processes = SINGLE_PROCESS) -> Engine:
    """Return the engine of a recipe. Its example is the recipe's, or the first batch of its data.

    Process 0 prints each warning as one line.

    Raises:
        InputError: a name is missing, or something does not fit together.
    """
    check_recipe(recipe)
    names = recipe.names
    given = {name: names[name] for name in OPTIONAL if name in names}
    example = names["example"] if "example" in names else read_example(names["data"], recipe.config.training.batch_size)
    # The devices open when all processes come to them. JAX fails if one comes minutes later, so the wait is here.
    processes.channel("example").exchange("")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", EngineWarning)
        engine = initialize(names["model"], names["loss"], example, recipe.config, **given)
    for each in raised if engine.processes.first else ():
        print(f"warning: {each.message}", file=sys.stderr)
    return engine


def check_recipe(recipe: Recipe) -> None:
    """Raise InputError if the data is missing, or a setting of the recipe has a wrong value."""
    if "data" not in recipe.names:
        raise InputError(f"--config {recipe.path}: it defines a model and a loss, and lacks data, as fit takes it")
    if found := fields.wrong_types(recipe.config) or recipe.config.problems():
        raise InputError(f"--config {recipe.path}: {'; '.join(found)}")


def train_recipe(recipe: Recipe, processes: Processes) -> None:
    """Train the model of a recipe to `training.steps`, as `fit` does."""
    with Watchdog(recipe.config, processes):
        engine = make_engine(recipe, processes)
    train_engine(engine, recipe.names["data"], held_out=recipe.names.get("held_out", ()))
