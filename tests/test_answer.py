"""Text of an answer: stop strings across token borders, what is held back, what ends it."""

import random

import pytest

from minillm.answer import Answer


class Letters:
    """A detokenizer of a vocabulary whose token i is a piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


def answer_of(pieces: list[str], stop: list[str], ends: frozenset[int] = frozenset()) -> Answer:
    answer = Answer(Letters(pieces), stop, ends, logprobs=True)  # type: ignore[arg-type]
    for index in range(len(pieces)):
        last = index == len(pieces) - 1
        reason = "stop" if index in ends else "length" if last else None
        if answer.add(index, -0.5, reason) or reason:
            break
    return answer


def text_of(answer: Answer) -> str:
    return "".join(chunk.text for chunk in answer.chunks)


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings_cut_the_text_wherever_tokens_are_cut(seed: int) -> None:
    """The joined text is what stands before the earliest stop string, however the text was split into tokens."""
    rng = random.Random(seed)
    text = "".join(rng.choices("ab\n", k=60))
    stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
    pieces, at = [], 0
    while at < len(text):
        size = rng.randint(0, 4)
        pieces.append(text[at : at + size])
        at += size
    ends = [text.find(stop) for stop in stops if stop in text]
    answer = answer_of(pieces, stops)
    # the first stop string to be complete wins; of two complete in one token, the one that begins first
    got = text_of(answer)
    if not ends:
        assert got == text
        assert answer.chunks[-1].finish_reason == "length"
    else:
        assert answer.chunks[-1].finish_reason == "stop"
        assert text.startswith(got)
        assert any(text.startswith(stop, len(got)) for stop in stops)
        assert not any(stop in got for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    answer = Answer(Letters(["Hello", " wor", "ld EN", "D", "UP", " x"]), ["END."], frozenset(), False)  # type: ignore[arg-type]
    given = []
    for index in range(6):
        answer.add(index, 0.0, "length" if index == 5 else None)
        given.append(text_of(answer))
    assert given == ["Hello", "Hello wor", "Hello world ", "Hello world ", "Hello world ENDUP", "Hello world ENDUP x"]


def test_a_begun_stop_string_at_the_end_is_given_out() -> None:
    assert text_of(answer_of(["ab", "cE", "N"], ["END"])) == "abcEN"


def test_end_token_belongs_to_the_ids_and_not_to_the_text() -> None:
    answer = answer_of(["a", "b", "</s>", "c"], [], frozenset({2}))
    assert text_of(answer) == "ab"
    assert [i for chunk in answer.chunks for i in chunk.token_ids] == [0, 1, 2]
    assert [x for chunk in answer.chunks for x in chunk.logprobs or []] == [-0.5] * 3
    assert answer.chunks[-1].finish_reason == "stop"


def test_tokens_without_text_are_counted_in_the_next_chunk() -> None:
    answer = answer_of(["a", "", "", "b"], [])
    assert [(c.text, c.token_ids) for c in answer.chunks] == [("a", [0]), ("b", [1, 2, 3])]
