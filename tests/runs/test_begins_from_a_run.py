"""Training that begins from another run's last checkpoint: the commands."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import checkpoint, some_text, start_training, tiny, train
from texts import write_byte_tokenizer

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.step.validation import validate

# So slow that nothing changes.
STILL = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--training.steps", 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "first"
    done = train(directory, "--training.steps", 2, "--mesh.fsdp", 2, "--sharding.zero-stage", 3)
    assert done.returncode == 0, done.stderr
    return directory


def refused(*arguments: object) -> str:
    with pytest.raises(InputError) as error:
        pretrained.resolve_pretrained(cli.parse_config([*map(str, arguments)], "train"))
    return str(error.value)


@pytest.mark.slow
def test_a_run_begins_where_another_ended(run: Path, tmp_path: Path) -> None:
    """In another mesh, and named from where the run is; then again, from elsewhere."""
    second = tmp_path / "second"
    options = ("--mesh.pipeline", 2, "--sharding.zero-stage", 1, *STILL, *some_text(tmp_path / "a.jsonl"))
    process = start_training(second, *options, "--model.pretrained", run.name, folder=run.parent)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert f"starts from the weights of {run}" in out
    few = "warning: fewer microbatches than stages: 1f1b, 50% of a step is idle with training.accumulation=1"
    assert error.startswith(few) and error.count("\n") == 1
    old, new = checkpoint(run, 2), checkpoint(second, 1)
    jax.tree.map(np.testing.assert_array_equal, old["masters"], new["masters"])
    assert json.loads((second / "config.json").read_text())["model"]["pretrained"] == str(run)
    again = train(second, *options, "--model.pretrained", run / ".." / run.name)
    assert "is finished at step 1; train longer with a larger training.steps or training.epochs" in again.stdout, (
        again.stderr
    )


def test_adapters_begin_over_a_run_and_are_no_beginning_themselves(run: Path, tmp_path: Path) -> None:
    adapted = tmp_path / "adapted"
    lora = ("--lora.rank", 2, "--lora.base", "int8", "--precision.compute-dtype", "bfloat16")
    done = train(adapted, "--model.pretrained", run, *lora, *STILL, *some_text(tmp_path / "a.jsonl"))
    assert done.returncode == 0, done.stderr
    masters, frozen = checkpoint(run, 2)["masters"], checkpoint(adapted, 1, ("frozen",))["frozen"]
    query, codes = (each["segment_0"]["block_0"]["attention"]["query"] for each in (masters, frozen))
    largest = np.abs(query).max(axis=1, keepdims=True)  # of each output channel
    found = codes["base"]["codes"] * codes["base"]["scales"]
    assert np.all(np.abs(found - query) <= 0.51 * largest / 127)
    said = refused(*tiny(tmp_path / "third"), "--model.pretrained", adapted)
    assert f"python -m jaxopt_llm.convert merge --checkpoint {adapted} --to FOLDER" in said


def test_what_cannot_be_begun_from_is_one_line(run: Path, tmp_path: Path) -> None:
    said = refused(*tiny(tmp_path), "--model.pretrained", run, "--model.width", 24)
    assert said == f"model.pretrained={run} sets the model's fields; leave out model.width=24 (the stored value is 16)"
    found = train(run, "--model.pretrained", run, *some_text(tmp_path / "a.jsonl"))
    assert found.returncode == 2 and "is also run.directory, and a run cannot start from itself" in found.stderr
    broken = shutil.copytree(run, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    shutil.rmtree(broken / "checkpoints/2")
    said = refused(*tiny(tmp_path), "--model.pretrained", broken)
    assert said.startswith(f"model.pretrained={broken}: not a run directory (")
    shutil.copy(run / "config.json", broken)
    found = train(tmp_path / "second", "--model.pretrained", broken, *some_text(tmp_path / "a.jsonl"))
    assert (found.returncode, len(found.stderr.splitlines())) == (4, 1)
    assert "the run has no checkpoint;" in found.stderr


def test_a_run_has_its_tokenizer_and_its_data_must_be_named(run: Path, tmp_path: Path) -> None:
    tokenizer, text = write_byte_tokenizer(tmp_path / "tokenizer.json"), some_text(tmp_path / "a.jsonl")
    second = (tmp_path / "second", "--model.pretrained", run)
    assert train(*second).stderr.endswith(
        f"name the data on which to train {run}, files, folders or globs, with --data.paths\n"
    )
    found = train(*second, *text, "--data.tokenizer", tokenizer)
    assert found.returncode == 2 and f"differ from those that {run} was trained with; leave out" in found.stderr

    # The tokenizer of a run that names a file and a BOS of its own: the run keeps a copy.
    first = (tmp_path / "first", *text, *STILL, "--data.tokenizer", tokenizer, "--data.bos", "a")
    assert train(*first).returncode == 0
    arguments = (*tiny(tmp_path), "--model.pretrained", tmp_path / "first")
    data = pretrained.resolve_pretrained(cli.parse_config([*map(str, arguments)], "train")).data
    kept = first[0] / "tokenizer"
    assert (data.tokenizer, data.bos, data.eos) == (str(kept), "a", "")
    done = train(tmp_path / "third", *text, *STILL, "--model.pretrained", tmp_path / "first")
    assert f"tokenizer: {kept}, 257 tokens, BOS " in done.stdout, done.stderr


def test_layers_are_stacked_as_the_run_that_begins_wants_them(run: Path, tmp_path: Path) -> None:
    arguments = map(str, (*tiny(tmp_path), "--model.pretrained", run, "--model.last-layers", 1))
    assert pretrained.resolve_pretrained(cli.parse_config([*arguments], "train")).model.last_layers == 1


def test_the_positions_of_a_folder_are_as_many_as_it_has() -> None:
    config = fields.replace_fields(
        Config(),
        {"model.positions": "learned", "model.max_positions": 8, "model.pretrained": "folder"},
    )
    with pytest.raises(InputError, match=r"positions: set --training\.sequence-length to at most 8"):
        validate(config)
