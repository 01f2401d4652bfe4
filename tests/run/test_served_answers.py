"""Answers that a server draws: those of the run's own sampler, and servers whose weights are not the run's."""

import functools
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import pytest
from commands import checkpoint, metrics
from drawing import make_config, records, run
from servers import running

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.native.identity import new_identity, write_identity
from jaxopt_llm.config import Config, DataConfig, ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError, ServerFailed
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.execution.decode import Request
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.answer_server import AnswerServer, Draw
from jaxopt_llm.run.directory import write_run_files
from jaxopt_llm.run.samples import make_generator
from jaxopt_llm.run.served_answers import ServedSampler, choose_bound, find_older
from jaxopt_llm.run.setup import Setup, prepare_run
from jaxopt_llm.step.local_steps import initialize_groups
from jaxopt_llm.step.state import TrainState

server = pytest.importorskip("jaxopt_llm.inference.server")

CONFIG = replace(folders.CONFIG, vocabulary_size=258, layers=2)
ENDS = frozenset({256})


@dataclass
class Served:
    """A server of a base. misread: what it does when it is told to load a folder, in place of loading it."""

    folder: Path
    base: LoadedModel
    address: str = ""
    server: Any = None
    misread: Callable[[Path], LoadedModel] | None = None

    def read(self, path: Path) -> LoadedModel:
        return models.adapt_loaded(self.base, self.folder, path)

    def load(self, source: LoadedModel, path: Path) -> LoadedModel:
        return (self.misread or self.read)(path)

    def reload(self, source: LoadedModel, path: Path) -> LoadedModel:
        return (self.misread or functools.partial(models.reload_loaded, source))(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    folder = folders.folder_with_tokenizer(root / "base", CONFIG)
    found = Served(folder, models.load_model(folder))
    adapters = server.Folders(root.parent, found.load, found.reload)
    with running({"base": found.base}, folders=adapters) as (address, found.server):
        found.address = f"{address}/v1"
        yield found


def make_served_config(folder: Path, served: Served, **settings: Any) -> Config:
    config = make_config(folder, **{"lora.rank": 4} | settings)
    data, rollouts = (
        replace(config.data, tokenizer=DataConfig().tokenizer),
        replace(config.rollouts, server=served.address),
    )
    config = replace(config, data=data, model=ModelConfig(pretrained=str(served.folder)), rollouts=rollouts)
    assert not config.problems()
    return pretrained.resolve_pretrained(config)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, served: Served) -> tuple[Setup, TrainState]:
    return prepare(make_served_config(tmp_path_factory.mktemp("run"), served))


def prepare(config: Config) -> tuple[Setup, TrainState]:
    """Return the setup of a run, and its state before the first step."""
    setup = prepare_run(config, SINGLE_PROCESS)
    setup.directory.mkdir()
    write_identity(setup.directory, new_identity(config, SINGLE_PROCESS))
    initial = initial_weights.open_initial_weights(config, setup.program, 0, print, SINGLE_PROCESS)
    assert initial.weights is not None
    facts = (config, setup.data.corpus, setup.data.tokenizer, "cpu", setup.functions)
    write_run_files(*facts, initial.base_sha256)
    specs, placement = setup.program.specs, setup.placement
    given = initial_weights.read_parameters(initial.weights, specs, placement)
    return setup, initialize_groups(specs, setup.program.optimizers, 0, placement, given)


@pytest.fixture(scope="module")
def compiled(setup: tuple[Setup, TrainState]) -> ServedSampler:
    return ServedSampler(setup[0], ENDS)


@pytest.fixture
def sampler(compiled: ServedSampler, served: Served) -> Iterator[ServedSampler]:
    yield compiled
    served.misread = None
    compiled.close()


def change(state: TrainState, size: float, seed: int = 0) -> TrainState:
    """Return a state whose adapters differ by normal numbers of this size."""
    random = np.random.default_rng(seed)

    def add(path: str, leaf: jax.Array) -> jax.Array:
        return leaf + random.normal(size=leaf.shape).astype(np.float32) * size

    return replace(state, masters=tree.map_with_path(add, state.masters))


def prompts(setup: Setup) -> list[np.ndarray]:
    assert setup.prompts is not None
    return [prompt.ids for prompt in setup.prompts.training[:2]]


def draw_itself(setup: Setup, sampler: ServedSampler, state: TrainState) -> list[Any]:
    """Return three answers to each prompt by a sampler of the run, with the random numbers of the server."""
    asked = [(ids, sampler._make_draw(ids, 3, (0, 0, 0, place)).seed) for place, ids in enumerate(prompts(setup))]
    requests = [
        Request(ids, 6, Sampling(temperature=1.0, seed=seed), number) for ids, seed in asked for number in range(3)
    ]
    answers: dict[Request, Any] = {request: [] for request in requests}
    generator = make_generator(setup, sampler._read_weights(state), sampler._placement, 4, 64)
    for token in generator.run(requests, lambda request: answers[request][-1][0] in ENDS):
        answers[token.request].append((token.token, token.log_probability))
    return [*answers.values()]


def test_answers_are_those_of_the_weights_that_were_handed_over(
    setup: tuple[Setup, TrainState], sampler: ServedSampler, served: Served
) -> None:
    """Token by token those of a sampler of the run with the same random numbers, before and after an update."""
    whole, state = setup
    drawn: list[Any] = []
    for each in (state, change(state, 0.1), change(state, 0.1)):
        drawn.append(sampler.draw(each, prompts(whole), 3, (0, 0)))
        names = [name for name in served.server._worker.models if name != "base"]
        assert [path.name for path in (whole.directory / "adapters").iterdir()] == names == [sampler._name]
        assert sampler.difference is not None and sampler.difference < 1e-4
        for theirs, own in zip(drawn[-1], draw_itself(whole, sampler, each), strict=True):
            assert [token for token, _ in theirs] == [token for token, _ in own]
            np.testing.assert_allclose([value for _, value in theirs], [value for _, value in own], atol=1e-4)
    tokens = [[[token for token, _ in answer] for answer in answers] for answers in drawn]
    assert tokens[0] != tokens[1] == tokens[2] and served.server._worker._free is None  # its programs are used again
    sampler._loaded = ""  # as at a start after a killed one, whose adapters the server still has
    sampler.draw(state, prompts(whole), 1, (0, 0))
    assert [*served.server._worker.models] == ["base", sampler._name]
    sampler.close()
    assert [*served.server._worker.models] == ["base"] and not (whole.directory / "adapters").exists()


def test_all_weights_are_handed_over(tmp_path: Path, served: Served) -> None:
    """Of a run without adapters. A folder that the server has read is removed, and older weights are found."""
    whole, state = prepare(make_served_config(tmp_path, served, **{"lora.rank": 0}))
    sampler = ServedSampler(whole, ENDS)
    changed = change(state, 0.01)
    for each in (state, changed):
        drawn = sampler.draw(each, prompts(whole), 3, (0, 0))
        assert not (whole.directory / "weights").exists()
        assert sampler.difference is not None and sampler.difference < 1e-4
        for theirs, own in zip(drawn, draw_itself(whole, sampler, each), strict=True):
            assert [token for token, _ in theirs] == [token for token, _ in own]
    assert [*served.server._worker.models] == ["base"]
    first = served.server._worker.models["base"]
    served.misread = lambda path: first
    with pytest.raises(InputError, match="its log-probabilities are those of the weights before: restart"):
        sampler.draw(change(changed, 1e-5, 2), prompts(whole), 1, (0, 1))

    def keep_table(path: Path) -> LoadedModel:
        new = models.reload_loaded(first, path)
        return replace(new, params=new.params | {"non_layer": first.params["non_layer"]})

    served.misread = keep_table
    with pytest.raises(InputError, match=r"by 0\.0\d* nats a token, above the bound of 0.001: .* weights completely"):
        sampler.draw(change(changed, 0.02, 2), prompts(whole), 1, (0, 2))
    sampler.close()
    served.server._worker.reload_model("base", lambda: served.base).result()
    served.misread = None


@pytest.mark.parametrize("stale", ["the model without adapters", "the adapters before"])
def test_a_server_with_older_weights_ends_the_run(
    stale: str, setup: tuple[Setup, TrainState], sampler: ServedSampler, served: Served
) -> None:
    """The scores have changed by much less than the bound."""
    whole, state = setup
    read: list[LoadedModel] = []

    def load(path: Path) -> LoadedModel:
        read.append(served.read(path))
        return served.base if stale == "the model without adapters" else read[max(len(read) - 2, 0)]

    served.misread = load
    first = state if stale == "the model without adapters" else change(state, 0.1, 1)
    sampler.draw(first, prompts(whole), 1, (0, 0))  # new adapters change nothing
    with pytest.raises(InputError, match=rf"probe \d, '.*its log-probabilities are those of {stale}: restart"):
        sampler.draw(change(first, 1e-4, 2), prompts(whole), 1, (0, 1))


def test_a_server_whose_weights_change_after_the_probes_ends_the_run(
    setup: tuple[Setup, TrainState], sampler: ServedSampler, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, state = setup
    sampler.draw(state, prompts(whole), 1, (0, 0))
    old, hand_over = sampler._read_weights(state), sampler._hand_over

    def hand_over_and_go_back(*given: Any) -> None:
        hand_over(*given)
        served.server._worker._engines[sampler._name].generator.load(old)

    monkeypatch.setattr(sampler, "_hand_over", hand_over_and_go_back)
    with pytest.raises(
        InputError, match="the answer to '.*differ from those of the run by .* nats a token, above the bound of 0.25"
    ):
        sampler.draw(change(state, 0.3), prompts(whole), 1, (0, 1))


def test_another_model_on_the_server_ends_the_run(
    setup: tuple[Setup, TrainState], sampler: ServedSampler, served: Served
) -> None:
    whole, state = setup
    params = jax.tree.map(lambda x: x * 1.3, served.base.params)
    served.misread = lambda path: replace(served.base, params=params)
    with pytest.raises(InputError, match=r"probe \d, '.*by .* nats a token, above the bound of 0.001"):
        sampler.draw(state, prompts(whole), 1, (0, 0))


def test_the_bound_follows_from_what_equal_weights_give() -> None:
    """Float32 on both sides; too little to tell; a server in 16 bits; both with one program; and many layers."""
    scores, certain = split(np.full(16, -1.0)), split(np.full(16, -0.01))
    cases = [(1e-6, scores, "float32"), (1e-6, certain, "float32"), (1e-3, scores, "float32")]
    cases += [(0.0, scores, "bfloat16"), (0.02, scores, "bfloat16"), (0.1, scores, "float32")]
    assert [choose_bound(*each) for each in cases] == [1e-3, 0.03, 0.03, 0.03, 0.08, 0.25]


def split(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, 4)


def test_rounding_is_not_taken_for_older_weights() -> None:
    """Nor are older weights for rounding, if the change is larger than the mean of many roundings."""
    random = np.random.default_rng(0)
    for size, found in ((1e-3, False), (0.05, True), (1.0, True)):
        for _ in range(300):
            new = random.normal(size=256)
            old, rounding = new + random.normal(size=256) * size, random.normal(size=256) * 0.02
            assert find_older(split(new + rounding), split(new), {"old": split(old)}) is None
            older = {"before": split(new - random.normal(size=256) * 1e-3), "old": split(old)}
            assert find_older(split(old + rounding), split(new), older) == ("old" if found else None)


# --- what a server may answer


@pytest.fixture(scope="module")
def answering() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the address of a server that gives the answers of a dictionary: a status and a body."""
    given: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given["asked"] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given["token"] = self.headers.get("Authorization")
            status, body = given["answer"]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/v1", given
        made.shutdown()


WANTED = Draw([1, 2], 2, 3, 7, frozenset({9}))


def choose(index: int, ids: Sequence[Any], values: Sequence[Any], reason: str = "stop") -> dict[str, Any]:
    return {
        "index": index,
        "text": "",
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"tokens": ["a"] * len(values), "token_logprobs": values},
    }


GOOD = [choose(1, [4, 9], [-0.5, 0.0]), choose(0, [4, 5, 6], [-1.5, -2, -3])]


def test_a_request_asks_for_the_whole_distribution(
    answering: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, given = answering
    monkeypatch.setenv("JAXOPT_LLM_SERVE_TOKEN", "secret")
    given["answer"] = 200, {"choices": GOOD}
    client = AnswerServer(address, 10, 10)
    assert client.draw("mine", WANTED) == [[(4, -1.5), (5, -2), (6, -3)], [(4, -0.5), (9, 0.0)]]
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0}
    expected = {"model": "mine", "prompt": [1, 2], "n": 2, "max_tokens": 3, "seed": 7, "stop_token_ids": [9]}
    assert given["asked"] == expected | neutral | {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    assert given["token"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (200, {"choices": GOOD[:1]}, InputError, "it has 1 of 2 choices"),
        (200, {"choices": [GOOD[0], choose(0, [4], [-1])]}, InputError, "ends with the token 4 after 1 of 3 tokens"),
        (200, {"choices": [GOOD[0], choose(0, [9, 4, 5], [-1] * 3)]}, InputError, "against stop_token_ids"),
        (200, {"choices": [GOOD[0], choose(0, [4, 5, 6], [-1, -1])]}, InputError, "3 tokens, and 2 log-probabilities"),
        (200, {"choices": [GOOD[0], choose(0, [4, 5, 6], [-1, None, -1])]}, InputError, "None is no log-probability"),
        (200, {"choices": [GOOD[0], choose(0, [4, 5, 10], [-1] * 3)]}, InputError, "the token 10 is not below 10"),
        (200, {"choices": [GOOD[0], {"index": 0, "logprobs": None}]}, InputError, "the answer lacks 'token_ids'"),
        (200, {"choices": [GOOD[0], choose(0, [4], [-1]) | {"logprobs": None}]}, InputError, "the answer lacks"),
        (200, b"<html>", InputError, "the answer is not JSON"),
        (404, {"error": {"message": "no such\nmodel"}}, InputError, "status 404: no such model$"),
        (400, {"object": "error", "message": "too long"}, InputError, "status 400: too long$"),
        (
            401,
            {"detail": "who?"},
            InputError,
            "status 401: who\\?; set its token as JAXOPT_LLM_SERVE_TOKEN",
        ),
        (503, b"busy", ServerFailed, "status 503: busy$"),
        (500, {"error": {"message": "EngineCore died"}}, ServerFailed, "status 500: EngineCore died$"),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    status: int, body: Any, error: type[InputError], message: str, answering: tuple[str, dict[str, Any]]
) -> None:
    address, given = answering
    given["answer"] = status, body
    with pytest.raises(InputError, match=message) as raised:
        AnswerServer(address, 10, 10).draw("mine", WANTED)
    assert type(raised.value) is error and str(raised.value).startswith(f"rollouts.server={address}: /completions: ")


def test_a_score_is_that_of_an_answer_of_one_token(answering: tuple[str, dict[str, Any]]) -> None:
    address, given = answering
    given["answer"] = 200, {"choices": [choose(0, [3], [-0.5])]}
    assert AnswerServer(address, 10, 10).score("mine", [1, 2], 3) == (-0.5, "a")
    asked = given["asked"]
    assert (asked["prompt"], asked["max_tokens"], asked["allowed_token_ids"]) == ([1, 2], 1, [3])
    for ids, values in (([4], [-0.5]), ([3], [-0.5, -0.5])):
        given["answer"] = 200, {"choices": [choose(0, ids, values)]}
        with pytest.raises(InputError, match="against allowed_token_ids of the request"):
            AnswerServer(address, 10, 10).score("mine", [1, 2], 3)


def test_a_server_that_is_not_there_may_come_back() -> None:
    with pytest.raises(ServerFailed, match="/models: Connection refused; see to the server") as raised:
        AnswerServer("http://127.0.0.1:1/v1", 10, 10).check(adapters=True)
    assert raised.value.exit_code == 74
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AnswerServer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", 0.2, 10)
        with pytest.raises(ServerFailed, match="no answer within rollouts.server_seconds=0.2"):
            client.map(lambda each: client.draw("mine", each), [WANTED] * 3, lambda: None)
        assert client.is_gone


def test_a_server_that_loads_nothing_is_refused_at_the_start(served: Served) -> None:
    with running({"base": served.base}) as (address, _):
        for adapters, needed in ((True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), (False, "VLLM_SERVER_DEV_MODE")):
            AnswerServer(served.address, 60, 10).check(adapters)
            with pytest.raises(InputError, match=f"status 403: .*{needed}.*--load-from"):
                AnswerServer(f"{address}/v1", 60, 10).check(adapters)


def test_tokens_with_other_texts_are_refused(
    setup: tuple[Setup, TrainState], sampler: ServedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = AnswerServer.score

    def rename(self: AnswerServer, model: str, prompt: Sequence[int], token: int) -> Any:
        return score(self, model, prompt, token)._replace(name="other")

    monkeypatch.setattr(AnswerServer, "score", rename)
    with pytest.raises(InputError, match=r"its token \d+ is 'other', and that of data.tokenizer '.+'"):
        sampler.draw(setup[1], prompts(setup[0]), 1, (0, 0))


# --- runs


def test_a_run_whose_server_fails_continues_equal_to_the_bit(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of steps after the checkpoint are those of the log, and the server is not asked for them."""
    config = make_served_config(tmp_path, served, **{"checkpoint.every": 1, "checkpoint.keep": 9})
    directory = run(config)
    assert all(each["sampler_kl"] < 1e-9 and each["probe_difference"] < 1e-4 for each in metrics(directory))
    whole, expected = records(directory), checkpoint(directory, 5)
    for step in (4, 5, 6):
        shutil.rmtree(directory / "checkpoints" / str(step))
    kept = [each for each in whole if each["step"] < 6]
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))

    def fail(self: AnswerServer, model: str, wanted: Draw) -> Any:
        raise ServerFailed("it is gone")

    monkeypatch.setattr(AnswerServer, "draw", fail)
    with pytest.raises(ServerFailed, match="it is gone"):
        run(config)
    assert records(directory) == kept
    jax.tree.map(np.testing.assert_array_equal, checkpoint(directory, 5), expected)
