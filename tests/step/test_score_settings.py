"""Settings of models with scores: what does not fit together, and what a folder sets."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import pytest
import toy

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.config import Config, DataConfig, LoraConfig, ModelConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model import flops, param
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.step.validation import validate

CLASSES = Config(
    model=replace(toy.UNIFORM, scores=3),
    data=DataConfig(label_field="label"),
    training=TrainingConfig(steps=9, batch_size=4, sequence_length=32, objective="classify"),
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training.objective": "next_token"}, "next_token predicts tokens; set --training.objective classify"),
        ({"training.objective": "dpo", "model.scores": 1}, "set --training.objective reward or classify"),
        ({"model.scores": 0}, "classify: the model has no scores; set --model.scores to the number of classes"),
        ({"model.scores": 0, "training.objective": "reward"}, "set --model.scores to 1$"),
        ({"training.objective": "reward"}, "model.scores=3: a reward is one score; set --model.scores 1"),
        ({"data.label_field": ""}, "classify: name the column of the labels with --data.label-field"),
        ({"model.scores": 0, "training.objective": "dpo"}, "data.label_field=label: .*=dpo reads no labels; set"),
        ({"evaluation.samples": 2}, "evaluation.samples=2: a model with scores writes no text"),
        ({"training.z_loss": 0.1}, "classify does not support training.z_loss=0.1"),
        ({"training.local_steps": 2}, "classify does not support training.local_steps=2"),
        ({"model.mtp_layers": 1}, "model.mtp_layers=1: must be 0 with model.scores=3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    validate(CLASSES)
    assert any(re.search(message, each) for each in replace_fields(CLASSES, settings).problems())


def test_the_head_of_scores_replaces_that_of_the_vocabulary() -> None:
    for tied in (True, False):
        plain = replace(toy.UNIFORM, tied_head=tied)
        scored = replace(plain, scores=3)
        without, specs = (param_specs(each) for each in (plain, scored))
        table = param.count_parameters(without["non_layer"]["embedding"])
        more = 3 * plain.width - (0 if tied else table)
        assert param.count_parameters(specs) - param.count_parameters(without) == more
        per_token = [flops.count_per_token(each, param_specs(each), {}, 32).full for each in (plain, scored)]
        assert per_token[0] - per_token[1] == 6 * (plain.vocabulary_size - 3) * plain.width


def test_a_folder_sets_the_number_of_scores_and_adapters_train_the_head(tmp_path: Path) -> None:
    scored = folders.folder(tmp_path / "scored", replace(folders.CONFIG, scores=3))
    plain = folders.folder(tmp_path / "plain")
    assert huggingface.open_model_folder(scored).config.scores == 3

    def resolve(path: Path, scores: int, **sections: Any) -> Config:
        model = ModelConfig(pretrained=str(path), scores=scores)
        return pretrained.resolve_pretrained(Config(model=model, data=DataConfig(tokenizer="x"), **sections))

    assert resolve(scored, 0).model.scores == resolve(scored, 3).model.scores == 3
    assert resolve(plain, 0).model.scores == 0 and resolve(plain, 5).model.scores == 5
    with pytest.raises(InputError, match=r"model.scores=2: .*scored has 3; leave it out"):
        resolve(scored, 2)
    head = "non_layer/score/table"
    assert resolve(scored, 0).training.trainable == ()
    assert resolve(scored, 0, lora=LoraConfig(rank=2)).training.trainable == (head,)
    assert resolve(plain, 0, lora=LoraConfig(rank=2)).training.trainable == ()
    given = resolve(scored, 0, training=TrainingConfig(trainable=("final_norm",))).training.trainable
    assert given == ("final_norm", head)
    named = resolve(scored, 0, training=TrainingConfig(trainable=("score",))).training.trainable
    assert named == ("score",)


def test_families_without_such_a_class_refuse_scores(tmp_path: Path) -> None:
    config = replace(folders.CONFIG, norm="layer_no_bias", parallel_block=True, biases="none", pattern=("global",))
    config = replace_fields(config, {"rope.interleaved": True, "tied_head": True, "scores": 2})
    with pytest.raises(InputError, match="model.scores=2"):
        folders.folder(tmp_path / "folder", config)
