"""Settings that depend on a pretrained model or adapter: `model.pretrained` and `lora.pretrained`."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import text_part
from jaxopt_llm.checkpoint.huggingface.codecs import PRETRAINED_FIELDS
from jaxopt_llm.checkpoint.huggingface.family import Family, read_label_names
from jaxopt_llm.checkpoint.peft import adapter_folder
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.run_weights import is_run_directory, refuse_option
from jaxopt_llm.config import Config, DataConfig, LoraConfig, ModelConfig, RematConfig, cli, fields
from jaxopt_llm.core import hub, tree
from jaxopt_llm.core.errors import InputError

SCORES = "non_layer/score/table"  # path of the head of scores
TEACHER = "distillation.teacher"


def resolve_pretrained(config: Config) -> Config:
    """Return the configuration with the fields that `model.pretrained` and `lora.pretrained` set.

    `data.tokenizer` is a name or path afterwards, never `auto`.

    Raises:
        InputError: a source cannot be used, or the configuration sets one of these fields to another value.
    """
    if config.model.pretrained:
        # Absolute, because commands that read this run's directory may start in another directory.
        name = hub.absolute_name(config.model.pretrained)
        path = hub.find_folder(name, "model.pretrained=", weights=False)
        if not path.exists():
            remedy = "name a downloaded model, a run, or an id of the Hugging Face hub with --model.pretrained"
            raise InputError(f"model.pretrained={config.model.pretrained}: no such folder; {remedy}")
        model = _resize_vocabulary(read_model_config(path, config.model.family), config.model)
        config = fields.replace_fields(config, {"model.scores": _choose_scores(model, config.model)})
        stored = {name: fields.get_field(model, name) for name in PRETRAINED_FIELDS}
        resolved = _set_fields("model", config.model, stored)
        config = fields.replace_fields(config, {"model": resolved, "model.pretrained": name})
    if config.runs_teacher:
        name = hub.absolute_name(config.distillation.teacher)
        config = fields.replace_fields(config, {"distillation.teacher": name})
        _read_teacher(name)
    config = fields.replace_fields(config, {"data": _resolve_tokenizer(config.data, config.model.pretrained)})
    if config.lora.pretrained and not config.model.problems():
        config = fields.replace_fields(config, {"lora.pretrained": hub.absolute_name(config.lora.pretrained)})
        config = _set_adapter_fields(config, open_pretrained_adapter(config))
    return _train_scores(config)


def _choose_scores(stored: ModelConfig, requested: ModelConfig) -> int:
    """Return the number of scores of a model that starts from a stored one."""
    if stored.scores and requested.scores not in (0, stored.scores):
        raise InputError(
            f"model.scores={requested.scores}: {requested.pretrained} has {stored.scores}; leave it out, or start from "
            "a model that predicts tokens"
        )
    return stored.scores or requested.scores


def _train_scores(config: Config) -> Config:
    """Return the configuration with the head of scores among the trained parameters, as PEFT does."""
    trainable = config.training.trainable
    selects = config.lora.rank > 0 or bool(trainable)
    if not (config.model.scores and selects) or tree.first_match(SCORES, trainable):
        return config
    return fields.replace_fields(config, {"training.trainable": (*trainable, SCORES)})


def find_class_names(config: Config) -> tuple[str, ...]:
    """Return the names of the classes of `model.pretrained`; empty if it has none, or not as many as the model."""
    if not (name := config.model.pretrained):
        return ()
    path, scores = hub.find_folder(name, "model.pretrained=", weights=False), config.model.scores
    if not is_run_directory(path):
        return read_label_names(text_part.read_text(huggingface.read_settings(path)), scores)
    stored = cli.load_run_config(path, "model.pretrained=")
    return stored.data.label_names if stored.model.scores == scores else ()


def check_predicts_tokens(model: ModelConfig, name: str) -> None:
    """Raise InputError for a model that gives documents scores. name: the model, as it was given."""
    if model.scores:
        raise InputError(
            f"{name}: this model gives documents scores, and predicts no tokens; name a model with a head over the "
            "vocabulary"
        )


def make_teacher_config(config: Config) -> Config:
    """Return the configuration of the teacher of a distillation: its model, frozen, with settings for a forward.

    Raises:
        InputError: `distillation.teacher` names no folder of a supported model.
    """
    teacher = config.distillation
    return replace(
        config,
        model=_read_teacher(teacher.teacher),
        training=replace(config.training, objective="next_token", trainable=(), unroll="none"),
        lora=LoraConfig(base=teacher.teacher_base),
        # The numbers of layers in `pipeline.split` are those of the student.
        pipeline=replace(config.pipeline, split=()),
        remat=RematConfig("none"),
        precision=config.precision.for_evaluation(),
    )


@functools.cache
def _read_teacher(name: str) -> ModelConfig:
    path = hub.find_folder(name, f"{TEACHER}=", weights=False)
    if not path.exists():
        without = "with log-probabilities in data.paths, set it to ''"
        raise InputError(
            f"{TEACHER}={name}: no such folder; name a downloaded model or an id of the hub, or, {without}"
        )
    if is_run_directory(path):
        raise InputError(
            f"{TEACHER}={name}: this is a run directory; export it first: python -m jaxopt_llm.convert export "
            f"--checkpoint {name} --to FOLDER"
        )
    model = huggingface.read_config(path)[1]
    check_predicts_tokens(model, f"{TEACHER}={name}")
    stored = {field: fields.get_field(model, field) for field in PRETRAINED_FIELDS}
    read: ModelConfig = fields.replace_fields(ModelConfig(pretrained=name), stored)
    return read


def _set_adapter_fields(config: Config, adapter: AdapterFolder) -> Config:
    """Return the configuration with the fields that the folder of `lora.pretrained` sets.

    Whole weights that are saved with the adapters go on training. Their tables may be larger than those of the model.
    """
    name, size = f"lora.pretrained={config.lora.pretrained}", adapter.model.vocabulary_size
    values: dict[str, Any] = {"lora": _set_fields("lora", config.lora, adapter.lora)}
    merge = "merge it (python -m jaxopt_llm.convert merge --base MODEL --adapter ADAPTER --to FOLDER) and train FOLDER"
    if adapter.whole.rows:
        raise InputError(f"{name}: it has rows of tables (trainable_token_indices), which no run trains; {merge}")
    if config.model.tied_head and not adapter.model.tied_head:
        raise InputError(f"{name}: its head differs from its embedding table, which the model ties; {merge}")
    if size != config.model.vocabulary_size:
        if config.model.resize_vocabulary:
            raise InputError(f"{name}: its tables have {size} rows; set --model.resize-vocabulary {size}")
        if size < (rows := config.model.vocabulary_size):
            raise InputError(f"{name}: its tables have {size} rows, fewer than the {rows} of the model; {merge}")
        values |= {"model.vocabulary_size": size, "model.resize_vocabulary": size}
    if paths := adapter.whole.paths:
        trained = config.training.trainable
        missing = [path for path in paths if not tree.first_match(path, trained)]
        if trained and missing:
            raise InputError(f"{name}: it also trains {missing[0]}; name it in --training.trainable, or leave that out")
        values["training.trainable"] = trained or paths
    return fields.replace_fields(config, values)


def read_model_config(path: Path, family: str = "") -> ModelConfig:
    """Read the model configuration of a Hugging Face folder or of one of our run directories.

    family: see `ModelConfig.family`.

    Raises:
        InputError: the path is neither, or the run trains adapters.
    """
    if not is_run_directory(path):
        return huggingface.read_config(path, family)[1]
    refuse_option("model.family=", family, f"model.pretrained={path}")
    config = cli.load_run_config(path, "model.pretrained=")
    if config.lora.rank:
        raise InputError(
            f"model.pretrained={path}: this run trained adapters; merge them into their base model first: python -m "
            f"jaxopt_llm.convert merge --checkpoint {path} --to FOLDER"
        )
    return config.model


def _resize_vocabulary(model: ModelConfig, requested: ModelConfig) -> ModelConfig:
    """Return a pretrained model with the vocabulary size that `model.resize_vocabulary` sets."""
    size = requested.resize_vocabulary
    if 0 < size <= model.vocabulary_size:
        raise InputError(
            f"model.resize_vocabulary={size}: {requested.pretrained} has {model.vocabulary_size} token ids, and rows "
            "can only be added; set a larger number, or leave it out"
        )
    return fields.replace_fields(model, {"vocabulary_size": size}) if size > 0 else model


def _resolve_tokenizer(data: DataConfig, source: str) -> DataConfig:
    """Replace `data.tokenizer=auto` by the tokenizer of `model.pretrained`, or by `bytes` if that is empty."""
    is_folder = bool(source) and not is_run_directory(Path(source))
    if is_folder and data.tokenizer == "bytes":
        raise InputError(
            f"data.tokenizer=bytes: the ids of {source} are not bytes; leave it out to use the tokenizer of that "
            "folder, or name a tokenizer.json"
        )
    if data.tokenizer == "bytes":
        return data
    if data.tokenizer != "auto":  # absolute, as `model.pretrained` is
        return fields.replace_fields(data, {"tokenizer": hub.absolute_name(data.tokenizer)})
    if is_folder or not source:
        return fields.replace_fields(data, {"tokenizer": source or "bytes"})
    stored = cli.load_run_config(Path(source), "model.pretrained=").data
    ends = {"bos": data.bos or stored.bos, "eos": data.eos or stored.eos}
    return fields.replace_fields(data, {"tokenizer": stored.tokenizer, **ends})


def _set_fields(name: str, section: Any, stored: dict[str, Any]) -> Any:
    """Return a section with the stored fields. Raise InputError if the section sets one of them to another value."""
    default = type(section)()
    conflicts = [
        f"{name}.{field_name}={value} (the stored value is {stored_value})"
        for field_name, stored_value in stored.items()
        if (value := fields.get_field(section, field_name)) not in (fields.get_field(default, field_name), stored_value)
    ]
    if conflicts:
        owner = "model's" if name == "model" else "adapter's"
        remedy = f"leave out {', '.join(conflicts)}"
        if len(conflicts) > 2 and name == "model":
            remedy = (
                "take a recipe without sizes, --config finetune.py (adapters), finetune_full.py or pretrain.py (all "
                f"parameters), or leave out {', '.join(conflicts[:2])} and {len(conflicts) - 2} more"
            )
        raise InputError(f"{name}.pretrained={section.pretrained} sets the {owner} fields; {remedy}")
    return fields.replace_fields(section, stored)


def find_source_folder(config: Config) -> Path | None:
    """Return the Hugging Face folder that a model came from, possibly through other runs.

    None: the model came from no folder, or the folder no longer exists. For a model of the hub, the folder holds its
    configuration and tokenizer, perhaps without weights.
    """
    name = find_source_name(config)
    folder = hub.find_folder(name, "model.pretrained=", weights=False) if name else None
    return folder if folder and folder.is_dir() else None


def find_source_name(config: Config) -> str:
    """Return the path or the hub id of the model that a model came from, possibly through other runs; empty: none."""
    path, visited = config.model.pretrained, set[str]()
    while path and is_run_directory(Path(path)) and path not in visited:
        visited.add(path)
        path = cli.load_run_config(Path(path), "model.pretrained=").model.pretrained
    return path


def open_pretrained_adapter(config: Config) -> AdapterFolder:
    """Open the PEFT folder that `lora.pretrained` names.

    Raises:
        InputError: the path is a run directory, or not a complete folder of LoRA adapters of the model.
    """
    family = huggingface.choose_adapter_family(config.model, find_source_folder(config))
    path = hub.find_folder(config.lora.pretrained, "lora.pretrained=")
    return open_adapter(path, family, config.model, "lora.pretrained=")


def open_adapter(path: Path, family: Family, model: ModelConfig, prefix: str) -> AdapterFolder:
    """Open a PEFT folder with adapters of a model.

    prefix: text before the path in the error message, such as "--adapter ".

    Raises:
        InputError: the path is a run directory, or not a complete folder of LoRA adapters of the model.
    """
    if is_run_directory(path):
        raise InputError(
            f"{prefix}{path}: this is a run directory; export its adapters first: python -m jaxopt_llm.convert "
            f"export --checkpoint {path} --to FOLDER"
        )
    return adapter_folder.open_adapter_folder(path, family, model)
