"""Scores of documents against transformers' classes, document by document, and folders there and back."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from chats import write_tokenizer
from commands import command, metrics
from test_families_hf_torch import CASES, CONFIGS

from jaxopt_llm.checkpoint.huggingface import find_family
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, write_model_folder
from jaxopt_llm.config import ModelConfig, PreferenceConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE, Params
from jaxopt_llm.model.objectives import Objective, split_loss
from jaxopt_llm.model.objectives.scores import Classify, Reward

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = 3
# Documents of two rows, which the rows pack. The first of each pair is chosen.
LENGTHS = ((7, 5, 3, 9), (4, 8))
FORMS = ("llama 3.1", "qwen 3 tied, windows", "gemma 2", "gpt 2")
PLACEMENT = toy.placement()


def make_model(name: str, labels: int, folder: Path) -> Any:
    """Return one of transformers' classes, whose folder it writes, with large weights of the scores."""
    prefix, settings = CASES[name]
    config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**settings, num_labels=labels)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).eval()
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    return model


def read(folder: ModelFolder, config: ModelConfig | None = None) -> Params:
    specs = Decoder(config or folder.config).specs
    return tree.map_with_path(lambda path, spec: folder.read(path, spec, PLACEMENT.replicated), specs)


def make_documents() -> list[list[np.ndarray]]:
    values = np.random.default_rng(0)
    return [[values.integers(3, 250, length) for length in row] for row in LENGTHS]


def pack(documents: list[list[np.ndarray]], labels: list[list[float]]) -> Batch:
    """Return rows [2, S] of documents, with padding behind them."""
    size = max(sum(map(len, row)) for row in documents) + 2

    def pad(parts: list[Any], dtype: Any) -> np.ndarray:
        row = np.concatenate(parts)
        return np.pad(row, (0, size - row.size)).astype(dtype)

    rows = list(zip(documents, labels, strict=True))
    tokens = np.stack([pad(row, np.int32) for row in documents])
    segments = np.stack([pad([np.full(len(d), i + 1) for i, d in enumerate(row)], np.int32) for row in documents])
    positions = np.stack([pad([np.arange(len(d)) for d in row], np.int32) for row in documents])
    of_tokens = [[np.full(len(d), x) for d, x in zip(*each, strict=True)] for each in rows]
    label = np.stack([pad(row, np.float32) for row in of_tokens])
    return jax.tree.map(lambda x: x[None], Batch(tokens, tokens, segments > 0, segments, positions, labels=label))


def differentiate(config: ModelConfig, params: Params, objective: Objective, batch: Batch) -> tuple[Any, Params]:
    model = Decoder(config, objective=objective)
    frozen = jax.tree.map(lambda spec: None, model.specs)

    def run(params: Params, batch: Batch) -> Any:
        weight = 1 / objective.count(batch).astype(jnp.float32)
        remat = RematConfig("none")
        sums, gradients = scan.loss_and_gradients(model, params, frozen, batch, weight, PLACEMENT, remat)
        return split_loss(objective, sums[OBJECTIVE] * weight), gradients

    with jax.default_matmul_precision("float32"):
        return jax.jit(run)(params, batch)


def to_gradients(theirs: Any, folder: Path) -> Params:
    """Return the gradients of transformers' class as our parameters: its folder, with gradients in place of weights."""
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(folder)
    return read(huggingface.open_model_folder(folder))


def their_scores(theirs: Any, documents: list[list[np.ndarray]]) -> Any:
    return torch.cat([theirs(torch.tensor(each[None])).logits for row in documents for each in row])


@pytest.mark.parametrize("name", FORMS)
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, documents = make_model(name, CLASSES, tmp_path / "model"), make_documents()
    folder = huggingface.open_model_folder(tmp_path / "model")
    assert folder.config.scores == CLASSES
    labels = [[float(i % CLASSES) for i in range(len(row))] for row in documents]
    (loss, metrics), gradients = differentiate(folder.config, read(folder), Classify(CLASSES), pack(documents, labels))
    scores, flat = their_scores(theirs, documents), torch.tensor([*chain(*labels)]).long()
    expected = torch.nn.functional.cross_entropy(scores, flat)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(float((scores.argmax(-1) == flat).float().mean()))
    assert_near(gradients, to_gradients(theirs, tmp_path / "gradients"))


@pytest.mark.parametrize("objective", ["numbers", "reward"])
def test_numbers_and_rewards_are_those_of_transformers(objective: str, tmp_path: Path) -> None:
    theirs, documents = make_model("llama 3.1", 1, tmp_path / "model"), make_documents()
    folder = huggingface.open_model_folder(tmp_path / "model")
    labels = [[0.3 * (i // 2) for i in range(len(row))] for row in documents]
    ours: Objective = Classify(1) if objective == "numbers" else Reward(PreferenceConfig(center_weight=0.2))
    (loss, metrics), gradients = differentiate(folder.config, read(folder), ours, pack(documents, labels))
    scores, flat = their_scores(theirs, documents)[:, 0], torch.tensor([*chain(*labels)])
    if objective == "numbers":
        expected = torch.nn.functional.mse_loss(scores, flat)
    else:  # as in TRL's RewardTrainer.compute_loss
        chosen, rejected = scores[::2], scores[1::2]
        expected = -torch.nn.functional.logsigmoid(chosen - rejected - flat[::2]).mean()
        expected = expected + 0.2 * torch.mean((chosen + rejected) ** 2)
        found = [float(metrics[f"rewards/{name}"]) for name in ("chosen", "rejected", "margin", "accuracy")]
        means = chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).float().mean()
        assert found == pytest.approx([each.item() for each in means], rel=1e-4)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert_near(gradients, to_gradients(theirs, tmp_path / "gradients"))


def assert_near(found: Params, expected: Params) -> None:
    whole = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(expected)))
    for (path, one), two in zip(tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        limit = 1e-5 * np.linalg.norm(two) + 1e-7 * whole
        assert np.linalg.norm(np.asarray(one) - np.asarray(two)) <= limit, path


def test_every_class_of_the_table_exists_in_transformers() -> None:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for family in find_family.FAMILIES:
        assert family.classifier == known.get(family.model_type, ""), family.model_type


@pytest.mark.parametrize("name", FORMS)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """A new head of scores over a model that predicts tokens."""
    prefix, settings = CASES[name]
    config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**settings)
    torch.manual_seed(0)
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    getattr(transformers, prefix + head)(config).save_pretrained(tmp_path / "base")
    base = huggingface.open_model_folder(tmp_path / "base")
    scored = replace(base.config, scores=CLASSES)
    folder, path = base.for_model(scored), "non_layer/score/table"
    assert folder.lacks(path) and not folder.lacks("non_layer/embedding/table")
    score = jnp.asarray(np.random.default_rng(1).normal(size=(CLASSES, scored.width)), jnp.float32)
    score = jax.device_put(score, PLACEMENT.replicated)
    params = tree.map_with_path(
        lambda name, spec: score if name == path else folder.read(name, spec, PLACEMENT.replicated),
        Decoder(scored).specs,
    )
    origin = huggingface.Origin(tmp_path / "base", {"pad_token_id": None})
    write_model_folder(tmp_path / "scored", params, scored, origin)
    written = json.loads((tmp_path / "scored" / "config.json").read_text())
    assert written["architectures"] == [f"{prefix}ForSequenceClassification"]
    assert written["problem_type"] == "single_label_classification" and written["pad_token_id"] == 1  # not EOS
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "scored").eval()
    assert theirs.config.num_labels == CLASSES
    documents = make_documents()[0]
    longest = max(map(len, documents))
    padded = torch.tensor(np.stack([np.pad(each, (0, longest - len(each)), constant_values=1) for each in documents]))
    with torch.no_grad():
        expected = theirs(padded, attention_mask=(padded != 1).long()).logits.numpy()
    batch = jax.tree.map(lambda x: x[0, :1], pack([documents, documents], [[0.0] * 4] * 2))
    model = Decoder(scored)
    found, _ = scan.forward(model, params, batch.tokens, model.make_context(batch, PLACEMENT))
    ends = np.cumsum([len(each) for each in documents]) - 1
    np.testing.assert_allclose(np.asarray(found)[0, ends], expected, rtol=2e-4, atol=2e-5)
    assert huggingface.open_model_folder(tmp_path / "scored").config == scored
    again = read(huggingface.open_model_folder(tmp_path / "scored"))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, params))


def test_adapters_train_the_head_of_scores_and_peft_loads_both(tmp_path: Path) -> None:
    """A run over a folder that predicts tokens, its PEFT folder, and the merged model."""
    peft = pytest.importorskip("peft")
    settings = CASES["llama 3.1"][1] | {"vocab_size": 512, "num_hidden_layers": 2}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    rows = [{"prompt": f"count to {n % 7}", "chosen": "1 2 3", "rejected": f"no {n}"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, base = tmp_path / "run", tmp_path / "base"
    flags = ["--config", "reward.py", "--model.pretrained", base, "--data.paths", tmp_path / "pairs.jsonl"]
    flags += ["--run.directory", run, "--training.steps", 4, "--training.epochs", 0, "--training.sequence-length", 64]
    flags += ["--training.batch-size", 4, "--training.accumulation", 1, "--lora.rank", 2, "--evaluation.every", 2]
    flags += ["--optimizer.learning-rate", 0.01, "--precision.compute-dtype", "float32", "--schedule.warmup-steps", 0]
    flags += ["--schedule.kind", "constant"]
    done = command("train", *flags)
    assert done.returncode == 0, done.stderr
    assert "its head is replaced by a new one of scores, model.scores=1 × 32 random weights" in done.stdout
    assert json.loads((run / "config.json").read_text())["training"]["trainable"] == ["non_layer/score/table"]
    trained = metrics(run)[-1]
    assert trained["eval_loss"] < np.log(2) - 1e-3
    for verb, folder in (("export", "adapters"), ("merge", "merged")):
        done = command("convert", verb, "--checkpoint", run, "--to", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert described["task_type"] == "SEQ_CLS" and described["modules_to_save"] == ["score"]
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load(base, num_labels=1), tmp_path / "adapters").eval()
    merged = load(tmp_path / "merged").eval()
    tokens = torch.tensor(np.random.default_rng(0).integers(3, 512, (1, 12)))
    with torch.no_grad():
        expected = merged(tokens).logits.numpy()
        np.testing.assert_allclose(adapted(tokens).logits.numpy(), expected, rtol=1e-4, atol=1e-5)
    again = ["--lora.pretrained", tmp_path / "adapters", "--lora.rank", 0, "--run.directory", tmp_path / "again"]
    again += ["--training.steps", 1, "--optimizer.learning-rate", 1e-9]
    done = command("train", *flags, *again)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "again")[-1]["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-4)
    refused = command("generate", "--checkpoint", tmp_path / "merged", "--prompt", "x")
    assert refused.returncode == 2 and "this model gives documents scores" in refused.stderr
