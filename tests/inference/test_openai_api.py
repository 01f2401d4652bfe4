"""Names of tokens in answers; test_server.py asks the server for everything else."""

from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer
from jaxopt_llm.inference.openai_api import Names, read_completion, write_completion
from jaxopt_llm.inference.serving import Part, Token, join_parts


def test_a_name_is_the_text_of_whole_characters_with_the_space_before_it(tmp_path: Path) -> None:
    library = Tokenizer(WordLevel({"\u2581hello": 0, "world": 1, "</s>": 2}, unk_token="</s>"))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    names = Names(JsonTokenizer(tmp_path))
    assert [*map(names, range(3))] == [" hello", "world", "</s>"]
    names = Names(ByteTokenizer())
    assert [names(token) for token in (*b"a\n", *"é".encode())] == ["a", "\n", "token_id:195", "token_id:169"]
    assert names.read_text(195) is None


def test_alternatives_with_one_text_are_all_listed(tmp_path: Path) -> None:
    library = Tokenizer(WordLevel({"a": 0, "\u2581a": 1, "b": 2, "</s>": 3}, unk_token="</s>"))
    library.decoder = decoders.Replace("\u2581", "")
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    names = Names(JsonTokenizer(tmp_path))
    _, options = read_completion(b'{"prompt": "x", "logprobs": 2}', 512)
    token = Token(2, 0, -3.0, ((0, -1.0), (1, -2.0), (2, -3.0)))
    found = write_completion(Part(0, "b", (token,)), options, names)["logprobs"]
    assert found["top_logprobs"] == [{"a": -1.0, "token_id:1": -2.0, "b": -3.0}]
    assert (found["tokens"], found["token_logprobs"], found["text_offset"]) == (["b"], [-3.0], [0])


def test_parts_of_a_choice_are_joined() -> None:
    first, second, prompt = Token(1, 1, -1.0), Token(2, 2, -2.0), Token(0, 0, None)
    parts = [Part(3, "p", prompt=(prompt,)), Part(3, "a", (first,)), Part(3, "b", (second,), end="stop")]
    assert join_parts(parts) == Part(3, "pab", (first, second), (prompt,), "stop")
