"""From data as it is published to a model that transformers serves, typing what docs/guides/finetune.md says.

The folders have the shapes and the kinds of files of Qwen 3 and Llama 3.2, the recipe is finetune.py, and there are two
devices.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import metrics, start
from templates import LLAMA_3_2, QWEN_3
from texts import train_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SIZES = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "initializer_range": 0.2,  # a random model of this spread learns an answer in a few steps
}
CALL = {"name": "get_weather", "arguments": json.dumps({"city": "Oslo", "days": 3})}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
# A row of OpenAI's files: arguments as JSON text, and a weight that leaves an answer out.
TOOL_ROW = {
    "messages": [
        {"role": "system", "content": "Report the weather."},
        {"role": "user", "content": "How is Oslo?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 4}'},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "No idea!", "weight": 0},
    ],
    "tools": [TOOL],
    "parallel_tool_calls": False,
}
ALPACA_ROW = {
    "instruction": "Name the function.",
    "input": "len",
    "output": "Cold.",
    "history": [["Hello", "Hello, which one?"]],
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<|header|>", "<|/header|>", "<|eot|>")
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "classes": ("Qwen3Config", "Qwen3ForCausalLM"),
        "settings": {"eos_token": "<|im_end|>", "bos_token": None, "tokenizer_class": "Qwen2Tokenizer"},
        "template": QWEN_3,
        "row": TOOL_ROW,
        "options": (),
        "prompt": {"messages": TOOL_ROW["messages"][:4], "tools": [TOOL]},
        "answer": "<think>\n\n</think>\n\nCold.<|im_end|>",
    },
    "llama3.2": {
        "classes": ("LlamaConfig", "LlamaForCausalLM"),
        "settings": {"eos_token": "<|eot|>", "bos_token": "<s>"},
        "template": LLAMA_3_2,
        "row": ALPACA_ROW,
        "options": ("--data.date", "2026-01-31"),
        "prompt": {
            "messages": [
                *({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello, which one?"}),
                {"role": "user", "content": "Name the function.\n\nlen"},
            ],
            "date_string": "31 Jan 2026",
        },
        "answer": "Cold.<|eot|>",
    },
}


def write_model(path: Path, case: dict[str, Any]) -> Path:
    """Write a model whose generation_config.json does not know how a turn ends, as that of many base models."""
    config_class, model_class = (getattr(transformers, name) for name in case["classes"])
    torch.manual_seed(0)
    model_class(config_class(**SIZES, bos_token_id=None, eos_token_id=None)).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    words = [json.dumps(row) for row in (TOOL_ROW, ALPACA_ROW)]
    train_tokenizer(path / "tokenizer.json", words, 400, SPECIAL)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | case["settings"] | {"chat_template": case["template"]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def run(module: str, *arguments: object, folder: Path) -> str:
    process = start(module, *arguments, folder=folder, JAX_NUM_CPU_DEVICES="2")
    printed, complaint = process.communicate(timeout=600)
    assert process.returncode == 0, complaint
    return printed


@pytest.mark.parametrize("name", CASES)
def test_transformers_answers_as_trained_and_stops_at_the_end_of_its_turn(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write_model(tmp_path / "models/base", case)
    (tmp_path / "rows.jsonl").write_text((json.dumps(case["row"]) + "\n") * 64)
    (tmp_path / "held.jsonl").write_text(json.dumps(case["row"]) + "\n")
    data = ("--data.paths", "rows.jsonl", "--evaluation.paths", "held.jsonl", *case["options"])
    shape = ("--training.sequence-length", 512, "--training.batch-size", 4, "--training.accumulation", 2)
    rates = ("--optimizer.learning-rate", 3e-2, "--training.epochs", 6, "--precision.compute-dtype", "float32")
    options = ("--model.pretrained", "models/base", *data, *shape, *rates, "--run.directory", "runs/one")
    printed = run("train", "--config", "finetune.py", *options, folder=tmp_path)
    assert printed.startswith("2 devices: mesh.data 2")
    assert metrics(tmp_path / "runs/one")[-1]["eval_loss"] < 0.05, printed

    run("convert", "merge", "--checkpoint", "runs/one", "--to", "merged", "--dtype", "float32", folder=tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    prompt = dict(case["prompt"])
    conversation = [_with_objects(message) for message in prompt.pop("messages")]
    ids = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True, **prompt
    )
    written = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == case["answer"]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, as the users of transformers write them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})
