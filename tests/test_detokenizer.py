"""Detokenizer: the streamed text is the decoded text, for every kind of vocabulary, and never half a character.

That the decoded text is right, as transformers and sentencepiece have it, is tested in test_tokenizer.py.
"""

from __future__ import annotations

import random
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import KINDS, STRINGS, byte_level, save, sentencepiece

from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, **options)
    return [detokenizer.add(i) for i in ids] + [detokenizer.flush()]


def test_stream_joins_to_decode(tokenizer: Tokenizer) -> None:
    """Fault: ids decoded one at a time run words together, lose the first space, or break characters."""
    assert len(set(STRINGS)) == 200
    for text in STRINGS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            pieces = stream(tokenizer, ids, skip_special_tokens=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip)
            assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "llama2_metaspace", "sentencepiece_bpe"])
def test_cut_in_mid_character(kind: str, folders: dict[str, Path]) -> None:
    """Fault: at the token limit a character that is half there shows as several U+FFFD, or takes others with it."""
    tokenizer = Tokenizer.from_dir(folders[kind])
    ids = tokenizer.encode("ok 𒀀𒀀")
    for cut in range(2, len(ids) + 1):
        pieces = stream(tokenizer, ids[:cut])
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert pieces[-1] in ("", "\ufffd")
        assert "ok 𒀀𒀀".startswith("".join(pieces).replace("\ufffd", ""))
        assert "".join(pieces) == tokenizer.decode(ids[:cut])
    assert stream(tokenizer, ids[:-1])[-1] == "\ufffd"
    assert tokenizer.decode(ids[:-1]) == "ok 𒀀\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "llama2_metaspace", "sentencepiece_bpe"])
def test_bytes_that_are_no_text(kind: str, folders: dict[str, Path]) -> None:
    """Lone continuation bytes, and a character broken off by a word, become U+FFFD at once; the word stays whole."""
    tokenizer = Tokenizer.from_dir(folders[kind])
    whole, word = tokenizer.encode("𒀀", False), tokenizer.encode("again", False)
    first, last = whole[-4:-1], whole[-1]
    assert tokenizer.decode([*word, last, last, *word]).count("\ufffd") == 2
    broken = stream(tokenizer, [*word, *first, *word])
    assert "".join(broken).count("\ufffd") == 1
    assert "".join(broken).endswith("again")
    assert broken[-1] == ""


def test_replacement_character_in_the_text_does_not_hold_the_stream(tmp_path: Path) -> None:
    """Fault: a stream that waits while its text ends with U+FFFD never goes on when the model really wrote one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"<unk>": 0, "▁\ufffd": 1, "▁a": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    words = Tokenizer.from_dir(save(tmp_path / "words", backend, bos_token=None, eos_token=None))
    assert stream(words, [1, 1, 2]) == ["\ufffd", " \ufffd", " a", ""]
    for make in (byte_level, sentencepiece):
        tokenizer = Tokenizer.from_dir(make(tmp_path / make.__name__))
        ids = tokenizer.encode("\ufffd", add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        for _ in range(50):
            assert "".join(map(detokenizer.add, ids)).strip() == "\ufffd"
        assert detokenizer.flush() == ""


def test_text_that_follows_a_prompt(folders: dict[str, Path]) -> None:
    """Fault: with a sentencepiece vocabulary, an answer decoded alone loses the space between prompt and answer."""
    for kind in KINDS:
        tokenizer = Tokenizer.from_dir(folders[kind])
        prompt = tokenizer.encode("the quick brown")
        answer = tokenizer.encode("the quick brown fox says Hello")[len(prompt) :]
        assert "".join(stream(tokenizer, answer, prompt)) == " fox says Hello"
        assert "".join(stream(tokenizer, answer, [*prompt, *[2] * 20])) == " fox says Hello"
        keeps_space = kind.startswith("byte_level")
        assert tokenizer.decode(answer) == (" " if keeps_space else "") + "fox says Hello"
        assert "".join(stream(tokenizer, answer)) == tokenizer.decode(answer)
    # After nothing but BOS, a text begins: no space in front, as when prompt and answer are decoded in one.
    tokenizer = Tokenizer.from_dir(folders["sentencepiece_bpe"])
    assert "".join(stream(tokenizer, tokenizer.encode("fox", False), [1])) == "fox"


def test_prompt_that_ends_in_mid_character(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_dir(folders["byte_level"])
    ids = tokenizer.encode("👍🏽")
    assert "".join(stream(tokenizer, ids[-1:], ids[:-1])) == "🏽"


def test_a_step_costs_the_same_in_a_long_text(tokenizer: Tokenizer) -> None:
    """Fault: a stream that decodes the whole text again at every token."""
    ids = (tokenizer.encode("the quick brown fox says Hello again", False) * 2000)[:10000]
    detokenizer = tokenizer.detokenizer()
    seconds = []
    for start in range(0, len(ids), 1000):
        began = time.perf_counter()
        for i in ids[start : start + 1000]:
            detokenizer.add(i)
        seconds.append(time.perf_counter() - began)
    assert min(seconds[5:]) < 3 * min(seconds[:5])


def test_nul_and_normal_forms_are_texts(tokenizer: Tokenizer) -> None:
    for text in ("a\0b", "\0", unicodedata.normalize("NFD", "각 é"), "x" * 5000):
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_numbers_of_other_libraries_are_ids(tokenizer: Tokenizer) -> None:
    import numpy as np

    ids = tokenizer.encode("fox says")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, np.array(ids), np.array(ids))) == "".join(stream(tokenizer, ids, ids))


def test_a_bad_id_leaves_the_stream_as_it_was(tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("fox says", False)
    detokenizer = tokenizer.detokenizer()
    with pytest.raises(TokenizerError, match="-5"):
        detokenizer.add(-5)
    assert "".join([*map(detokenizer.add, fox), detokenizer.flush()]) == tokenizer.decode(fox)


@pytest.mark.parametrize("decoder", ["none", "wordpiece", "bpe_suffix", "metaspace"])
def test_other_decoders(decoder: str, tmp_path: Path) -> None:
    """A vocabulary of whole words, or of pieces with a mark for "goes on" or "ends here", streams right too."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["[UNK]", "hello", "##lo", "world</w>", "low", "er</w>", ".", "▁a", "▁", "▁▁b"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = {"wordpiece": decoders.WordPiece(), "bpe_suffix": decoders.BPEDecoder(), "metaspace": decoders.Metaspace()}
    if decoder in made:
        backend.decoder = made[decoder]
    ours = Tokenizer.from_dir(save(tmp_path, backend, bos_token=None, eos_token=None, unk_token=None))
    numbers = random.Random(0)
    for _ in range(200):
        ids = numbers.choices(range(1, len(words)), k=6)
        if decoder == "bpe_suffix":
            ids.append(5)  # that decoder drops the last space of a text, which a stream may have written already
        assert "".join(stream(ours, ids)) == ours.decode(ids) == backend.decode(ids)
