"""Sample answers: texts that the model writes at each evaluation after prompts of the validation sets.

They are written as `generate` writes them: with a KV cache, on a mesh that splits the parameters of all devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.compiler import kernel_choice
from jaxopt_llm.config import MeshConfig, OffloadConfig, ShardingConfig
from jaxopt_llm.config.data import UNPAIRED
from jaxopt_llm.data.tokens.continuation import Continuation, extend_continuations, find_eos_ids
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.execution.decode import MAX_ROWS, Request, TokenGenerator
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step import lora
from jaxopt_llm.step.state import TrainState, make_weight_reader

TEXT_PROMPT_TOKENS = 64  # longest prompt from a text; a conversation gives its first question
SEARCHED_TOKENS = 2**16  # of a validation set, from each position where a prompt is wanted


@dataclass(frozen=True)
class Prompt:
    """Beginning of a document, and what follows it there.

    Attributes:
        validation_set: name of its validation set.
        ids: the beginning, [P].
        reference: the ids that follow: the whole first answer of a conversation, or more of a text.
    """

    validation_set: str
    ids: NDArray[np.int32]
    reference: NDArray[np.int32]


class Sampler:
    """Writer of sample answers, always after the same prompts, with the most likely tokens."""

    def __init__(self, setup: Setup) -> None:
        """Choose the prompts. Nothing is compiled before the first call."""
        config, self._setup = setup.config, setup
        evaluation, length = config.evaluation, config.training.sequence_length
        self._count = max(min(evaluation.sample_tokens, length // 2), 1)  # tokens of an answer
        self.prompts = [
            Prompt(name, *pair)
            for name, rows in setup.data.validation.items()
            for pair in choose_prompts(rows.stream, evaluation.samples, length, self._count)
        ]
        self._generator: TokenGenerator | None = None
        self._placement = make_sampling_placement(setup)
        self._read_weights = make_weight_reader(setup.program.specs, setup.placement, self._placement)

    def __call__(self, state: TrainState) -> list[dict[str, str]]:
        """Return a record for each prompt: its validation set, the prompt, the answer, and the text in the document.

        All processes of the job must call it.
        """
        if not self.prompts:
            return []
        tokenizer = self._setup.data.tokenizer
        if self._generator is None:
            rows, longest = min(len(self.prompts), MAX_ROWS), max(prompt.ids.size for prompt in self.prompts)
            weights, length = self._read_weights(state), longest + self._count
            self._generator = make_generator(self._setup, weights, self._placement, rows, length)
        else:
            self._generator.load(self._read_weights(state))
        answers = [Continuation(tokenizer, prompt.ids.tolist(), self._find_ends(prompt), ()) for prompt in self.prompts]
        requests = [Request(prompt.ids, self._count, number=number) for number, prompt in enumerate(self.prompts)]
        drawn = self._generator.run(requests, lambda request: answers[request.number].done)
        extend_continuations(((each.request.number, each.token) for each in drawn), answers)
        self._generator.unload()
        return [
            {
                "set": prompt.validation_set,
                "prompt": tokenizer.decode(prompt.ids.tolist()),
                "answer": answer.text,
                "reference": tokenizer.decode(prompt.reference[: self._count].tolist()),
            }
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]

    def _find_ends(self, prompt: Prompt) -> frozenset[int]:
        """Return the ids that end an answer: also the last special token of the answer in the document."""
        tokenizer = self._setup.data.tokenizer
        special = {tokenizer.vocabulary[token] for token in tokenizer.special_tokens}
        ends = [int(i) for i in prompt.reference if int(i) in special]
        return find_eos_ids(self._setup.config.data, tokenizer) | frozenset(ends[-1:])


def make_generator(setup: Setup, params: Params, placement: Placement, rows: int, length: int) -> TokenGenerator:
    """Return a generator of a run's model. params: by layer. rows, length: see TokenGenerator."""
    model = make_sampling_model(setup, placement)
    return TokenGenerator(model, params, placement, setup.config.model.vocabulary_size, rows, length)


def make_sampling_placement(setup: Setup) -> Placement:
    """Return the placement for generation: the tensor axis of the run, and its other devices along `fsdp`.

    Generation divides neither layers nor sequences. With a mesh that has only these two axes and ZeRO-3, the weights
    of the run are used where they are.
    """
    config, mesh = setup.config, setup.placement.mesh
    tensor = config.mesh.tensor
    sampling = make_mesh(MeshConfig(fsdp=mesh.size // tensor, tensor=tensor), list(mesh.devices.flat))
    offload = OffloadConfig(parameters=config.offload.parameters)
    return Placement(sampling, ShardingConfig(), setup.placement.precision.for_evaluation(), offload)


def make_sampling_model(setup: Setup, placement: Placement, attention: str = "xla") -> Model:
    """Return the model of a run on this placement. attention: implementation for calls without a cache."""
    config = setup.config
    products = kernel_choice.choose_grouped_matmul(
        placement.mesh.devices.flat[0], config.training.grouped_matmul, placement.precision.compute_dtype
    )
    decoder = Decoder(config.model, config.training.logit_tokens, attention=attention, grouped_matmul=products)
    return lora.adapt_model(decoder, config.lora, placement.precision, config.training.trainable)[0]


def choose_prompts(
    stream: TokenStream, count: int, longest: int, answer: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Yield the prompt and what follows it for `count` documents, spread evenly over a validation set.

    Fewer are yielded if not enough documents have a prompt that fits. Of pairs, chosen and desirable answers count.

    Args:
        longest: maximum number of tokens of a prompt and an answer together.
        answer: maximum number of tokens of an answer.
    """
    begin = 0
    for index in range(count):
        begin = max(begin, stream.size * index // count)
        size = min(stream.size - begin, SEARCHED_TOKENS)
        if size <= 0:
            return
        starts = stream.document_starts(begin, size)
        documents = list(pairwise([*starts.tolist(), begin + size]))
        if stream.pairs:
            documents = documents[stream.document_starts(0, begin).size % 2 :: 2]
        for first, last in documents:
            begin = last
            if stream.pairs == UNPAIRED and not stream.read_label(first):
                continue  # an answer that the model should avoid
            tokens, counted = stream.read(first, last - first), stream.read_mask(first, last - first)
            if pair := _split_document(tokens.astype(np.int32), counted, longest - answer, answer):
                yield pair
                break


def _split_document(
    tokens: NDArray[np.int32], counted: NDArray[np.bool_], longest: int, answer: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Return the prompt and what follows it, or None if the document has no prompt of at most `longest` tokens.

    counted: whether the loss counts each token, [N]: all tokens of a text, the answers of a conversation.
    """
    if tokens.size < 2 or not counted.any():
        return None
    if counted.all():
        size = min(TEXT_PROMPT_TOKENS, longest, tokens.size // 2)
        return tokens[:size], tokens[size : size + answer]
    size = int(counted.argmax())
    rest = counted[size:]
    end = size + (rest.size if rest.all() else int(rest.argmin()))
    return (tokens[:size], tokens[size:end]) if 0 < size <= longest else None
