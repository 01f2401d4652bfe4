"""python -m jaxopt_llm.convert import --from FOLDER --to RUN_DIR
python -m jaxopt_llm.convert export --checkpoint RUN_DIR --to FOLDER"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, run, tree
from jaxopt_llm.checkpoint import huggingface, safetensors
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.checkpoint.safetensors import NewFolder
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
    """Writes the last checkpoint of a run as a Hugging Face folder."""
    safetensors.check_free(path)
    config = run.load_config(directory)
    if config.lora.rank:
        raise InputError(f"--checkpoint {directory}: it is of adapters, which this does not merge into their base yet")
    source = Path(config.model.pretrained) if config.model.pretrained else None
    if source is not None and not source.is_dir():
        print(f"{source}, where the model came from, is not there: its token ids are not kept", file=sys.stderr)
        source = None
    settings: dict[str, Any] = {}
    if source is None:
        tokenizer = load_tokenizer(config.data)
        settings = {"bos_token_id": tokenizer.beginning, "eos_token_id": tokenizer.end}
        if config.model.positions == "rotary":
            settings["max_position_embeddings"] = config.training.sequence_length
    of_text = Path(config.data.tokenizer)
    _, params, _, step = run.restore(directory, config, config.precision.param_dtype)
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
        description="Weights of Hugging Face folders (config.json and safetensors) into run directories, and back.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    into = commands.add_parser("import", help="a folder into a new run directory, to generate and evaluate from")
    into.add_argument("--from", type=Path, required=True, dest="source", metavar="FOLDER", help="what is read")
    into.add_argument("--to", type=Path, required=True, metavar="RUN_DIR", help="a directory that is not there yet")
    into.add_argument(
        "--tokenizer", metavar="PATH", help="of a tokenizer.json, or bytes (default: the tokenizer.json in FOLDER)"
    )
    out = commands.add_parser("export", help="the last checkpoint of a run into a new folder")
    out.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="directory of a training run")
    out.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
    out.add_argument(
        "--dtype", choices=DTYPES, help="of the tensors (default: as in the folder that the run began from, or float32)"
    )
    out.add_argument(
        "--shard-bytes", type=int, default=safetensors.MOST_FILE, metavar="N", help="most in a file (default: 5 GB)"
    )
    arguments = parser.parse_args(sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")  # what is only copied needs no accelerator
    if arguments.command == "import":
        import_folder(arguments.source, arguments.to, arguments.tokenizer or str(arguments.source.absolute()))
    else:
        if arguments.shard_bytes < 1:
            raise InputError(f"--shard-bytes {arguments.shard_bytes}: must be at least 1")
        export_run(arguments.checkpoint, arguments.to, arguments.dtype, arguments.shard_bytes)
    return 0


if __name__ == "__main__":
    errors.run(main)
