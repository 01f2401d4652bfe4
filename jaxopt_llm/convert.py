"""python -m jaxopt_llm.convert import --from FOLDER --to RUN_DIR
python -m jaxopt_llm.convert export --checkpoint RUN_DIR --to FOLDER
python -m jaxopt_llm.convert merge --checkpoint RUN_DIR --to FOLDER
python -m jaxopt_llm.convert merge --base FOLDER --adapter FOLDER --to FOLDER"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, pretrained, run, tree
from jaxopt_llm.checkpoint import huggingface, peft_writing, safetensors
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.checkpoint.safetensors import NewFolder
from jaxopt_llm.checkpoint.weights import is_run
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.data.tokenizer import load_tokenizer
from jaxopt_llm.errors import CheckpointError, InputError
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import make_parts
from jaxopt_llm.training import lora

DTYPES = ("float32", "bfloat16", "float16")


def import_folder(path: Path, directory: Path, tokenizer: str) -> None:
    """Makes a run directory of a Hugging Face folder, whose checkpoint is of step 0."""
    safetensors.check_free(directory)
    folder = huggingface.open_folder(path)
    config = run.folder_config(folder, directory, tokenizer)
    model = config.model
    vocabulary = load_tokenizer(config.data)
    if vocabulary.vocabulary_size > model.vocabulary_size:
        raise InputError(
            f"{path}: the tokenizer {tokenizer} has {vocabulary.vocabulary_size} tokens, the model's vocabulary "
            f"{model.vocabulary_size}: name the model's own with --tokenizer"
        )
    parts, specs, _ = lora.adapt(make_parts(model), config.lora, config.precision)
    with NewFolder(directory) as working:
        placement = run.placement_for(run.size(specs), config.precision)
        params = tree.map_with_path(lambda name, spec: folder.read(name, spec, placement.parameters(spec)), specs)
        told = {"name": str(path), "summary": "", "sha256": "", "tokenizer_sha256": vocabulary.sha256}
        (working / "corpus.json").write_text(json.dumps(told))
        (working / "config.json").write_text(configuration.to_json(config))
        with Checkpoints(working / "checkpoints", CheckpointConfig()) as checkpoints:
            checkpoints.save(0, {"masters": params}, {"tokens": 0})
        if checkpoints.failed:
            raise CheckpointError(f"{directory}: nothing is left there")
    print(f"{param.count(parts.specs):,} parameters of {path} are the checkpoint of step 0 in {directory}")


def export_run(directory: Path, path: Path, dtype: str | None, most: int) -> None:
    """Writes the last checkpoint of a run as a Hugging Face folder; of a run that trains adapters, these alone as a
    folder of PEFT's."""
    safetensors.check_free(path)
    config = run.load_config(directory)
    if config.lora.rank:
        _export_adapters(directory, path, config, dtype)
    else:
        _export_model(directory, path, config, dtype, most)


def merge_run(directory: Path, path: Path, dtype: str | None, most: int) -> None:
    """Writes the last checkpoint of a run that trains adapters as a Hugging Face folder of the sum."""
    safetensors.check_free(path)
    config = run.load_config(directory)
    if not config.lora.rank:
        raise InputError(f"--checkpoint {directory}: it has no adapters; `convert export` writes its model")
    _export_model(directory, path, config, dtype, most)


def merge_folders(base: Path, adapter: Path, path: Path, dtype: str | None, most: int) -> None:
    """Writes the sum of a Hugging Face folder and a folder of PEFT's."""
    safetensors.check_free(path)
    model = pretrained.load(base, adapter)
    huggingface.write(path, model.params, model.config, base, base, dtype, most)
    print(f"{base} with the adapters of {adapter} is in {path}")


def _export_adapters(directory: Path, path: Path, config: TrainConfig, dtype: str | None) -> None:
    if config.training.trainable:
        raise InputError(
            f"--checkpoint {directory}: beside its adapters it trains weights whole, {config.training.trainable[0]}, "
            "which PEFT's folder of them lacks; `convert merge` writes both"
        )
    family = huggingface.family_of(config.model, configuration.source(config))
    base = config.model.pretrained
    _, params, _, step = run.restore(directory, config, config.precision.param_dtype, "absent")
    settings = (config.lora.alpha, config.lora.rslora, "" if is_run(Path(base)) else base)
    peft_writing.write(path, params, family, config.model, *settings, dtype=dtype)
    print(f"the adapters of step {step} of {directory} are in {path}, in {dtype or config.precision.param_dtype}")


def _export_model(directory: Path, path: Path, config: TrainConfig, dtype: str | None, most: int) -> None:
    source = configuration.source(config)
    if source is None and config.model.pretrained and not is_run(Path(config.model.pretrained)):
        told = f"{config.model.pretrained}, where the model came from, is not there: its token ids are not kept"
        print(told, file=sys.stderr)
    settings: dict[str, Any] = {}
    if source is None:
        tokenizer = load_tokenizer(config.data)
        settings = {"bos_token_id": tokenizer.beginning, "eos_token_id": tokenizer.end}
        if config.model.positions == "rotary":
            settings["max_position_embeddings"] = config.training.sequence_length
    of_text = Path(config.data.tokenizer)
    _, params, _, step = run.restore(directory, config, config.precision.param_dtype, "original")
    dtype = dtype or _dtype_of(source)
    huggingface.write(
        path,
        params,
        config.model,
        source,
        None if config.data.tokenizer == "bytes" else of_text if of_text.is_dir() else of_text.parent,
        dtype=dtype,
        most=most,
        settings=settings,
    )
    print(f"step {step} of {directory} is in {path}, in {dtype}")


def _dtype_of(source: Path | None) -> str:
    settings = huggingface.read_settings(source) if source else {}
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    return dtype if dtype in DTYPES else "float32"


def main() -> int:
    parser = errors.ArgumentParser(
        prog="python -m jaxopt_llm.convert",
        description="Weights of Hugging Face folders (config.json and safetensors) into run directories, and back; "
        "adapters as PEFT has them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export|merge")
    into = commands.add_parser("import", help="a folder into a new run directory, to generate and evaluate from")
    into.add_argument("--from", type=Path, required=True, dest="source", metavar="FOLDER", help="what is read")
    into.add_argument("--to", type=Path, required=True, metavar="RUN_DIR", help="a directory that is not there yet")
    into.add_argument(
        "--tokenizer", metavar="PATH", help="of a tokenizer.json, or bytes (default: the tokenizer.json in FOLDER)"
    )
    out = commands.add_parser(
        "export", help="the last checkpoint of a run into a new folder; of a run that trains adapters, a PEFT folder"
    )
    out.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="directory of a training run")
    whole = commands.add_parser("merge", help="adapters and the model that they adapt into a new folder of one model")
    whole.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="directory of a run that trains adapters")
    whole.add_argument("--base", type=Path, metavar="FOLDER", help="a model, instead, for --adapter")
    whole.add_argument("--adapter", type=Path, metavar="FOLDER", help="a PEFT folder of LoRA adapters of it")
    for each in (out, whole):
        each.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
        each.add_argument(
            "--dtype",
            choices=DTYPES,
            help="of the tensors (default: as in the folder that the run began from, or float32; of adapters, their "
            "own)",
        )
        each.add_argument(
            "--shard-bytes", type=int, default=safetensors.MOST_FILE, metavar="N", help="most in a file (default: 5 GB)"
        )
    arguments = parser.parse_args(sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")  # what is only copied needs no accelerator
    if arguments.command == "import":
        import_folder(arguments.source, arguments.to, arguments.tokenizer or str(arguments.source.absolute()))
        return 0
    if arguments.shard_bytes < 1:
        raise InputError(f"--shard-bytes {arguments.shard_bytes}: must be at least 1")
    settings = (arguments.to, arguments.dtype, arguments.shard_bytes)
    if arguments.command == "export":
        export_run(arguments.checkpoint, *settings)
    elif arguments.checkpoint and not (arguments.base or arguments.adapter):
        merge_run(arguments.checkpoint, *settings)
    elif arguments.base and arguments.adapter and not arguments.checkpoint:
        merge_folders(arguments.base, arguments.adapter, *settings)
    else:
        raise InputError("merge wants --checkpoint RUN_DIR, or --base FOLDER and --adapter FOLDER")
    return 0


if __name__ == "__main__":
    errors.run(main)
