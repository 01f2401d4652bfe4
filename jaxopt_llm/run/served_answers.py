"""Answers that a server draws with the weights of the run, and the proof that it has them.

Whenever the weights have changed, they are written as a folder, and the server is told to read it: adapters as a PEFT
folder under a new name, or all weights as the folder of a model, in place of those that it has. A server may say that
it has done so and still compute with older weights, with others, or with none. So fixed probes, texts of a prompt and
an answer, are scored on both sides after each hand-over, and some answers of each step.
"""

import contextlib
import functools
import hashlib
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native.identity import read_identity
from jaxopt_llm.checkpoint.peft.adapter_writer import AdapterOrigin, write_adapter_folder
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import CommandError, InputError, ServerFailed, describe_error
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.run import replicas
from jaxopt_llm.run.answer_server import AnswerServer, Draw, Drawn, Scored
from jaxopt_llm.run.log_probabilities import DocumentReader, make_prompt_reader, make_requests
from jaxopt_llm.run.samples import make_sampling_model, make_sampling_placement
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step.state import TrainState, make_weight_reader

PROBES = 8
PROBE_TOKENS = 32  # of the answer in a probe
FEWEST_TOKENS = 16  # that a mean is over: the difference of a single unlikely token may be larger than any bound
# A change of the scores is larger than rounding if its norm is this multiple of the rest of the difference, the part
# that it does not explain. The server's share of the change is then 1 or 0 within 1/12, and 1/2 is 6 deviations away.
CERTAIN = 12.0
# Bounds of the difference of a probe, in nats a token, unless rollouts.server_tolerance sets one (docs/grpo.md has what
# was measured). LARGEST_BOUND holds until rounding has been measured, and always for the answers of a step, which are
# new texts in each step. Then the bound is GROWTH times what was measured, because rounding grows as the weights
# change, and at least LEAST_BOUND, which 16 bits may round. If both sides compute in float32, they differ by less than
# FLOAT32, and the bound is FLOAT32_BOUND.
LARGEST_BOUND = 0.25
GROWTH, LEAST_BOUND = 4.0, 0.03
FLOAT32, FLOAT32_BOUND = 1e-4, 1e-3
CERTAIN_SCORE = -0.1  # log-probability above which a token is nearly certain
Scores = Sequence[NDArray[np.float64]]  # of the tokens of each probe


@dataclass(frozen=True)
class Probe:
    """A text that both sides score.

    Attributes:
        name: what an error calls it.
        ids: its tokens, a prompt and an answer.
        begin: number of tokens of the prompt.
    """

    name: str
    ids: list[int]
    begin: int

    @property
    def answer(self) -> list[int]:
        return self.ids[self.begin :]

    def select(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the log-probabilities of the answer, given those of all tokens after the first one."""
        return np.array(values[self.begin - 1 :], np.float64)


def measure_differences(server: Scores, own: Scores) -> NDArray[np.float64]:
    """Return the mean difference of each probe, in nats a token, over at least FEWEST_TOKENS tokens."""
    pairs = zip(server, own, strict=True)
    return np.array([np.abs(theirs - ours).sum() / max(ours.size, FEWEST_TOKENS) for theirs, ours in pairs])


def choose_bound(rounding: float, scores: Scores, dtype: str) -> float:
    """Return the bound of the differences of later probes.

    Args:
        rounding: the largest difference with equal weights.
        scores: of the run with these weights. Tokens that are nearly certain show no rounding.
        dtype: compute dtype of the run.
    """
    uncertain = sum(np.count_nonzero(each < CERTAIN_SCORE) for each in scores)
    if dtype == "float32" and rounding < FLOAT32 and uncertain >= FEWEST_TOKENS:
        return FLOAT32_BOUND
    return min(max(GROWTH * rounding, LEAST_BOUND), LARGEST_BOUND)


def find_older(server: Scores, own: Scores, older: Mapping[str, Scores]) -> str | None:
    """Return the older weights that explain the server's scores better than the present ones, if that is certain.

    The server's scores are written as older + share · (own - older) + rest. The share is 1 for a server with the
    present weights and 0 for one with the older ones, up to what both sides round differently, which the rest measures.

    Args:
        older: scores by older weights, by what these are called.
    """
    theirs, ours = np.concatenate(server), np.concatenate(own)
    for name, scores in older.items():
        before = np.concatenate(scores)
        change = ours - before
        size = float(np.linalg.norm(change))
        if not size:
            continue
        share = float((theirs - before) @ change) / size**2
        rest = float(np.linalg.norm(theirs - before - share * change)) / np.sqrt(max(ours.size - 1, 1))
        if share < 0.5 and size > CERTAIN * rest:
            return name
    return None


def check_names(names: Iterable[tuple[int, str]], tokenizer: Tokenizer) -> None:
    """Raise InputError if the server's tokens have other texts than the run's. names: ids with the server's texts.

    Only tokens are compared that are whole characters on both sides. Servers differ in the space before a word.
    """
    for token, name in names:
        own, theirs = tokenizer.decode([token]).strip(), name.strip()
        is_text = own and theirs and "\N{REPLACEMENT CHARACTER}" not in own + theirs
        if is_text and own != theirs and not theirs.startswith("token_id:"):
            raise InputError(
                f"rollouts.server: its token {token} is {theirs!r}, and that of data.tokenizer {own!r}: let it "
                "serve the model of model.pretrained"
            )


class ServedSampler:
    """Sampler whose answers a server draws, with adapters or with all weights of the run.

    Attributes:
        difference: largest difference of the probes after the last hand-over, in nats a token; None before the first.
    """

    def __init__(self, setup: Setup, ends: frozenset[int]) -> None:
        """Take over the setup of a run. Nothing is asked or compiled before the first call.

        ends: ids that end an answer.
        """
        config, self._setup, self._ends = setup.config, setup, ends
        self._share = setup.processes.channel("answers").share  # process 0 asks the server
        self._client = AnswerServer(
            config.rollouts.server, config.rollouts.server_seconds, config.model.vocabulary_size
        )
        self._placement = make_sampling_placement(setup)
        self._read_weights = make_weight_reader(setup.program.specs, setup.placement, self._placement)
        # What the server gets, and the folder of the run directory in which it reads them.
        self._what = "adapters" if config.lora.rank else "weights"
        if self._what == "weights" and setup.processes.count > 1:
            raise InputError(
                f"rollouts.server={config.rollouts.server}: a job of {setup.processes.count} processes hands over only "
                "adapters: set --lora.rank, or train in one process"
            )
        self._loaded = ""  # digest of the weights that the server has
        # The last state, which is not kept alive, with the digest of its weights.
        self._known: tuple[weakref.ref[TrainState], str] | None = None
        self._probes: list[Probe] = []
        self._older: dict[str, Scores] = {}
        self._given_bound = config.rollouts.server_tolerance  # 0: it is measured
        self._bound = self._given_bound or LARGEST_BOUND
        self.difference: float | None = None

    # --- answers

    def draw(
        self, state: TrainState, prompts: Sequence[NDArray[np.int32]], count: int, key: tuple[int, int]
    ) -> list[Drawn]:
        """Return this number of answers to each prompt, by the weights of the state.

        key: of the random numbers, besides the seed of the run.

        Raises:
            InputError: the server does not answer as it should, or has other weights.
        """
        params, seed, beat = self._read_weights(state), self._setup.config.run.seed, self._setup.processes.main.beat
        self._hand_over(state, params)
        wanted = [self._make_draw(ids, count, (seed, *key, place)) for place, ids in enumerate(prompts)]
        groups = self._share(lambda: self._client.map(lambda each: self._client.draw(self._name, each), wanted, beat))
        self._check_answers(params, prompts, groups)
        return [answer for group in groups for answer in group]

    def _make_draw(self, prompt: NDArray[np.int32], count: int, entropy: tuple[int, ...], most: int = 0) -> Draw:
        """Return a request for answers, with a seed of its own: vLLM adds the number of an answer to it."""
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1
        return Draw(prompt.tolist(), count, most or self._setup.config.rollouts.max_new_tokens, seed, self._ends)

    def _check_answers(
        self, params: Params, prompts: Sequence[NDArray[np.int32]], groups: Sequence[Sequence[Drawn]]
    ) -> None:
        """Raise InputError if the model gives some answers other log-probabilities than those that they came with."""
        answers = [group[0] for group in groups[:PROBES]]
        probes = [self._make_probe("the answer to", ids, answer) for ids, answer in zip(prompts, answers, strict=False)]
        reported = [np.array([value for _, value in answer], np.float64) for answer in answers]
        own = self._score(self._reader, params, probes)
        self._check_differences(probes, reported, own, self._given_bound or LARGEST_BOUND)

    # --- weights

    @property
    def _name(self) -> str:
        """Name of the model that answers."""
        return self._prefix + self._loaded if self._what == "adapters" else self._own_name

    @functools.cached_property
    def _own_name(self) -> str:
        """Name of the server's own model."""
        name: str = self._share(lambda: self._client.list_models()[0])
        return name

    @functools.cached_property
    def _prefix(self) -> str:
        """Start of the names of the folders and adapters of this run, which no other run has."""
        return f"{self._setup.directory.name}-{read_identity(self._setup.directory).run[:8]}-"

    def identify(self, state: TrainState) -> str:
        """Return the digest of the trained weights of a state, which depends on the mesh."""
        if self._known is None or self._known[0]() is not state:
            digest = hashlib.sha256()
            for path, sums in replicas.compute_sums(state.masters).items():
                digest.update(path.encode() + sums.tobytes())
            self._known = weakref.ref(state), digest.hexdigest()[:16]
        return self._known[1]

    def _read_trained(self, state: TrainState) -> Params:
        """Return the trained weights of a state. With several processes they are on the host, whole in each."""
        trained = self._setup.program.to_checkpoint(state)["masters"]
        return multihost_utils.process_allgather(trained, tiled=True) if self._setup.processes.count > 1 else trained

    def _hand_over(self, state: TrainState, params: Params) -> None:
        """Give the server the weights of a state, if it has others, and check that it uses them."""
        digest = self.identify(state)
        if digest == self._loaded:
            return
        first, adapts = not self._loaded, self._what == "adapters"
        if first and adapts:
            self._choose_probes()
            base = self._score(self._base_reader, leaves.remove_adapters(params), self._probes)
            self._compare_equal(self._ask_scores(self._own_name), base)
            self._older = {"the model without adapters": base}
        self._loaded, trained = digest, self._read_trained(state)
        self._share(lambda: self._give(trained))
        if first and not adapts:
            self._choose_probes()
        own, server = self._score(self._reader, params, self._probes), self._ask_scores(self._name)
        if name := find_older(server, own, self._older):
            probe = self._probes[int(np.argmax(measure_differences(own, self._older[name])))]
            raise InputError(
                f"rollouts.server={self._setup.config.rollouts.server}: {probe.name}: it says that it has loaded "
                f"{self._folder}, and its log-probabilities are those of {name}: restart the server, and see whether "
                f"it applies {self._what} to this model (docs/grpo.md)"
            )
        self.difference = self._check_differences(self._probes, server, own, self._bound)
        if first and not adapts:
            self._compare_equal(server, own)
        self._older |= {f"the {self._what} before": own} | ({f"the first {self._what}": own} if first else {})

    @property
    def _folder(self) -> Path:
        return self._setup.directory.resolve() / self._what / (self._prefix + self._loaded)

    def _give(self, trained: Params) -> None:
        """Give the server weights in place of those that it has."""
        give = self._give_adapters if self._what == "adapters" else self._give_weights
        try:
            give(trained)
        except OSError as error:
            raise ServerFailed(f"{self._folder}: {describe_error(error)}; see to the disk, and run again") from error

    def _give_weights(self, weights: Params) -> None:
        config, source = self._setup.config, pretrained.find_source_folder(self._setup.config)
        self._remove_folders()
        self._folder.parent.mkdir()
        dtype = config.precision.compute_dtype
        huggingface.write_model_folder(self._folder, weights, config.model, huggingface.Origin(source), dtype)
        self._client.map(self._client.load_weights, [str(self._folder)], self._setup.processes.main.beat)
        self._remove_folders()  # a server has read all of it

    def _give_adapters(self, adapters: Params) -> None:
        config, source = self._setup.config, pretrained.find_source_folder(self._setup.config)
        base = config.model.pretrained
        origin = AdapterOrigin("" if is_run_directory(Path(base)) else hub.repository(base))
        family = huggingface.choose_adapter_family(config.model, source)
        own_device = NamedSharding(make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1]), PartitionSpec())
        self._unload_old()
        self._remove_folders()
        adapters = jax.device_put(adapters, own_device)  # the other processes do not write
        write_adapter_folder(self._folder, adapters, family, config.model, config.lora, origin)
        self._client.load_adapter(self._name, str(self._folder))

    def _unload_old(self) -> None:
        """Unload the adapters that the server has of this run, also of an earlier start."""
        for name in self._client.list_models():
            if name.startswith(self._prefix):
                self._client.unload_adapter(name)

    def _remove_folders(self) -> None:
        if self._folder.parent.exists():
            shutil.rmtree(self._folder.parent)

    def close(self) -> None:
        """Remove the adapters from the server, if it is still there, and the folder. A server keeps whole weights."""
        if self._loaded and self._setup.processes.first:
            if self._what == "adapters" and not self._client.is_gone:
                with contextlib.suppress(CommandError):  # the next start of the run unloads them
                    self._unload_old()
            self._remove_folders()
        self._loaded = ""

    # --- probes

    def _choose_probes(self) -> None:
        """Ask the server's own model for answers to the first prompts of the data: the probes of this start."""
        assert self._setup.prompts is not None
        prompts = [prompt.ids for prompt in self._setup.prompts.training[:PROBES]]
        most = min(PROBE_TOKENS, self._setup.config.rollouts.max_new_tokens)
        wanted = [self._make_draw(ids, 1, (place,), most) for place, ids in enumerate(prompts)]
        beat = self._setup.processes.main.beat
        name = self._own_name
        drawn = self._share(lambda: self._client.map(lambda each: self._client.draw(name, each)[0], wanted, beat))
        pairs = zip(prompts, drawn, strict=True)
        self._probes = [self._make_probe(f"probe {place},", *pair) for place, pair in enumerate(pairs)]

    def _make_probe(self, name: str, prompt: NDArray[np.int32], answer: Drawn) -> Probe:
        quoted = repr(self._setup.data.tokenizer.decode(prompt.tolist())[-60:])
        return Probe(f"{name} {quoted}", [*prompt.tolist(), *(token for token, _ in answer)], prompt.size)

    def _compare_equal(self, server: Scores, own: Scores) -> None:
        """Set the bound of later differences, given scores by equal weights, which differ by rounding.

        After a resume without adapters, only the bound shows that they are equal.
        """
        rounding = self._check_differences(self._probes, server, own, self._bound)
        self._bound = self._given_bound or choose_bound(rounding, own, self._setup.config.precision.compute_dtype)

    def _ask_scores(self, model: str) -> Scores:
        """Return the scores that a model of the server gives the answer of each probe.

        Raises:
            InputError: its tokens have other texts than the run's.
        """
        beat, probes = self._setup.processes.main.beat, self._probes
        asked = [probe.ids[: place + 1] for probe in probes for place in range(probe.begin, len(probe.ids))]
        found = self._share(
            lambda: self._client.map(lambda ids: self._client.score(model, ids[:-1], ids[-1]), asked, beat)
        )
        scored = [Scored(*each) for each in found]
        check_names([(ids[-1], each.name) for ids, each in zip(asked, scored, strict=True)], self._setup.data.tokenizer)
        ends = np.cumsum([len(probe.answer) for probe in probes])[:-1]
        return np.split(np.array([each.value for each in scored], np.float64), ends)

    @functools.cached_property
    def _model(self) -> Model:
        return make_sampling_model(self._setup, self._placement)

    @functools.cached_property
    def _reader(self) -> DocumentReader:
        return make_prompt_reader(self._model, self._placement, self._setup.config.model.vocabulary_size)

    @functools.cached_property
    def _base_reader(self) -> DocumentReader:
        model = self._model.with_specs(leaves.remove_adapters(self._model.specs))
        return make_prompt_reader(model, self._placement, self._setup.config.model.vocabulary_size)

    def _score(self, reader: DocumentReader, params: Params, probes: Sequence[Probe]) -> Scores:
        requests = make_requests([probe.ids for probe in probes])
        found = reader.read_each(params, requests, max(len(probe.ids) for probe in probes))
        return [probe.select(scores[0]) for probe, scores in zip(probes, found, strict=True)]

    def _check_differences(self, probes: Sequence[Probe], server: Scores, own: Scores, bound: float) -> float:
        """Return the largest difference. Raises InputError if it is above the bound."""
        differences = measure_differences(server, own)
        worst = int(np.argmax(differences))
        if not differences[worst] <= bound:
            raise InputError(
                f"rollouts.server={self._setup.config.rollouts.server}: {probes[worst].name}: its log-probabilities "
                f"differ from those of the run by {differences[worst]:.3g} nats a token, above the bound of {bound:.2g}"
                ": let it serve the model of model.pretrained and load weights completely, or set another bound with "
                "--rollouts.server-tolerance (docs/grpo.md)"
            )
        return float(differences[worst])
