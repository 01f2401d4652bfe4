"""Kinds of input for benchmarks/fuzz.py: a valid sample of each, and the functions that read it in a run."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_mutations as mutations
import numpy as np

from jaxopt_llm.checkpoint.huggingface import model_folder, safetensors
from jaxopt_llm.checkpoint.huggingface.tensor_layout import list_tensor_layouts
from jaxopt_llm.checkpoint.native import integrity, step_directories
from jaxopt_llm.checkpoint.peft import adapter_config, adapter_folder
from jaxopt_llm.checkpoint.peft.adapter_config import find_modules
from jaxopt_llm.config import Config, DataConfig, cli, fields
from jaxopt_llm.core.errors import CheckpointError, InputError, describe_error
from jaxopt_llm.data.reading.files import find_corpus_files
from jaxopt_llm.data.reading.storage import PLAN
from jaxopt_llm.data.tokens import corpus, prepared, template
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.observe import dashboards
from jaxopt_llm.observe.report import run_files

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 64},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32"},
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@dataclass(frozen=True)
class Kind:
    """Kind of input.

    Attributes:
        file: the file that is mutated, in the folder of the sample.
        write: writes the sample into an empty folder.
        read: reads the folder as a run does.
        changes: the mutations.
        finish: called after a mutation, before the folder is read.
        damages: whether reading changes the folder, so that each input needs a new sample.
    """

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    changes: tuple[mutations.Mutation, ...]
    finish: Callable[[Path], object] = lambda folder: None
    damages: bool = False


# --- samples


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def write_model(folder: Path, most: int = 10**9) -> None:
    write_json(folder / "config.json", LLAMA)
    layouts = list_tensor_layouts(*model_folder.read_config(folder))
    specs = {name: safetensors.TensorSpec(np.dtype("f4"), layout.shape) for name, layout in layouts.items()}
    safetensors.write_folder(folder, specs, lambda name: np.ones(specs[name].shape, "f4"), most)


def write_adapter(folder: Path) -> None:
    (folder / "base").mkdir()
    write_model(folder / "base")
    config = adapter_config.PeftConfig(r=2, lora_alpha=4.0, target_modules=["q_proj", "v_proj"])
    adapter_config.write_peft_config(folder, config, input_first=False, base="base", scores=False)
    specs = {
        f"base_model.model.{name}.{kind}": safetensors.TensorSpec(np.dtype("f4"), shape)
        for name, module in find_modules(*model_folder.read_config(folder / "base")).items()
        if name.endswith(("q_proj", "v_proj"))
        for kind, shape in module.shapes(2, dora=False).items()
    }
    weights = folder / adapter_folder.WEIGHTS
    safetensors.write_file(weights, specs, lambda name: np.ones(specs[name].shape, "f4"))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "th", "the", "in"])}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e"), ("i", "n")]))
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    split = pre_tokenizers.Split(r"\w+|\s+", "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", settings)


def write_prepared(folder: Path) -> None:
    write_rows(folder / "rows.jsonl")
    config, tokenizer, directory = DataConfig(paths=(str(folder / "rows.jsonl"),)), ByteTokenizer(), folder / "prepared"
    (files,) = find_corpus_files(config)
    (inspected,) = prepared.inspect_files(files, config, lambda: None)
    plan = prepared.make_plan(files, [inspected[0]], config, tokenizer)
    directory.mkdir()
    prepared.write_json(directory / PLAN, plan)
    merger = prepared.ShardMerger(directory, prepared.describe_arrays(DataConfig(), plan["dtype"]))
    prepared.write_shard(directory, 0, inspected[1], config, tokenizer)
    merger.merge_ready()
    merger.finish(plan)


def write_rows(file: Path) -> None:
    file.write_text("".join(json.dumps({"text": f"document {i}", "n": i / 2}) + "\n" for i in range(20)))


def write_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"text": [f"document {i}" for i in range(40)], "id": list(range(40))}
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=16)


def write_megatron(folder: Path) -> None:
    lengths, boundaries = np.full(8, 10, "<i4"), np.arange(0, 9, 2, dtype="<i8")
    pointers = np.arange(8, dtype="<i8") * 20
    header = b"MMIDIDX\x00\x00" + b"\1\0\0\0\0\0\0\0" + b"\x08" + np.array([8, 5], "<u8").tobytes()
    (folder / "a.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    (folder / "a.bin").write_bytes(np.arange(80, dtype="<u2").tobytes())


def write_checkpoint(folder: Path) -> None:
    (folder / "3" / "arrays").mkdir(parents=True)
    (folder / "3" / "arrays" / "d").write_bytes(bytes(100))
    write_json(folder / "3" / step_directories.RECORD, {"step": 3, "eval_loss": 1.5, "arrays": {}, "window": {}})
    integrity.write_manifest(folder / "3", {})


def write_manifest_again(folder: Path) -> None:
    (folder / "3" / integrity.MANIFEST).unlink()
    integrity.write_manifest(folder / "3", {})


def write_metrics(folder: Path) -> None:
    (folder / "config.json").write_text(fields.to_json(Config()))
    lines = [json.dumps({"step": step, "loss": 2.0 / step, "tokens": 100 * step}) for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    events = [{"time": 1.5 * step, "step": step, "event": "checkpoint"} for step in range(1, 5)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


# --- readers


def read_model(folder: Path) -> None:
    model_folder.read_context(folder)
    opened = model_folder.open_model_folder(folder)
    assert opened.sha256
    for path in {path for path, _ in opened._locations}:
        opened.dtype(path)


def read_adapter(folder: Path) -> None:
    family, config = model_folder.read_config(folder / "base")
    opened = adapter_folder.open_adapter_folder(folder, family, config)
    for part in itertools.chain(*opened.parts.values()):
        assert sum(part.read(kind, ()).sum() for kind in ("lora_a", "lora_b"))
    adapter_config.describe_other_base(folder, "base")


def read_tokenizer(folder: Path) -> None:
    tokenizer = JsonTokenizer(folder)
    found = tokenizer.encode([b"the cat in the hat", "naïve 🙂 text".encode(), b""])
    tokenizer.encode_with_offsets([b"the cat", b"x" * 100])
    tokenizer.decode(found[0])


def read_template(folder: Path) -> None:
    tokenizer = JsonTokenizer(folder)
    found = template.find_template(DataConfig(tokenizer=str(folder), date="2026-01-31"), tokenizer)
    renderer = template.Renderer(found)
    renderer.render_prompt(CHAT[:1])
    renderer.find_turn_end()


def read_corpus(file: str, **settings: Any) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        opened = corpus.open_corpus(DataConfig(paths=(str(folder / file),), held_out=0.2, **settings), ByteTokenizer())
        for stream in (*(source.training for source in opened.sources), opened.held_out):
            assert stream is not None
            stream.document_starts(0, stream.size)
            stream.read(0, stream.size)
            stream.describe_position(stream.size - 1)

    return read


def read_prepared(folder: Path) -> None:
    read_corpus("prepared")(folder)
    prepared.verify_corpus(folder / "prepared", 1)


def read_checkpoint(folder: Path) -> None:
    """Read a checkpoint as a resume does, which sets a damaged one aside."""
    step_directories.read_summary(folder / "3")
    if damage := step_directories.find_damage(folder / "3"):
        raise CheckpointError(f"{folder / '3'} is damaged: {damage}")
    step_directories.read_record(folder / "3")


def read_run(folder: Path) -> None:
    cli.load_run_config(folder, "--checkpoint ")


def read_metrics(folder: Path) -> None:
    run_files.read_runs([folder])
    dashboards.MetricsLog(folder / "metrics.jsonl", 4, lambda line: None).close()


def read_deepspeed(folder: Path) -> None:
    deepspeed.read_file(folder / "ds.json", 8)


def write_deepspeed(folder: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    settings = {"train_batch_size": 32, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    write_json(folder / "ds.json", {**settings, "optimizer": optimizer, "gradient_clipping": 1.0})


INDEXED = 4000  # bytes of a file of weights, for several files and an index

KINDS: Mapping[str, Kind] = {
    "config.json": Kind("config.json", write_model, read_model, mutations.JSON),
    "safetensors": Kind("model.safetensors", write_model, read_model, mutations.SAFETENSORS),
    "index": Kind(safetensors.INDEX, lambda folder: write_model(folder, INDEXED), read_model, mutations.JSON),
    "adapter_config.json": Kind(adapter_config.FILE, write_adapter, read_adapter, mutations.JSON),
    "adapter weights": Kind(adapter_folder.WEIGHTS, write_adapter, read_adapter, mutations.SAFETENSORS),
    "tokenizer.json": Kind("tokenizer.json", write_tokenizer, read_tokenizer, mutations.JSON),
    "tokenizer_config.json": Kind("tokenizer_config.json", write_tokenizer, read_template, mutations.JSON),
    "prepared manifest": Kind("prepared/manifest.json", write_prepared, read_prepared, mutations.JSON),
    "prepared shards": Kind("prepared/shards.jsonl", write_prepared, read_prepared, mutations.JSON_LINES),
    "prepared ends": Kind("prepared/ends.bin", write_prepared, read_prepared, mutations.BYTES),
    "checkpoint manifest": Kind("3/manifest.json", write_checkpoint, read_checkpoint, mutations.JSON),
    "checkpoint record": Kind(
        "3/checkpoint.json", write_checkpoint, read_checkpoint, mutations.JSON, write_manifest_again
    ),
    "npy": Kind(
        "a.npy",
        lambda folder: np.save(folder / "a.npy", np.tile(np.arange(256, 258, dtype="<u2"), 40)),
        read_corpus("a.npy"),
        mutations.BYTES,
    ),
    "idx": Kind("a.idx", write_megatron, read_corpus("a.idx"), mutations.BYTES),
    "parquet": Kind("a.parquet", write_parquet, read_corpus("a.parquet"), mutations.BYTES),
    "jsonl": Kind(
        "a.jsonl", lambda folder: write_rows(folder / "a.jsonl"), read_corpus("a.jsonl"), mutations.JSON_LINES
    ),
    "run config": Kind(
        "config.json",
        lambda folder: (folder / "config.json").write_text(fields.to_json(Config())),
        read_run,
        mutations.JSON,
    ),
    "metrics": Kind("metrics.jsonl", write_metrics, read_metrics, mutations.JSON_LINES),
    "deepspeed": Kind("ds.json", write_deepspeed, read_deepspeed, mutations.JSON),
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of an input: read, refused, unnamed (no line that names the file), traceback, abort or hang."""

    verdict: str
    detail: str = ""


def read_mutated(kind: Kind, folder: Path, content: bytes) -> Outcome:
    """Read the sample in a folder with this content of its file."""
    (folder / kind.file).write_bytes(content)
    kind.finish(folder)
    try:
        kind.read(folder)
    except (InputError, CheckpointError, OSError) as error:
        line = describe_error(error)
        is_named = any(name in line for name in (str(folder), *Path(kind.file).parts))
        good = is_named and "\n" not in line and len(line) < 10_000
        return Outcome("refused" if good else "unnamed", f"{type(error).__name__}: {line[:500]}")
    except BaseException as error:
        places = []
        trace = error.__traceback__
        while trace:
            places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return Outcome("traceback", f"{type(error).__name__}: {str(error)[:200]} ({' '.join(places[-4:])})")
    return Outcome("read")


def copy_sample(kind: Kind, folder: Path) -> bytes:
    """Write the sample into an empty folder, and return the content of its file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind.write(folder)
    return (folder / kind.file).read_bytes()
