"""Adapters of PEFT's own classes, brought here from the folders that they write, and back.

Over small models of Hugging Face's; values are random, and B is never zero.
"""

import copy
import itertools
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
import tokenizers
import toy

import jaxopt_llm
from jaxopt_llm import convert
from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft.adapter_writer import AdapterOrigin, write_adapter_folder
from jaxopt_llm.config import CheckpointConfig, Config, LoraConfig
from jaxopt_llm.config.fields import replace_fields, to_json
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference.load import Pretrained
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.initial_weights import open_initial_weights
from jaxopt_llm.step import lora
from jaxopt_llm.step.state import StateSpecs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
library = pytest.importorskip("peft")
save = pytest.importorskip("safetensors.numpy")

LAYERS, RANK, ALPHA = 3, 3, 1.5
LORA = LoraConfig(rank=RANK, alpha=ALPHA)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 150, "attn_implementation": "eager"}
SIZES = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"tie_word_embeddings": False}),
    "phi3": ("Phi3", SIZES | {"tie_word_embeddings": False}),
    "gpt2": ("GPT2", IDS | {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}),
    "qwen2": ("Qwen2", SIZES | {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4}),
    "qwen3 moe": ("Qwen3Moe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}),
    "deepseek": (
        "DeepseekV3",
        SIZES
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gemma2": ("Gemma2", SIZES | {"head_dim": 16, "sliding_window": 4, "tie_word_embeddings": True}),
    "gpt oss": ("GptOss", SIZES | {"head_dim": 8, "sliding_window": 4, "num_local_experts": 5}),
    "llama 4": (
        "Llama4",
        SIZES
        | {"head_dim": 8, "num_local_experts": 3, "intermediate_size": 20, "intermediate_size_mlp": 24}
        | {"interleave_moe_layer_step": 2, "tie_word_embeddings": False},
    ),
    "granite moe": ("GraniteMoe", SIZES | {"num_local_experts": 4, "intermediate_size": 24}),
    "granite moe shared": (
        "GraniteMoeShared",
        SIZES | {"num_local_experts": 4, "intermediate_size": 24, "shared_intermediate_size": 20},
    ),
    "gemma 4": (
        "Gemma4",
        SIZES
        | {"head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 1, "sliding_window": 4}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20},
    ),
    "qwen2 moe": ("Qwen2Moe", SIZES | {"num_experts": 4, "moe_intermediate_size": 12}),
    "afmoe": (
        "Afmoe",
        SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
        | {"num_shared_experts": 1, "sliding_window": 4, "global_attn_every_n_layers": 2},
    ),
}
DELTA = SIZES | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    **{"head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
MODELS["qwen3 next"] = (
    "Qwen3Next",
    DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
)
MODELS["qwen3.5"] = ("Qwen3_5", DELTA)
CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma4", "Llama4", "Qwen3_5")}


class Model:
    """One of theirs, the folder that it wrote, and tokens for it."""

    def __init__(self, name: str, folder: Path) -> None:
        prefix, settings = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
        self.own = model(getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**settings)).eval()
        with torch.no_grad():
            for parameter in self.own.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
        self.folder = folder
        self.own.save_pretrained(folder)
        self.tokens = np.random.default_rng(0).integers(3, 150, (2, 12))

    def fresh(self, folder: Path | None = None) -> Any:
        return type(self.own).from_pretrained(folder or self.folder, attn_implementation="eager").eval()

    def logits(self, theirs: Any) -> np.ndarray:
        with torch.no_grad():
            return theirs(torch.tensor(self.tokens), use_cache=False).logits.numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    class Made(dict[str, Model]):
        def __missing__(self, name: str) -> Model:
            self[name] = Model(name, tmp_path_factory.mktemp(name))
            return self[name]

    return Made()


def same(found: Any, expected: np.ndarray, within: float = 1e-5) -> None:
    assert np.abs(found - expected).max() <= within * np.abs(expected).max()


def adapted(model: Model, targets: str) -> Pretrained:
    """Ours, with random adapters."""
    here = jaxopt_llm.load_pretrained(model.folder)
    random = np.random.default_rng(1)

    def wrap(path: str, spec: Any) -> Any:
        fits = spec.contracting and tree.first_match(path, tuple(targets.split()))
        return leaves.lora_specs(spec, RANK, ALPHA / RANK, "dora" in targets) if fits else spec

    specs = tree.map_with_path(wrap, here.model.specs)
    adapters, bare = leaves.adapter_paths(specs), dict(tree.leaves_with_path(here.params))

    def value(path: str, spec: Any) -> Any:
        if path not in adapters:
            return bare[path.removesuffix("/base")]
        values = random.uniform(0.5, 1.5, spec.shape) if path.endswith("/magnitude") else random.normal(size=spec.shape)
        if "vocabulary" in spec.axes:
            values[model.own.config.vocab_size :] = 0
        return jax.device_put((values / math.sqrt(spec.fan_in or 1)).astype(np.float32), here.placement.replicated)

    params = tree.map_with_path(value, specs)
    return replace(here, params=params, model=here.model.with_specs(specs))


def write(here: Pretrained, path: Path) -> None:
    family, _ = huggingface.read_config(here.source)
    write_adapter_folder(path, here.params, family, here.config, LORA, origin=AdapterOrigin(str(here.source)))


BLOCKS = "*/attention/* */mlp/*"
OURS = [
    ("llama", f"dora {BLOCKS}"),
    ("llama", "*/attention/query */attention/output */head/table */embedding/table"),
    ("phi3", f"dora {BLOCKS}"),
    ("phi3", "*/attention/query */attention/value */mlp/up"),
    ("gpt2", "dora */attention/output */mlp/up"),
    ("gpt2", "*/attention/value */mlp/down */positions/table */embedding/table"),
    ("qwen2", "*/attention/* */embedding/table"),
    ("mixtral", "*/attention/*"),
    ("mixtral", "*/mlp/gate */mlp/up */mlp/down"),
    ("mixtral", "*/attention/query */mlp/up */mlp/down"),
    ("qwen3 moe", "*/attention/* */mlp/gate */mlp/up */mlp/down"),  # also the dense layer
    ("qwen3 moe", "segment_1/*/mlp/gate"),
    ("deepseek", "*/attention/query_up */mlp/gate */mlp/up */mlp/down */mlp/shared_up */mlp/shared_down"),
    ("qwen3 moe", "dora */attention/*"),
    ("deepseek", "dora */attention/*"),
    ("deepseek", "*/attention/value */attention/rotary_key"),
    ("afmoe", "*/attention/query */attention/gate */mlp/down */mlp/shared_gate"),
    ("gemma2", f"*/embedding/table {BLOCKS}"),
    ("gemma2", "segment_1/* segment_0/block_1/mlp/gate"),  # of some layers
    ("gpt oss", f"{BLOCKS}"),
    ("gpt oss", "*/attention/query */mlp/up"),
    ("gpt oss", "*/mlp/down"),
    ("llama 4", f"{BLOCKS}"),
    ("llama 4", "*/mlp/gate"),
    ("llama 4", "*/mlp/shared_up */mlp/down"),
    ("granite moe", f"{BLOCKS}"),
    ("granite moe shared", "*/mlp/up */mlp/down */mlp/shared_up"),
    ("gemma 4", f"{BLOCKS}"),
    ("qwen3 next", "dora */delta/* */attention/*"),
    ("qwen3.5", "*/delta/query */delta/beta */delta/output */attention/gate"),
]


@pytest.mark.parametrize(("name", "targets"), OURS)
def test_peft_loads_what_is_written(name: str, targets: str, models: dict[str, Model], tmp_path: Path) -> None:
    """And so does this; and transformers loads the folder into which it is folded."""
    model = models[name]
    here = adapted(model, targets)
    expected = np.asarray(here.logits(model.tokens))
    assert np.abs(expected - model.logits(model.own)).max() > 0.01 * np.abs(expected).max()
    write(here, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys|.*unexpected")
        theirs = library.PeftModel.from_pretrained(model.fresh(), tmp_path / "adapter").eval()
    same(model.logits(theirs), expected)
    if "/mlp/" in targets and "experts" in str(theirs):
        here.save_pretrained(tmp_path / "sum")
        ours, summed = model.fresh(tmp_path / "sum").state_dict(), copy.deepcopy(theirs).merge_and_unload().state_dict()
        for parameter, values in summed.items():
            same(ours[parameter].numpy(), values.numpy(), within=1e-6)
    if "embedding/table" in targets and here.config.tied_head:  # and stays one adapter while PEFT trains it
        table, head = (get() for get in (theirs.get_input_embeddings, theirs.get_output_embeddings))
        assert head.lora_B["default"].weight.data_ptr() == table.lora_embedding_A["default"].data_ptr()

    back = jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path / "adapter")
    assert jax.tree.structure(back.params) == jax.tree.structure(here.params)
    jax.tree.map(np.testing.assert_array_equal, back.params, here.params)

    here.save_pretrained(tmp_path / "merged")
    same(model.logits(model.fresh(tmp_path / "merged")), expected)


# What get_peft_model is given, beside r and lora_alpha.
THEIRS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_rslora": True}),
    (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"1.self_attn.q_proj": 5, "up_proj": 2},
            "alpha_pattern": {r"layers\.0\..*v_proj": 11},
            "layers_to_transform": [0, 1],
        },
    ),
    (
        "llama",
        {"target_modules": r".*\.[12]\.mlp\.(up|gate)_proj", "use_rslora": True, "rank_pattern": {"gate_proj": 7}},
    ),
    ("llama", {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"], "use_dora": True}),
    ("phi3", {"target_modules": "all-linear"}),
    ("phi3", {"target_modules": ["qkv_proj", "o_proj"], "use_dora": True}),
    ("phi3", {"target_modules": ["embed_tokens", "gate_up_proj"]}),
    ("gpt2", {"target_modules": "all-linear", "use_rslora": True}),
    ("gpt2", {"target_modules": ["c_attn", "wpe"], "layers_to_transform": 1, "layers_pattern": "h"}),
    ("qwen2", {"target_modules": ["k_proj"], "layers_to_transform": [2]}),
    ("qwen2", {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "ensure_weight_tying": True}),
    ("mixtral", {"target_modules": ["q_proj", "o_proj", "lm_head"]}),
    ("qwen3 moe", {"target_modules": ["k_proj"], "use_dora": True}),
    ("mixtral", {"target_modules": ["w1", "w2", "w3"]}),  # which PEFT turns into parameters
    (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {r"layers\.1\..*gate_up_proj": 11},
            "use_rslora": True,
        },
    ),
    ("qwen3 moe", {"target_modules": [], "target_parameters": ["1.mlp.experts.down_proj"]}),
    (
        "qwen3 moe",
        {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "0.mlp.up_proj.weight"]},
    ),
    (
        "deepseek",
        {"target_modules": ["kv_b_proj"], "target_parameters": ["down_proj", "shared_experts.up_proj.weight"]},
    ),
    ("deepseek", {"target_modules": ["q_a_proj", "kv_b_proj", "kv_a_proj_with_mqa"], "use_dora": True}),
    ("gemma2", {"target_modules": "all-linear", "use_dora": True}),
    (
        "gpt oss",
        {"target_modules": "all-linear", "target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj"]},
    ),
    (
        "llama 4",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "shared_expert.up_proj.weight"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    ("granite moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "use_rslora": True}),
    (
        "granite moe shared",
        {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj", "input_linear.weight"]},
    ),
    ("gemma 4", {"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ("qwen3 next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj", "out_proj"], "use_dora": True}),
    ("qwen3.5", {"target_modules": "all-linear"}),
]


@pytest.mark.parametrize(("name", "settings"), THEIRS, ids=str)
def test_what_peft_writes_is_loaded(
    name: str, settings: dict[str, Any], models: dict[str, Model], tmp_path: Path
) -> None:
    model = models[name]
    config = library.LoraConfig(r=4, lora_alpha=3, task_type="CAUSAL_LM", **settings)
    theirs = library.get_peft_model(model.fresh(), config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "magnitude" in parameter_name:
                parameter *= torch.empty_like(parameter).uniform_(0.5, 1.5)
            elif "lora_" in parameter_name:
                parameter.normal_(0, 1 / math.sqrt(max(parameter.shape)))
    expected = model.logits(theirs)
    assert np.abs(expected - model.logits(model.own)).max() > 0.01 * np.abs(expected).max()
    theirs.save_pretrained(tmp_path)
    same(jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path).logits(model.tokens), expected)


def start_run(settings: dict[str, Any]) -> tuple[Config, Params]:
    """Return the configuration of a run over a folder, and its trained parameters at the start: None for factors."""
    config = replace_fields(Config(), settings | {"precision.compute_dtype": "float32"})
    config = pretrained.resolve_pretrained(config)
    trainable, placement = config.training.trainable, toy.placement()
    assert not lora.problems(param_specs(config.model), config.lora, trainable)
    _, trained, frozen = lora.adapt_model(Decoder(config.model), config.lora, config.precision, trainable)
    specs = StateSpecs(trained, {}, frozen, {}, {})
    initial = open_initial_weights(config, cast(Any, None), 0, print, cast(Any, None))
    assert initial.weights is not None
    params = initial_weights.read_parameters(initial.weights, specs, placement)
    if initial.adapter is not None:
        params = initial_weights.add_adapter(params, initial.adapter, specs, placement)
    return config, tree.map_with_path(lambda path, spec: dict(tree.leaves_with_path(params)).get(path), trained)


def write_run(directory: Path, config: Config, params: Params) -> None:
    """Write a run with one checkpoint."""
    directory.mkdir()
    (directory / "config.json").write_text(to_json(config))
    digest = huggingface.open_model_folder(Path(config.model.pretrained)).sha256
    (directory / "corpus.json").write_text(json.dumps({"base_sha256": digest}))
    with Checkpoints(directory / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, {"masters": params}, {"tokens": 0})


# Whole weights that PEFT saves with adapters, by model: what get_peft_model is given, and the rows of resized tables.
WHOLE: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 0, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", 0, {"modules_to_save": ["lm_head"]}),
    ("llama", 0, {"modules_to_save": ["norm", "mlp"]}),
    ("llama", 157, {}),
    ("llama", 140, {"modules_to_save": ["embed_tokens", "lm_head"]}),  # as many as the tokenizer has
    ("llama", 157, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", 157, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("phi3", 0, {"target_modules": ["o_proj"], "modules_to_save": ["gate_up_proj"]}),
    ("gpt2", 0, {"target_modules": ["c_attn"], "modules_to_save": ["wte", "ln_f", "wpe"], "ensure_weight_tying": True}),
    ("qwen2", 0, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("qwen2", 0, {"modules_to_save": ["embed_tokens"]}),  # the head keeps the table of the base
    ("qwen2", 0, {"modules_to_save": ["lm_head"]}),
    ("qwen2", 0, {"modules_to_save": ["embed_tokens", "lm_head"]}),  # two tables of a model that ties them
    ("qwen2", 157, {}),
    ("qwen2", 157, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("qwen2", 0, {"modules_to_save": ["q_proj"]}),  # with its bias
    ("qwen3 moe", 0, {"modules_to_save": ["embed_tokens", "q_norm"]}),
]


@pytest.mark.parametrize(("name", "rows", "settings"), WHOLE, ids=str)
def test_whole_weights_that_peft_writes_are_loaded(
    name: str, rows: int, settings: dict[str, Any], models: dict[str, Model], tmp_path: Path
) -> None:
    """And they are in the merged folder, which transformers loads."""
    model = models[name]
    own = model.fresh()
    if rows:
        own.resize_token_embeddings(rows)
    config = library.LoraConfig(
        **{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["k_proj"]} | copy.deepcopy(settings)
    )
    theirs = library.get_peft_model(own, config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                parameter += torch.empty_like(parameter).normal_(0, 1 / math.sqrt(max(parameter.shape)))
    tokens = model.tokens % (rows or 150)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
    theirs.save_pretrained(tmp_path / "adapter")
    found = jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path / "adapter")
    same(found.logits(tokens), expected)

    convert.merge_folders(model.folder, tmp_path / "adapter", tmp_path / "merged", None, 10**9)
    with torch.no_grad():
        same(model.fresh(tmp_path / "merged")(torch.tensor(tokens), use_cache=False).logits.numpy(), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            # PEFT does not save the other table, whose rows were added at random.
            {"target_modules": ["embed_tokens"]},
            "lm_head.weight' is missing, and the tables have another size",
        ),
        (
            {"modules_to_save": ["layers.1.mlp"]},
            "modules_to_save without .*layers.0.mlp.*: weights of some layers only",
        ),
    ],
    ids=str,
)
def test_other_trained_weights_of_peft_are_refused(
    settings: dict[str, Any], message: str, models: dict[str, Model], tmp_path: Path
) -> None:
    model = models["llama"]
    own = model.fresh()
    own.resize_token_embeddings(157 if "target_modules" in settings else 150)
    config = library.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["k_proj"]} | settings)
    library.get_peft_model(own, config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "trainable"),
    [
        ("llama", 0, "embedding head"),
        ("llama", 157, ""),
        ("llama", 157, "*/embedding/table */head/table */scale"),
        ("llama", 0, "final_norm"),  # whose name ends others
        ("qwen2", 0, "embedding"),
        ("qwen2", 157, "embedding"),
        ("phi3", 0, "*/mlp/up"),  # a part of a fused matrix
        ("qwen3 moe", 0, "head query_norm"),
    ],
)
def test_peft_loads_whole_weights_of_a_run(
    name: str, rows: int, trainable: str, models: dict[str, Model], tmp_path: Path
) -> None:
    """Onto a base whose tables were resized there, if the run has more rows."""
    model = models[name]
    directory, random = tmp_path / "run", np.random.default_rng(1)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "word": 1}, unk_token="word"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"model.pretrained": str(model.folder), "model.resize_vocabulary": rows, "lora.rank": 4}
    settings["data.tokenizer"] = str(tmp_path / "tokenizer.json")
    config, params = start_run(
        settings | {"lora.targets": ("*/attention/*",), "training.trainable": tuple(trainable.split())}
    )
    _, specs, _ = lora.adapt_model(Decoder(config.model), config.lora, config.precision, config.training.trainable)

    def change(path: str, spec: Any, value: Any) -> Any:
        change = random.normal(size=spec.shape) / math.sqrt(spec.fan_in or 1)
        if "vocabulary" in spec.axes:
            change[config.model.vocabulary_size :] = 0
        return jax.device_put(
            (change if value is None else value + change).astype(np.float32), toy.placement().replicated
        )

    write_run(directory, config, tree.map_with_path(change, specs, params))
    convert.export_run(directory, tmp_path / "adapter", None, 10**9)
    own = model.fresh()
    if rows:
        own.resize_token_embeddings(rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys|.*unexpected")
        theirs = library.PeftModel.from_pretrained(own, tmp_path / "adapter").eval()
    here = jaxopt_llm.load_pretrained(directory)
    expected = np.asarray(here.logits(model.tokens))
    assert np.abs(expected[..., :150] - model.logits(model.own)).max() > 0.01 * np.abs(expected).max()
    # From logits in float64, torch's differ by up to 2.3e-5 and ours by up to 1.7e-5 on a CPU with AMX.
    same(model.logits(theirs), expected, within=5e-5)
    same(jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path / "adapter").logits(model.tokens), expected)
    if trainable:  # training with them goes on: the same parameters, with the same values
        again = start_run({"model.pretrained": str(model.folder), "lora.pretrained": str(tmp_path / "adapter")})
        write_run(tmp_path / "again", *again)
        same(jaxopt_llm.load_pretrained(tmp_path / "again").logits(model.tokens), expected)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate"]], ids=str)
def test_what_peft_writes_of_routers_is_refused(targets: Any, models: dict[str, Model], tmp_path: Path) -> None:
    model = models["mixtral"]
    config = library.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets)
    library.get_peft_model(model.fresh(), config).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="target_parameters=.*: 'gate.weight' is no matrix .* routers have no adapters"
    ):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)


def test_adapters_of_the_gate_of_a_shared_expert_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["qwen2 moe"]
    config = library.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "shared_expert_gate"])
    library.get_peft_model(model.fresh(), config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="shared_expert_gate.lora_A.weight' belongs to no adapter of the model's"):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)


def test_adapters_of_single_experts_are_loaded(models: dict[str, Model], tmp_path: Path) -> None:
    """As PEFT wrote them when each expert was a module. PEFT itself converts them where it loads them."""
    model, random = models["mixtral"], np.random.default_rng(2)
    shapes = {"w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}
    factors = {}
    for layer, expert, (name, (inputs, outputs)) in itertools.product(range(LAYERS), range(4), shapes.items()):
        stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        factors[f"{stem}.lora_A.weight"] = random.normal(size=(RANK, inputs)).astype(np.float32) / 6
        factors[f"{stem}.lora_B.weight"] = random.normal(size=(outputs, RANK)).astype(np.float32) / 2
    save.save_file(factors, tmp_path / "adapter_model.safetensors")
    config = library.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=[*shapes])
    config.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys|.*unexpected")
        expected = model.logits(library.PeftModel.from_pretrained(model.fresh(), tmp_path).eval())
    assert np.abs(expected - model.logits(model.own)).max() > 0.01 * np.abs(expected).max()
    same(jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path).logits(model.tokens), expected)

    del factors[next(name for name in factors if "layers.1" in name and "experts.2.w3.lora_A" in name)]
    save.save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="layers.1.block_sparse_moe.experts.2.w3.lora_A.weight' is missing"):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)
