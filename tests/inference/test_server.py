"""The server, asked by the client package of OpenAI over a socket, next to `generate` and the logits of the model."""

import itertools
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import folders
import jax
import numpy as np
import pytest
import toy
from chats import write_tokenizer
from servers import running

from jaxopt_llm import load_pretrained, serve
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.decode import TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.generate import generate
from jaxopt_llm.inference import models
from jaxopt_llm.inference.chat import open_template
from jaxopt_llm.inference.models import LoadedModel

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
server = pytest.importorskip("jaxopt_llm.inference.server")

pytestmark = pytest.mark.core

CONFIG = replace(folders.CONFIG, vocabulary_size=512, layers=2)
CONTEXT = 512
PROMPT = "def get"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "base"
    path.mkdir()
    arrays = folders.params(CONFIG)
    table = arrays["non_layer"]["embedding"]["table"]
    # Rows as different as those of a trained model: texts are then not one token again and again.
    table[: CONFIG.vocabulary_size] = np.random.default_rng(0).normal(size=(CONFIG.vocabulary_size, CONFIG.width))
    write_model_folder(path, jax.device_put(arrays, toy.placement().replicated), CONFIG)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, LoadedModel]:
    params = adapters.add_adapters(CONFIG, "attention/query mlp/down head/table")
    adapters.write_adapters(folder.parent / "adapter", params, CONFIG)
    source = models.load_model(folder)
    return {"base": source, "mine": models.adapt_loaded(source, folder, folder.parent / "adapter")}


@pytest.fixture(scope="module")
def address(loaded: dict[str, LoadedModel]) -> Iterator[tuple[str, Any]]:
    with running(loaded) as found:
        yield found


def connect(address: str, token: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(address: tuple[str, Any]) -> Any:
    return connect(address[0])


@pytest.fixture(scope="module")
def complete(client: Any) -> Callable[..., Any]:
    """Return a function that returns the first choice of a completion, greedy unless told otherwise."""

    def complete(prompt: Any = PROMPT, **options: Any) -> Any:
        given = {"model": "base", "temperature": 0, "max_tokens": 24} | options
        return client.completions.create(prompt=prompt, **given).choices[0]

    return complete


def test_completions_are_those_of_generate_whole_and_in_parts(
    client: Any, complete: Callable[..., Any], loaded: dict[str, LoadedModel]
) -> None:
    (expected,) = generate(loaded["base"], [PROMPT], 24, Sampling(), ())
    assert len(set(expected)) > 5 and not expected.isascii()
    options = {"model": "base", "temperature": 0, "max_tokens": 24}
    tokenizer = loaded["base"].tokenizer
    ids = [*tokenizer.prefix, *tokenizer.encode([PROMPT.encode()])[0].tolist()]
    answer = client.completions.create(prompt=[PROMPT, ids], **options)
    assert [(each.text, each.finish_reason) for each in answer.choices] == [(expected, "length")] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 * len(ids), 48)
    stream = client.completions.create(
        prompt=PROMPT, stream=True, n=2, stream_options={"include_usage": True}, **options
    )
    parts = list(stream)
    for index in range(2):
        texts = [part.choices[0].text for part in parts[:-1] if part.choices[0].index == index]
        assert "".join(texts) == expected and len(texts) > 5
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 48


def test_an_adapter_is_selected_by_name_and_shares_the_arrays_of_the_model(
    complete: Callable[..., Any], client: Any, loaded: dict[str, LoadedModel], folder: Path
) -> None:
    alone = models.load_model(folder, adapter=folder.parent / "adapter")
    (expected,) = generate(alone, [PROMPT], 24, Sampling(), ())
    assert complete(model="mine").text == expected != complete().text
    assert [each.id for each in client.models.list()] == ["base", "mine"]
    assert client.models.retrieve("mine").parent == "base"
    arrays = {id(each) for each in jax.tree.leaves(loaded["mine"].params)}
    assert arrays >= {id(each) for each in jax.tree.leaves(loaded["base"].params)}


def test_log_probabilities_are_those_of_the_model(complete: Callable[..., Any], folder: Path) -> None:
    choice = complete(logprobs=3, echo=True, max_tokens=8, extra_body={"return_token_ids": True})
    ids = np.array([*choice.prompt_token_ids, *choice.token_ids])
    logits = np.asarray(load_pretrained(folder).logits(ids[None]), np.float64)[0]
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = choice.logprobs
    assert len(ids) == len(choice.prompt_token_ids) + 8 == len(found.tokens)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    np.testing.assert_allclose(found.token_logprobs[1:], expected[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    for place, listed in enumerate(found.top_logprobs[1:]):
        best = np.sort(expected[place])[::-1][:3]
        np.testing.assert_allclose(sorted(listed.values(), reverse=True)[:3], best, atol=1e-4)
        own = found.token_logprobs[place + 1]
        assert own in listed.values() and len(listed) == 3 + (own < min(best) - 1e-4)
    assert choice.text.startswith(PROMPT)
    pairs = [*zip(found.tokens, found.text_offset, strict=True)]
    for (before, _), (name, offset) in itertools.pairwise(pairs):
        if not (before + name).count("token_id:"):  # parts of characters
            assert choice.text[offset:].startswith(name)
    # Only the prompt, without a text; and by ids.
    only = complete(ids[:5].tolist(), logprobs=1, echo=True, max_tokens=0)
    assert only.logprobs.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:5], abs=1e-5)
    assert complete(logprobs=0).logprobs.top_logprobs is None
    # Of a token that is no likely one, at any temperature.
    token = int(np.argmin(expected[4]))
    for temperature in (0, 1):
        body = {"allowed_token_ids": [token], "return_token_ids": True}
        choice = complete(ids[:5].tolist(), logprobs=0, max_tokens=1, temperature=temperature, extra_body=body)
        assert choice.token_ids == [token]
        assert choice.logprobs.token_logprobs == pytest.approx([expected[4, token]], abs=1e-4)


def test_requests_that_run_together_get_what_each_gets_alone(complete: Callable[..., Any]) -> None:
    """Eight of them for four rows, greedy and sampled."""
    asked = [{"prompt": f"def f{i}", "seed": i, "temperature": i % 2, "max_tokens": 4 + 5 * i} for i in range(8)]
    alone = [complete(**each).text for each in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: complete(**each).text, asked)) == alone
    assert len(set(alone)) == 8


def test_a_seed_repeats_and_choices_differ(client: Any, complete: Callable[..., Any]) -> None:
    def sample(**options: Any) -> list[str]:
        answer = client.completions.create(model="base", prompt=PROMPT, max_tokens=12, n=3, **options)
        return [choice.text for choice in answer.choices]

    first = sample(seed=5)
    assert sample(seed=5) == first and len({*first, *sample(seed=6), *sample()}) == 9
    greedy = complete(max_tokens=12).text
    for name, value in (("top_k", 1), ("min_p", 0.999)):
        assert sample(extra_body={name: value}) == [greedy] * 3
    assert sample(top_p=1e-6) == [greedy] * 3
    assert complete(extra_body={"repetition_penalty": 5.0}).text != complete().text


def test_a_text_that_ends_is_no_part_of_the_answer(client: Any, complete: Callable[..., Any]) -> None:
    whole = complete().text
    stop = whole[8:10]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never", stop]):
        choice = complete(stop=stops)
        assert (choice.text, choice.finish_reason) == (expected, "stop")
    stream = client.completions.create(
        model="base", prompt=PROMPT, temperature=0, max_tokens=24, stop=stop, stream=True
    )
    parts = [part.choices[0] for part in stream]
    assert "".join(part.text for part in parts) == expected and parts[-1].finish_reason == "stop"


def test_a_chat_is_written_with_the_template_of_the_model(client: Any, loaded: dict[str, LoadedModel]) -> None:
    options = {"model": "base", "temperature": 0, "max_completion_tokens": 12, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(messages=MESSAGES, **options)
    prompt = open_template(loaded["base"]).render_prompt(MESSAGES)
    ids = loaded["base"].tokenizer.encode([prompt.encode()])[0].tolist()
    plain = client.completions.create(model="base", prompt=ids, temperature=0, max_tokens=12, logprobs=2).choices[0]
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", plain.text)
    assert answer.usage.prompt_tokens == len(ids)
    content = choice.logprobs.content
    assert [each.token for each in content] == plain.logprobs.tokens
    # The second request continues the keys of the first, so that other numbers of tokens are computed together.
    assert [each.logprob for each in content] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-5)
    for each, listed in zip(content, plain.logprobs.top_logprobs, strict=True):
        found = {other.token: other.logprob for other in each.top_logprobs}
        assert found == pytest.approx({token: listed[token] for token in found}, abs=1e-5)
        assert each.bytes is None or bytes(each.bytes).decode() == each.token
    parts = [{"type": "text", "text": "What is 1 + 1?"}]
    stream = client.chat.completions.create(
        messages=[MESSAGES[0], {"role": "user", "content": parts}], stream=True, **options
    )
    deltas = [part.choices[0] for part in stream]
    assert "".join(each.delta.content for each in deltas) == plain.text and deltas[0].delta.role == "assistant"
    assert [
        each.token for delta in deltas if delta.logprobs for each in delta.logprobs.content
    ] == plain.logprobs.tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"prompt": "x", "model": "other"}, 404, "there is no other; choose one of base, mine"),
        ("completions", {}, 400, "prompt: is missing"),
        ("completions", {"prompt": []}, 400, "prompt: must be a text, a list of token ids"),
        ("completions", {"prompt": [512]}, 400, "512 is no token id; ids are at least 0 and below 512"),
        ("completions", {"prompt": "\ud800"}, 400, "surrogates not allowed"),
        ("completions", {"prompt": "x", "allowed_token_ids": [512]}, 400, "must be a list of one token id below 512"),
        ("completions", {"prompt": "x", "max_tokens": CONTEXT}, 400, "together more than the context of 512"),
        ("completions", {"prompt": ["x"] * 1024, "n": 2}, 400, "n: 1024 prompts with 2 choices each are too many"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens: must be at least 1 without echo"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature: must be at least 0"),
        ("completions", {"prompt": "x", "temperature": True}, 400, "temperature: must be a number"),
        ("completions", {"prompt": "x", "temperature": 10**400}, 400, "temperature: must be a number"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p: must be above 0 and at most 1"),
        ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs: must be a whole number from 0 to 20"),
        ("completions", {"prompt": "x", "stop": ["", "a"]}, 400, "stop: must be a text that is not empty"),
        ("completions", {"prompt": "x", "best_of": 2}, 400, "best_of: is not supported; leave it out, or give 1"),
        ("completions", {"prompt": "x", "temprature": 0}, 400, "temprature: is not supported; leave it out"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "each needs a role and, as content, a text"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs: needs logprobs"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}]}, 400, "tools: is not supported"),
        ("embeddings", {}, 404, "POST /v1/embeddings: Not Found"),
        ("models", {}, 405, "Method Not Allowed"),
    ],
)
def test_bad_requests(path: str, body: dict[str, Any], status: int, said: str, address: tuple[str, Any]) -> None:
    found, answer = post(f"{address[0]}/v1/{path}", json.dumps(body).encode())
    assert found == status and said in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def post(url: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON of the answer."""
    named = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, named), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_page_in_a_browser_cannot_use_the_server(address: tuple[str, Any]) -> None:
    url, body = f"{address[0]}/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert post(url, body)[0] == 200
    assert post(url, b"{")[0] == 400
    assert post(url, body, Content_Type="text/plain")[0] == 415
    assert post(url, body, Host="attacker.example")[0] == 403


def test_a_token_is_asked_for(loaded: dict[str, LoadedModel]) -> None:
    with running(loaded, token=b"secret") as (address, _):
        assert [each.id for each in connect(address, "secret").models.list()] == ["base", "mine"]
        for wrong in ("none", "secret2", "s\u00e9cret", ""):
            assert post(f"{address}/v1/completions", b"{}", Authorization=f"Bearer {wrong}".rstrip())[0] == 401
        with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
            connect(address).models.list()
        assert urllib.request.urlopen(f"{address}/health").status == 200


@pytest.fixture(scope="module")
def loading(loaded: dict[str, LoadedModel], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the address of a server whose clients may load adapters, and the server."""
    root = folder.parent / "allowed"
    allowed = server.Folders(root, lambda base, path: models.adapt_loaded(base, folder, path), models.reload_loaded)
    for name, targets in (("mine", "attention/query mlp/down head/table"), ("other", "mlp/up")):
        params = adapters.add_adapters(CONFIG, targets)
        adapters.write_adapters(root / name, params, CONFIG)
    (root / "link").symlink_to(folder.parent / "adapter")
    params = jax.tree.map(lambda x: x * 1.1, folders.params(CONFIG))
    write_model_folder(root / "weights", jax.device_put(params, toy.placement().replicated), CONFIG)
    folders.folder(root / "wider", replace(CONFIG, width=64))
    with running({"base": loaded["base"]}, folders=allowed) as found:
        yield found


def load_adapter(address: str, name: str, path: Path) -> int:
    return ask(f"{address}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})[0]


def ask(url: str, body: Any) -> tuple[int, str]:
    """Return the status and the text of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_clients_load_and_unload_adapters(
    loading: tuple[str, Any], loaded: dict[str, LoadedModel], folder: Path
) -> None:
    """Adapters for the same matrices take over the programs of those that were unloaded."""
    address, served = loading
    client, worker = connect(address), served._worker
    (expected,) = generate(loaded["mine"], [PROMPT], 12, Sampling(), ())

    def complete(model: str) -> Any:
        return client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12).choices[0].text

    engines = []
    for name in ("first", "second"):
        assert load_adapter(address, name, folder.parent / "allowed" / "mine") == 200
        assert [each.id for each in client.models.list()] == ["base", name]
        assert complete(name) == expected != complete("base")
        engines.append(worker._engines[name])
        assert ask(f"{address}/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
        with pytest.raises(openai.NotFoundError, match=f"there is no {name}; choose one of base"):
            complete(name)
    assert engines[0] is engines[1] and engines[0].generator._caches is None  # free memory
    assert load_adapter(address, "third", folder.parent / "allowed" / "other") == 200
    assert complete("third") != expected and worker._engines["third"] is not engines[0]
    assert ask(f"{address}/v1/unload_lora_adapter", {"lora_name": "third"})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "base"}, 403, "base is not in"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "allowed/../adapter"}, 403, "reads folders only there"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "allowed/link"}, 403, "reads folders only there"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "allowed/none"}, 400, "allowed/none"),
        ("load_lora_adapter", {"lora_name": "base", "lora_path": "allowed/mine"}, 400, "there is a model base already"),
        ("load_lora_adapter", {"lora_path": "allowed/mine"}, 400, "lora_name: is missing"),
        (
            "load_lora_adapter",
            {"lora_name": "x", "lora_path": "allowed/mine", "load_inplace": True},
            400,
            "load_inplace",
        ),
        ("unload_lora_adapter", {"lora_name": "base"}, 400, "base is the model itself"),
        ("unload_lora_adapter", {"lora_name": "x"}, 404, "there is no x"),
    ],
)
def test_adapters_that_cannot_be_loaded(
    path: str, body: dict[str, Any], status: int, said: str, loading: tuple[str, Any], folder: Path
) -> None:
    given = body | ({"lora_path": str(folder.parent / body["lora_path"])} if "lora_path" in body else {})
    found, text = ask(f"{loading[0]}/v1/{path}", given)
    assert found == status and said in text, text
    assert [*loading[1]._worker.models] == ["base"]


def reload(address: str, **body: Any) -> tuple[int, str]:
    return ask(f"{address}/collective_rpc", body)


def test_clients_replace_the_weights(loading: tuple[str, Any], loaded: dict[str, LoadedModel], folder: Path) -> None:
    """Adapters are then over the new weights."""
    address, served = loading
    client, root = connect(address), folder.parent / "allowed"
    new = models.reload_loaded(loaded["base"], root / "weights")
    adapted = models.adapt_loaded(new, folder, root / "mine")
    assert reload(address, method="reload_weights", kwargs={"weights_path": str(root / "weights")})[0] == 200
    assert json.loads(ask(f"{address}/reset_prefix_cache", {})[1]) == {"success": True}
    assert load_adapter(address, "over", root / "mine") == 200
    for source, name in ((new, "base"), (adapted, "over")):
        (expected,) = generate(source, [PROMPT], 12, Sampling(), ())
        answer = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=12)
        assert answer.choices[0].text == expected
    status, text = reload(address, method="reload_weights", kwargs={"weights_path": str(root / "weights")})
    assert (status, "adapters of base share its weights" in text) == (409, True)
    assert ask(f"{address}/v1/unload_lora_adapter", {"lora_name": "over"})[0] == 200
    served._worker.reload_model("base", lambda: loaded["base"]).result()


@pytest.mark.parametrize(
    ("path", "method", "status", "said"),
    [
        ("base", "reload_weights", 403, "base is not in"),
        ("allowed/../base", "reload_weights", 403, "reads folders only there"),
        ("allowed/none", "reload_weights", 400, "allowed/none"),
        ("allowed/wider", "reload_weights", 400, "it holds another model than the one that is served"),
        ("allowed/\0", "reload_weights", 400, "weights_path: "),
        ("allowed/weights", "save_weights", 400, "the only call is reload_weights"),
    ],
)
def test_weights_that_cannot_be_loaded(
    path: str, method: str, status: int, said: str, loading: tuple[str, Any], folder: Path
) -> None:
    before = loading[1]._worker.models["base"]
    found, text = reload(loading[0], method=method, kwargs={"weights_path": str(folder.parent / path)})
    assert found == status and said in text, text
    assert loading[1]._worker.models["base"] is before


def test_adapters_with_requests_stay(loading: tuple[str, Any], folder: Path) -> None:
    address, served = loading
    assert load_adapter(address, "busy", folder.parent / "allowed" / "mine") == 200
    with ThreadPoolExecutor(1) as pool:
        options = {"model": "busy", "prompt": "x", "temperature": 0, "max_tokens": CONTEXT - 8}
        answer = pool.submit(lambda: connect(address).completions.create(**options).choices[0])
        wait_until(lambda: bool(served._worker._running))
        status, text = ask(f"{address}/v1/unload_lora_adapter", {"lora_name": "busy"})
        assert (status, "requests for busy are running" in text) == (409, True)
        assert answer.result().finish_reason == "length"
    assert ask(f"{address}/v1/unload_lora_adapter", {"lora_name": "busy"})[0] == 200


def test_clients_load_nothing_unless_the_server_is_started_for_it(address: tuple[str, Any], folder: Path) -> None:
    status, text = ask(f"{address[0]}/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(folder)})
    assert status == 403 and "start it with --load-from FOLDER" in text
    assert ask(f"{address[0]}/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 403
    assert reload(address[0], method="reload_weights", kwargs={"weights_path": str(folder)})[0] == 403
    assert ask(f"{address[0]}/reset_prefix_cache", {})[0] == 403


def test_the_ids_that_end_an_answer_may_be_given(
    complete: Callable[..., Any], address: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(**options: Any) -> Any:
        return complete(extra_body={"return_token_ids": True, **options}).token_ids

    ids = draw()
    first, second = [place for place, each in enumerate(ids) if place and each not in ids[:place]][:2]
    assert draw(stop_token_ids=[ids[first]]) == ids[: first + 1]
    api = address[1].config.app.routes[0].endpoint.__self__
    monkeypatch.setitem(vars(api), "_ends", frozenset({ids[first]}))
    assert draw() == draw(stop_token_ids=[ids[second]]) == ids[: first + 1]
    assert draw(ignore_eos=True) == ids
    assert draw(ignore_eos=True, stop_token_ids=[ids[second]]) == ids[: second + 1]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_row(streams: bool, address: tuple[str, Any]) -> None:
    url, worker = address[0], address[1]._worker
    body = json.dumps({"prompt": "x", "max_tokens": CONTEXT - 8, "n": 6, "stream": streams, "temperature": 0}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: bool(worker._running))
        (query,) = {id(query): query for _, query in [*worker._running.values()]}.values()
        wait_until(lambda: any(choice.drawn for choice in query.choices))
    wait_until(lambda: not worker._running and not worker._engines["base"].is_busy)
    assert all(choice.drawn < choice.request.count for choice in query.choices)


def test_a_failure_of_the_worker_is_said_and_ends_the_server(
    loaded: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TokenGenerator) -> None:
        raise ZeroDivisionError("of a device")

    monkeypatch.setattr(TokenGenerator, "advance", fail)
    said = pytest.raises(openai.InternalServerError, match="the server has failed, and ends")
    with pytest.raises(ZeroDivisionError, match="of a device"), running(loaded) as (address, _), said:
        connect(address).completions.create(model="base", prompt="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0: other hosts can reach the server, so it needs a token"),
        ("--host 192.0.2.1", "--host 192.0.2.1: other hosts can reach the server, so it needs a token"),
        ("--host 127.0.0.1 --port 70000", "--host 127.0.0.1 --port 70000: cannot listen there"),
        ("--port 0 --adapter mine", "must be a name and a folder, such as mine=adapters/mine"),
        ("--port 0 --adapter a=x --adapter a=y", "--adapter a=...: two models have this name"),
        ("--port 0 --adapter a=x --quantise int8", "--quantise int8 does not support --adapter"),
        ("--port 0 --load-from x --quantise int8", "--quantise int8 does not support adapters"),
        ("--port 0 --context 1", "--context 1: must lie between 2 and"),
    ],
)
def test_bad_flags(arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "--checkpoint", str(tmp_path), *arguments.split()])
    with pytest.raises(InputError, match=message):
        serve.main()


def test_the_command(
    folder: Path, loaded: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    class Started(server.Server):  # type: ignore[misc]
        def serve_on(self, listener: socket.socket) -> None:
            started.append((self, listener.getsockname()[1]))
            super().serve_on(listener)

    monkeypatch.setattr(server, "Server", Started)
    adapter = f"mine={folder.parent / 'adapter'}"
    monkeypatch.setattr(sys, "argv", ["serve", "--checkpoint", str(folder), "--adapter", adapter, "--port", "0"])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(serve.main()))
    thread.start()
    while not started:
        assert thread.is_alive()
        time.sleep(0.01)
    served, port = started[0]
    try:
        client = connect(f"http://127.0.0.1:{port}")
        assert [each.id for each in client.models.list()] == [str(folder), "mine"]
    finally:
        served.should_exit = True
        thread.join()
    assert codes == [0]
    assert f"serving {folder}, mine at http://127.0.0.1:{port}/v1 (Ctrl-C ends it)" in capfd.readouterr().err
