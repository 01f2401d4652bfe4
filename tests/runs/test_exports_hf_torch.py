"""Exported folders as transformers and PEFT read them: the tokenizer, template, EOS and weights of the training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import huggingface_hub
import numpy as np
import pytest
import texts
from commands import metrics, some_text, train
from test_converse import TURNS, run_command, talker
from test_convert import RECIPE, done

import jaxopt_llm
from jaxopt_llm import convert
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.config import DataConfig, cli
from jaxopt_llm.data.tokens.corpus import open_corpus
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.data.tokens.tokenizer_files import write_tokenizer
from jaxopt_llm.inference import base_difference, exported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

MESSAGES = [
    {"role": "user", "content": "ask again"},
    {"role": "assistant", "content": "good day"},
]
IDS = [2, 5, 6, 1, 3, 7, 8, 1]  # of their words in WORDS
OTHER = "{% for m in messages %}{{ m.content + ' <|next|> ' }}{% endfor %}"
LLAMA = replace(folders.CONFIG, biases="none", pattern=("global",))
STILL = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--evaluation.batches", 1)


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a base without that template, whose files have changed since."""
    folder = tmp_path_factory.mktemp("chat")
    base = talker(folder / "base", None)
    settings = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 64}
    (base / "config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": 0, "do_sample": False, "repetition_penalty": 1.0, "custom_generate": "someone/code"}
    (base / "generation_config.json").write_text(json.dumps(generation))
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: a/b\n---\nlicense: none\n")
    (folder / "secret.jinja").write_text(TURNS)
    (folder / "recipe.py").write_text(RECIPE.format(path=str(base)))
    for name in ("talks", "held"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(30)))
    data = ("--data.paths", folder / "talks.jsonl", "--evaluation.paths", folder / "held.jsonl")
    data += ("--data.content", "chat", "--data.chat-template", folder / "secret.jinja")
    data += ("--data.template-arguments", "enable_thinking=false", "style=plain")
    options = ("--config", folder / "recipe.py", "--run.directory", folder / "run", *data, "--lora.rank", 2, *STILL)
    done("train", *options)
    (folder / "secret.jinja").write_text(OTHER)
    declared = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(declared | {"chat_template": OTHER}))
    return folder / "run"


@pytest.fixture(scope="module")
def merged(chat_run: Path) -> Path:
    path = chat_run.parent / "merged"
    done("convert", "merge", "--checkpoint", chat_run, "--to", path)
    return path


def learned_ids(run: Path) -> list[int]:
    """Token ids of the first conversation, as the training read it."""
    data = cli.load_run_config(run, "").data
    stream = open_corpus(data, load_tokenizer(data), holds_out=False).sources[0].training
    return stream.read(0, len(IDS)).tolist()


def test_the_template_of_the_merged_folder_gives_the_ids_of_the_training(chat_run: Path, merged: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == TURNS == (merged / "chat_template.jinja").read_text()
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert ids == IDS == learned_ids(chat_run)


def test_transformers_stops_at_the_end_of_a_turn_as_chat_does(merged: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    question = [{"role": "user", "content": "ask"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.convert_ids_to_tokens(written) == ["good", "day", "<|turn|>"]
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    answer = pipeline(question, max_new_tokens=20)[0]["generated_text"][-1]
    assert answer["content"].split() == ["good", "day"]
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [0, 1]


def test_generate_of_the_run_stops_there_too(chat_run: Path, merged: Path, monkeypatch: Any, capsys: Any) -> None:
    for folder in (chat_run, merged):
        said = run_command("ask\n", "--checkpoint", folder, "--chat", monkeypatch=monkeypatch, capsys=capsys)
        assert (said[0], said[1].split()) == (0, ["good", "day"])


def test_generation_settings_of_the_base_are_kept_unless_they_name_code(merged: Path) -> None:
    said = json.loads((merged / "generation_config.json").read_text())
    assert said == {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": [0, 1]}
    config = json.loads((merged / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == ([0, 1], 64)


def test_the_variables_of_the_prompts_are_named_in_each_folder(chat_run: Path, merged: Path, tmp_path: Path) -> None:
    note = "The prompts of the training had enable_thinking=false style=plain: pass it to apply_chat_template, as in "
    note += "tokenizer.apply_chat_template(messages, enable_thinking=False, style='plain')."
    said = done("convert", "export", "--checkpoint", chat_run, "--to", tmp_path / "adapters")
    assert said.splitlines().count(note) == 1
    for folder in (merged, tmp_path / "adapters"):
        assert note in (folder / "README.md").read_text().splitlines()
    assert note in done("convert", "merge", "--checkpoint", chat_run, "--to", tmp_path / "merged").splitlines()


def test_the_card_says_what_was_trained_and_no_path(chat_run: Path, merged: Path) -> None:
    card = (merged / "README.md").read_text()
    front = card.split("---\n")[1].splitlines()
    assert 'license: "apache-2.0"' in front and "library_name: transformers" in front
    assert not any(line.startswith(("base_model", "datasets")) for line in front)  # neither is on the hub
    assert front[front.index("tags:") + 1 :] == ["- jaxopt_llm", "- sft", "- lora"]
    assert "| base | base |" in card and "| data | talks.jsonl |" in card and "| steps | 2 |" in card
    losses = [record["loss"] for record in metrics(chat_run) if "loss" in record]
    assert f"| training loss | {losses[-1]:.4f} (step 2) |" in card and "| held-out loss | " in card
    assert "| `lora.rank` | `2` |" in card and '| `data.content` | `"chat"` |' in card
    assert str(chat_run.parent) not in card and "secret" not in card and "/tmp" not in card
    assert huggingface_hub.ModelCard.load(merged / "README.md").data.license == "apache-2.0"


def test_a_folder_of_adapters_has_the_tokenizer_and_the_template(chat_run: Path, tmp_path: Path) -> None:
    done("convert", "export", "--checkpoint", chat_run, "--to", tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False) == IDS
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "adapter")
    assert said.eos_token_id == [0, 1]
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and str(tmp_path) not in card
    # A merge of the two folders takes them from there: the base has another template.
    base = chat_run.parent / "base"
    convert.merge_folders(base, tmp_path / "adapter", tmp_path / "both", None, 10**9)
    both = transformers.AutoTokenizer.from_pretrained(tmp_path / "both")
    assert both.apply_chat_template(MESSAGES, tokenize=True, return_dict=False) == IDS
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "both").eos_token_id == [0, 1]
    loaded = jaxopt_llm.load_pretrained(base, adapter=tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == TURNS


def test_named_templates_are_kept_and_a_template_of_ones_own_replaces_them(chat_run: Path, tmp_path: Path) -> None:
    base = shutil.copytree(chat_run.parent / "base", tmp_path / "base")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (base / "chat_template.jinja").write_text(TURNS)
    folders.make_run(base, tmp_path / "run")
    shutil.rmtree(base / "additional_chat_templates")
    convert.export_run(tmp_path / "run", tmp_path / "out", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == {"default": TURNS, "tool_use": "tools"}
    config = cli.load_run_config(tmp_path / "run", "").data
    own = replace(config, chat_template=str(chat_run / "chat_template.jinja"), content="chat")
    (tmp_path / "own").mkdir()
    write_tokenizer(own, load_tokenizer(own), tmp_path / "own")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "own").chat_template == TURNS


@pytest.mark.slow
def test_the_template_of_prepared_conversations_is_exported(chat_run: Path, tmp_path: Path) -> None:
    base = chat_run.parent / "base"  # whose tokenizer_config.json has another template
    prepare = ("--content", "chat", "--tokenizer", base, "--chat-template", chat_run / "chat_template.jinja")
    for name in ("talks", "held"):
        done("prepare", "--input", chat_run.parent / f"{name}.jsonl", *prepare, "--output", tmp_path / name)
    options = ("--config", chat_run.parent / "recipe.py", "--run.directory", tmp_path / "run", *STILL)
    sets = ("--data.paths", tmp_path / "talks", "--evaluation.paths", tmp_path / "held")
    done("train", *options, *sets, "--training.steps", 1)
    shutil.rmtree(tmp_path / "talks")
    done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TURNS
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False) == IDS
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [0, 1]


SAMPLES = ("def f(x):\n\treturn x", "naïve 🙂 \u200b日本", "", " a", "</s> <|0|> <|bos|><|eos|>", "\x00\x7f\xa0")


@pytest.mark.slow
def test_a_bare_tokenizer_gets_the_settings_of_the_training(tmp_path: Path) -> None:
    tokenizer = texts.write_byte_tokenizer(tmp_path / "mine.json", more=3)
    options = ("--data.tokenizer", tokenizer, "--data.bos", "<|1|>", "--model.vocabulary-size", 260)
    assert train(tmp_path / "run", "--training.steps", 1, *options).returncode == 0
    tokenizer.unlink()
    done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.eos_token_id) == (258, 256)
    data = cli.load_run_config(tmp_path / "run", "").data
    ours = load_tokenizer(data)
    for text in SAMPLES:
        assert found(text)["input_ids"] == [258, *ours.encode([text.encode()])[0].tolist()]
        assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == ours.decode(found(text)["input_ids"])
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 256


@pytest.mark.slow
def test_bytes_are_written_as_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--training.steps", 1).returncode == 0
    done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.eos_token_id, len(found)) == (256, 257, 258)
    for text in SAMPLES:
        assert found(text)["input_ids"] == [256, *text.encode()]
        assert found.decode([*text.encode(), 257], skip_special_tokens=True) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = found("def ", return_tensors="pt")["input_ids"]
    ours = jaxopt_llm.load_pretrained(tmp_path / "run").logits(ids.numpy())
    np.testing.assert_allclose(model(ids).logits.detach().numpy(), ours, atol=1e-4)


@pytest.mark.slow
def test_larger_tables_agree_with_the_tokenizer(tmp_path: Path) -> None:
    base = folders.folder_with_tokenizer(tmp_path / "base", LLAMA)
    (tmp_path / "recipe.py").write_text(RECIPE.format(path=str(base)))
    tokenizer = texts.write_byte_tokenizer(tmp_path / "tokenizer.json", more=43)
    options = (
        "--config",
        tmp_path / "recipe.py",
        "--run.directory",
        tmp_path / "run",
        *some_text(tmp_path / "a.jsonl"),
    )
    options += ("--data.tokenizer", tokenizer, "--model.resize-vocabulary", 300, "--evaluation.batches", 1)
    done("train", *options)
    done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.vocab_size == len(found) == 300 == model.lm_head.weight.shape[0]
    ids = found("<|40|> def", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 297
    ours = jaxopt_llm.load_pretrained(tmp_path / "run").logits(ids.numpy())
    np.testing.assert_allclose(model(ids).logits.detach().numpy(), ours, atol=1e-4)


def test_a_class_that_transformers_forces_is_that_of_the_training(tmp_path: Path) -> None:
    """A tokenizer of one's own in a Qwen2 folder is read as a Qwen2Tokenizer, in the run and in its export."""
    base = folders.folder_with_tokenizer(tmp_path / "base")
    folders.make_run(base, tmp_path / "run")
    said = done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    assert "AutoTokenizer" not in said
    ours = load_tokenizer(cli.load_run_config(tmp_path / "run", "").data)
    assert ours.class_name == "Qwen2Tokenizer"
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(found) == 258 == ours.vocabulary_size  # with <|endoftext|>
    assert all(found(text)["input_ids"] == ours.encode([text.encode()])[0].tolist() for text in SAMPLES)


def test_a_class_that_transformers_forces_on_another_tokenizer_is_named(tmp_path: Path) -> None:
    base = folders.folder_with_tokenizer(tmp_path / "base")
    (base / "config.json").unlink()
    data = DataConfig(tokenizer=str(base))
    (note,) = exported.list_tokenizer_notes(data, "qwen2")
    assert "every qwen2 model as a Qwen2Tokenizer: load it with PreTrainedTokenizerFast" in note
    assert not exported.list_tokenizer_notes(data, "llama") and not exported.list_tokenizer_notes(data, "mistral")
    found = transformers.PreTrainedTokenizerFast.from_pretrained(base)
    ours = load_tokenizer(data)
    assert all(found(text)["input_ids"] == ours.encode([text.encode()])[0].tolist() for text in SAMPLES)


def test_adapters_keep_the_class_that_read_the_tokenizer(tmp_path: Path) -> None:
    """Mistral's folders declare a LlamaTokenizer, which transformers takes unless it knows the model."""
    base = folders.folder_with_tokenizer(tmp_path / "base")
    (base / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}))
    data = DataConfig(tokenizer=str(base))
    (tmp_path / "out").mkdir()
    write_tokenizer(data, load_tokenizer(data), tmp_path / "out")
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.slow
def test_the_difference_of_a_quantised_base_is_that_of_peft(tmp_path: Path) -> None:
    base = folders.folder_with_tokenizer(tmp_path / "base", replace(folders.CONFIG, layers=3))
    (tmp_path / "recipe.py").write_text(RECIPE.format(path=str(base)))
    options = (
        "--config",
        tmp_path / "recipe.py",
        "--run.directory",
        tmp_path / "run",
        *some_text(tmp_path / "a.jsonl"),
    )
    options += ("--lora.rank", 2, "--lora.base", "nf4", "--optimizer.learning-rate", 1e-2, "--evaluation.batches", 1)
    done("train", *options)
    said = done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "adapter")
    printed = done("convert", "merge", "--checkpoint", tmp_path / "run", "--to", tmp_path / "merged")
    assert "rounded to nf4 and dequantised, not into the original weights" in printed

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = tokenizer(base_difference.TEXT, return_tensors="pt")["input_ids"][:, : base_difference.MAX_TOKENS]
    original = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(original, tmp_path / "adapter")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        one, two = (model(ids).logits[0].numpy() for model in (trained, adapted))
    expected = base_difference.compare(one, two, "float32")
    found = base_difference.measure(tmp_path / "run", cli.load_run_config(tmp_path / "run", ""), 2)
    assert found.mean == pytest.approx(expected.mean, rel=1e-3) and found.mean > 1e-3
    assert found.maximum == pytest.approx(expected.maximum, rel=1e-3)
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-3)
    (line,) = said.splitlines()[1:]
    assert f"differ by {found.mean:.3g} on average and {found.maximum:.3g} at most" in line
    assert line in (tmp_path / "adapter" / "README.md").read_text()

    base.rename(tmp_path / "away")
    said = done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "again")
    assert "of the base were not compared with the training's: model.pretrained=" in said
    assert str(tmp_path) not in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.parametrize("sharded", [False, True])
def test_of_two_sets_of_weights_transformers_takes_the_same(sharded: bool, tmp_path: Path) -> None:
    both, other = (folders.folder(tmp_path / name, most=10**9) for name in ("both", "other"))
    stored = {name: each.array + 1 for name, each in safetensors.open_folder(other).items()}
    specs = {name: safetensors.TensorSpec(each.dtype, each.shape) for name, each in stored.items()}
    safetensors.write_folder(both, specs, stored.__getitem__, 20_000)  # shards and their index, next to the one file
    (both / "model.fp16.safetensors").write_bytes(b"a variant")
    (both / "consolidated.safetensors").write_bytes(b"another format")
    (both / "pytorch_model.bin").write_bytes(b"a pickle")
    if sharded:
        (both / "model.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(both)
    ids = np.array([[1, 2, 3]])
    ours = jaxopt_llm.load_pretrained(both).logits(ids)
    np.testing.assert_allclose(model(torch.tensor(ids)).logits.detach().numpy(), ours, rtol=1e-4, atol=1e-4)
    if not sharded:
        np.testing.assert_array_equal(ours, jaxopt_llm.load_pretrained(other).logits(ids))
        next(both.glob("model-00002-of-*")).unlink()  # the index is stale, and the file is whole
        jaxopt_llm.load_pretrained(both)
