"""What `transformers` generates from a folder, token by token, and what is generated from the same folder here."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from test_families_hf_torch import CASES, CONFIGS, WINDOW

import jaxopt_llm
from jaxopt_llm.execution.decode import TokenGenerator
from jaxopt_llm.model import cache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COUNT, LENGTHS = 64, (11, 6)  # of the second row the cache begins with padding
LONGEST = max(LENGTHS)
assert min(LENGTHS) > WINDOW
# Each family, with what a cache can get wrong: windows, soft caps, scaled and learned positions, tied heads.
FORMS = (
    "llama 3.1",
    "llama 3.2",
    "mistral 0.1",
    "qwen 2 tied, windows",
    "qwen 3 tied, windows",
    "gemma 2",
    "phi 3",
    "olmo 2 grouped",
    "smollm 3",
    "mixtral tied, windows",
    "qwen 3 moe tied, windows",
    "olmoe",
    "deepseek 2",
    "deepseek 2 lite",
    "deepseek 3",
    "deepseek 3 unscaled",
    "ministral",
    "ministral 3",
    "gemma 3",
    "gemma 4",
    "gemma 4, experts",
    "gemma 4, shared keys",
    "olmo 3",
    "glm 4",
    "granite",
    "seed oss",
    "ernie 4.5",
    "glm 4.5",
    "glm 4.7 flash",
    "ernie 4.5 moe",
    "granite moe",
    "granite moe shared",
    "granite 4 without positions",
    "hunyuan moe",
    "qwen 2 moe tied, windows",
    "llama 4 without temperature",
    "dots 1",
    "minimax m2",
    "afmoe",
    "arcee",
    "apertus",
    "hunyuan",
    "exaone 4",
    "cohere",
    "cohere 2",
    "gpt oss",
    "qwen 3 next",
    "qwen 3.5",
    "qwen 3.5 moe",
    "gpt 2",
    "gemma",
    "vault gemma",
    "glm",
    "helium",
    "starcoder 2",
    "stablelm",
    "cwm",
    "youtu",
    "solar open",
    "k exaone",
    "hy 3",
)
# Frequencies that depend on the length, which transformers takes from the longest row: one prompt.
BY_LENGTH = ("phi 3, longrope", "phi 3, su", "llama, dynamic")
# Queries that grow with the row, padding included, in transformers, and with the position of the token here.
BY_ROW = ("llama 4 scout", "llama 4 maverick")
GAP, DISTINCT = 2e-4, 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them wait for each other longer than such models take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_family_is_here() -> None:
    assert {CASES[name][0] for name in FORMS} == {prefix for prefix, _ in CASES.values()}


def prompts(lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, 250, length).astype(np.int32) for length in lengths]


def well_conditioned(name: str, lengths: Sequence[int] = LENGTHS) -> tuple[Any, np.ndarray]:
    """A model of theirs and the tokens that it continues the prompts with, [B, COUNT].

    Of those at random the first one whose two likeliest tokens are never so near that another order of the same sums
    could exchange them, and that does not go in a circle at once, which would be right whatever it sees of the past.
    """
    prefix, settings = CASES[name]
    if len(lengths) > 1:
        settings = settings | {"n_positions" if prefix == "GPT2" else "max_position_embeddings": LONGEST + COUNT}
    config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**settings)
    model = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))(config).eval()
    padded = np.stack([np.pad(prompt, (LONGEST - prompt.size, 0)) for prompt in prompts(lengths)])
    mask = np.stack([np.arange(LONGEST) >= LONGEST - length for length in lengths])
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 1:  # around 1 and 0
                    parameter.copy_(torch.empty_like(parameter).uniform_(-0.5, 0.5) + key.endswith("weight"))
                else:  # small tables and large blocks: what comes next depends on more than the last token
                    gain = 0.3 if "embed_tokens" in key or "wte" in key else 2
                    parameter.normal_(0, gain / math.sqrt(config.hidden_size))
        theirs = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask.astype(np.int64)),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = theirs.sequences[:, LONGEST:].numpy()
        two = torch.stack(theirs.logits).topk(2).values
        if (two[..., 0] - two[..., 1]).min() > GAP and min(len(np.unique(row)) for row in tokens) >= DISTINCT:
            return model, tokens
    pytest.fail("none is: change the sizes of what is drawn")


@pytest.mark.parametrize(
    ("name", "lengths"),
    [*((name, LENGTHS) for name in FORMS), *((name, LENGTHS[:1]) for name in (*BY_LENGTH, *BY_ROW))],
    ids=[*FORMS, *BY_LENGTH, *BY_ROW],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, lengths: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "REWIND", 2)  # so that the rings of windows come round
    model, expected = well_conditioned(name, lengths)
    model.save_pretrained(tmp_path)
    here = jaxopt_llm.load_pretrained(tmp_path)
    decoder = TokenGenerator(
        here.model,
        toy.by_layer(here.params),
        here.placement,
        here.config.vocabulary_size,
        rows=len(lengths),
        length=LONGEST + COUNT,
    )
    np.testing.assert_array_equal(toy.continue_prompts(decoder, prompts(lengths), COUNT), expected)
