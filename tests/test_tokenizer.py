"""Tokenizer: ids and texts as transformers and sentencepiece give them; BOS, added tokens, and what cannot be taken."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import KINDS, STRINGS, byte_level, llama2, save, sentencepiece, write_json

from minillm import vocabulary
from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer
from minillm.vocabulary import LONG

FILES = [kind for kind in KINDS if not kind.startswith("sentencepiece")]


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def processor(folder: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


# --- the same ids and texts as the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
def test_ids_and_text_equal_transformers(kind: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.from_dir(folders[kind]), transformers_tokenizer(folders[kind])
    for text in [*STRINGS, "", " ", "a</s>b", "a <tool> b", "</s>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "sentencepiece_unigram"])
def test_ids_and_text_equal_sentencepiece(kind: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.from_dir(folders[kind]), processor(folders[kind])
    for text in [*STRINGS, "", " "]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        if theirs.unk_id() not in ids:  # it writes unknowns as " ⁇ "; here they are special and skipped
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())


def test_encoded_text_comes_back(folders: dict[str, Path]) -> None:
    for kind in ("byte_level", "llama2_legacy", "sentencepiece_bpe"):
        ours = Tokenizer.from_dir(folders[kind])
        assert [ours.decode(ours.encode(text)) for text in STRINGS] == STRINGS


@pytest.mark.parametrize("kind", ["llama2_metaspace", "sentencepiece_bpe", "sentencepiece_unigram"])
def test_any_order_of_word_tokens_decodes_as_the_library_does(kind: str, folders: dict[str, Path]) -> None:
    """A model emits ids in orders that no text encodes to: a leading "▁", two of them, a lone one in the middle."""
    ours = Tokenizer.from_dir(folders[kind])
    if kind.startswith("sentencepiece"):
        reference = processor(folders[kind])
        words = [i for i in range(3, reference.vocab_size()) if not reference.is_byte(i)]
        space = reference.piece_to_id("▁")
    else:
        reference = transformers_tokenizer(folders[kind])
        words = list(range(3 + 256, len(reference)))
        space = reference.convert_tokens_to_ids("▁")
    numbers = random.Random(0)
    for _ in range(200):
        ids = numbers.choices([*words, *[space] * len(words)], k=numbers.randint(1, 8))
        assert ours.decode(ids) == reference.decode(ids)


def test_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """A prompt of millions of characters held the interpreter's lock: for seconds, no thread made or sent a token."""
    text = "the king and the sand " * 20_000
    tokenizer.encode(text[: 2 * LONG])  # the library starts its threads
    turns, ended = [0], threading.Event()

    def turn() -> None:
        while not ended.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=turn)
    other.start()
    before = turns[0]
    tokenizer.encode(text)
    during = turns[0] - before
    ended.set()
    other.join()
    assert during > 5


def test_long_and_short_texts_get_the_same_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    text = "  ".join([*STRINGS, "a</s>b", "a <tool> b", "</s>"])
    text *= LONG // len(text) + 1
    for special in (True, False):
        ids = tokenizer.encode(text, special)
        with monkeypatch.context() as patch:
            patch.setattr(vocabulary, "LONG", 10**9)
            assert tokenizer.encode(text, special) == ids


# --- special and added tokens -----------------------------------------------------------------------------------------


def test_special_tokens_are_skipped_by_id(tokenizer: Tokenizer) -> None:
    """Fault: "</s>" shown, or cut out of a text in which it is really written."""
    ids = [1, *tokenizer.encode("fox", False), 2]
    assert tokenizer.decode(ids).strip() == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("fox</s>")


def test_text_that_looks_like_a_special_token_stays(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_dir(folders["sentencepiece_bpe"])
    ids = processor(folders["sentencepiece_bpe"]).encode("a </s> b")
    assert 2 not in ids
    assert tokenizer.decode(ids) == "a </s> b"


@pytest.mark.parametrize("kind", FILES)
def test_added_tokens_that_are_not_special_stay_visible(kind: str, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_dir(folders[kind])
    tool = tokenizer.vocab_size - 1
    ids = tokenizer.encode("a<tool>b</s>")
    assert tool in ids
    assert "<tool>" in tokenizer.decode(ids)
    assert "</s>" not in tokenizer.decode(ids)


def test_added_token_with_letters_beyond_ascii(tmp_path: Path) -> None:
    """Fault: an added token of a byte-level file is read letter by byte, and "é" becomes half a character."""
    folder = byte_level(tmp_path, added_tokens_decoder={"401": {"content": "<é>", "special": False}})
    tokenizer = Tokenizer.from_dir(folder)
    assert 401 in tokenizer.encode("a<é>b")
    assert tokenizer.decode(tokenizer.encode("a<é>b")) == "a<é>b"


def test_added_tokens_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    """`added_tokens_decoder` of the config: found in text, special or visible, with their lstrip and rstrip."""
    size = processor(sentencepiece(tmp_path)).vocab_size()
    added = {
        size: {"content": "<|end|>", "special": True, "rstrip": True},
        size + 1: {"content": "<|end|>x", "special": False},
        size + 3: {"content": "<tool>", "special": False, "lstrip": True},
    }
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {str(i): t for i, t in added.items()}})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == size + 4
    fox = tokenizer.encode("fox", False)
    assert tokenizer.encode("fox<|end|>  fox", False) == [*fox, size, *fox]
    assert tokenizer.encode("fox  <tool>fox", False) == [*fox, size + 3, *fox]
    assert tokenizer.encode("<|end|>x", False) == [size + 1]
    assert tokenizer.decode([*fox, size, size + 2, size + 3]) == "fox<tool>"
    assert tokenizer.decode([*fox, size], skip_special_tokens=False) == "fox<|end|>"


def test_older_added_tokens_file(tmp_path: Path) -> None:
    size = processor(sentencepiece(tmp_path)).vocab_size()
    write_json(tmp_path / "added_tokens.json", {"<pad>": size, "<tool>": size + 1, "<turn>": size + 2})
    write_json(tmp_path / "special_tokens_map.json", {"pad_token": {"content": "<pad>"}})
    write_json(tmp_path / "tokenizer_config.json", {"additional_special_tokens": [{"content": "<turn>"}]})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("<pad><tool><turn>", False) == [size, size + 1, size + 2]
    assert tokenizer.decode([size, size + 1, size + 2]) == "<tool>"


def test_end_mark_that_is_a_piece(tmp_path: Path) -> None:
    """A sentencepiece file may hold the end of a turn as a piece like any other; the config says what it is."""
    folder = sentencepiece(tmp_path, trainer={"user_defined_symbols": ["<|im_end|>"]}, eos_token="<|im_end|>")
    ours, theirs = Tokenizer.from_dir(folder), transformers_tokenizer(folder)
    assert ours.eos_token_id == processor(folder).piece_to_id("<|im_end|>")
    assert ours.encode("fox<|im_end|>fox", False) == theirs.encode("fox<|im_end|>fox", add_special_tokens=False)
    assert ours.decode([ours.eos_token_id]) == ""


def test_space_in_front_of_stretches(tmp_path: Path) -> None:
    """sentencepiece's space in front: of each stretch between special tokens, or (`legacy: false`) of the first."""
    plain = Tokenizer.from_dir(sentencepiece(tmp_path))
    fox, spaced = plain.encode("fox", False), plain.encode(" fox", False)
    assert plain.encode("fox</s>fox", False) == [*fox, 2, *fox]
    write_json(tmp_path / "tokenizer_config.json", {"legacy": False})
    newer = Tokenizer.from_dir(tmp_path)
    assert newer.encode("fox</s> fox", False) == [*fox, 2, *fox]
    assert newer.decode(newer.encode("fox</s>fox", False)) == "foxfox"
    write_json(tmp_path / "tokenizer_config.json", {"add_prefix_space": False})
    without = Tokenizer.from_dir(tmp_path)
    assert without.encode(" fox", False) == fox != spaced
    assert [without.decode(without.encode(text)) for text in STRINGS] == STRINGS


# --- BOS --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("add_bos_token", "expected"), [(None, 1), (True, 1), (False, 0)])
@pytest.mark.parametrize("make", [llama2, sentencepiece])
def test_one_bos_or_none(make: Any, add_bos_token: bool | None, expected: int, tmp_path: Path) -> None:
    """Fault: BOS twice, when the text has it already, or when neither file nor config is asked whether to add it."""
    tokenizer = Tokenizer.from_dir(make(tmp_path, add_bos_token=add_bos_token))
    assert tokenizer.encode("fox")[:2].count(1) == expected
    assert tokenizer.encode("")[:2].count(1) == expected
    assert tokenizer.encode("<s>fox")[:2].count(1) == 1
    assert tokenizer.encode("fox", add_special_tokens=False).count(1) == 0


def test_config_adds_a_bos_that_the_file_does_not(tmp_path: Path) -> None:
    """DeepSeek's way: nothing in the post-processor, `add_bos_token` true. (transformers 5 reads the file alone.)"""
    assert Tokenizer.from_dir(byte_level(tmp_path / "a")).encode("fox")[0] != 1
    folder = byte_level(tmp_path / "b", add_bos_token=True)
    assert Tokenizer.from_dir(folder).encode("fox") == [1, *transformers_tokenizer(folder).encode("fox")]


def test_no_eos_behind_a_prompt(tmp_path: Path) -> None:
    """Fault: a prompt that ends with EOS makes the model begin another text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    backend = Backend.from_file(str(llama2(tmp_path) / "tokenizer.json"))
    marks = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=marks)
    assert Tokenizer.from_dir(save(tmp_path, backend, add_eos_token=True)).encode("fox")[-1] != 2
    assert Tokenizer.from_dir(save(tmp_path, backend, eos_token=None)).encode("fox").count(2) == 0
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=marks)
    ids = Tokenizer.from_dir(save(tmp_path, backend)).encode("fox")
    assert 1 not in ids
    assert 2 not in ids


def test_bos_without_a_config(tmp_path: Path) -> None:
    (llama2(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id is None
    assert tokenizer.encode("fox")[:2].count(1) == 1


def test_named_token_that_is_not_yet_an_added_one(tmp_path: Path) -> None:
    """Fault: an end mark that only the config names is cut into pieces when a template writes it."""
    content = json.loads((byte_level(tmp_path) / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "</s>"]
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("a</s>")[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode([2]) == ""


def test_end_mark_that_the_file_takes_for_text(tmp_path: Path) -> None:
    """Fault: tokenizer.json lists the end mark as not special, and it shows at the end of every answer."""
    content = json.loads((byte_level(tmp_path) / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"] = [{**token, "special": False} for token in content["added_tokens"]]
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode("<s>a<tool></s>")) == "a<tool>"


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    """Fault: a tokenizer.json saved after training cuts every prompt to the length of its training batches."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(llama2(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    long = "the quick brown fox " * 4
    expected = Tokenizer.from_dir(tmp_path).encode(long)
    assert Tokenizer.from_dir(save(tmp_path, backend)).encode(long) == expected


# --- what cannot be taken ---------------------------------------------------------------------------------------------


def test_ids_out_of_range(folder: Path) -> None:
    """A padded model may emit ids that the tokenizer lacks: no text. What no model has is an error with its number."""
    tokenizer = Tokenizer.from_dir(folder)
    fox = tokenizer.encode("fox", False)
    assert tokenizer.decode([tokenizer.vocab_size, *fox, 2**31, 2**70]).strip() == "fox"
    padded = Tokenizer.from_dir(folder, model_vocab_size=tokenizer.vocab_size + 8)
    assert padded.decode([*fox, tokenizer.vocab_size + 7]).strip() == "fox"
    for bad in (tokenizer.vocab_size + 8, -1):
        with pytest.raises(TokenizerError, match=str(bad)):
            padded.decode([*fox, bad])
    for bad_ids in ([-1], [1.0], ["a"], "abc", 7, None, [None]):
        with pytest.raises(TokenizerError):
            tokenizer.decode(bad_ids)


def test_ids_with_holes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 5}, unk_token="<unk>"))
    tokenizer = Tokenizer.from_dir(save(tmp_path, backend, bos_token=None, eos_token=None))
    assert tokenizer.vocab_size == 6
    assert tokenizer.decode([1, 3, 5]) == "a b"


@pytest.mark.parametrize("text", ["a\ud800", "\udc80", None, b"bytes", 5, ["a"]])
def test_texts_that_are_none(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode(text)
    assert "\n" not in str(caught.value)
    assert tokenizer.encode("fox")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
        ("tokenizer.model", ""),
        ("tokenizer.model", "IQ== 0\nIg== 1\n"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": ["a"]}'),
        ("tokenizer_config.json", '{"additional_special_tokens": 5}'),
        ("special_tokens_map.json", "nonsense"),
        ("added_tokens.json", '{"a": null}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_files(name: str, content: str | bytes, folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["sentencepiece_bpe" if name == "tokenizer.model" else "byte_level"]
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_dir(folder)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_no_tokenizer(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json nor tokenizer\.model"):
            Tokenizer.from_dir(str(folder))


def test_json_is_preferred(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["byte_level"], tmp_path / "copy"))
    (folder / "tokenizer.model").write_bytes(b"not read")
    assert Tokenizer.from_dir(folder).encode("fox") == Tokenizer.from_dir(folders["byte_level"]).encode("fox")


def test_import_is_cheap() -> None:
    """Importing the module loads no tokenizer library, no jinja2 and no torch."""
    code = (
        "import minillm.tokenizer, sys; print(*{'torch', 'tokenizers', 'sentencepiece', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "broken",
    [
        {"added_tokens_decoder": {"300": {"content": 5}}},
        {"bos_token": "\ud800"},
        {"chat_template": [{"name": [1], "template": 1}]},
        {"add_bos_token": "false"},
    ],
    ids=["token", "surrogate", "template", "flag"],
)
def test_files_that_say_nonsense_are_one_error(
    broken: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Wrong types and lone surrogates in tokenizer_config.json came out as TypeError or UnicodeEncodeError."""
    shutil.copytree(folders[FILES[0]], tmp_path / "copy")
    write_json(tmp_path / "copy" / "tokenizer_config.json", broken)
    with pytest.raises(TokenizerError) as raised:
        Tokenizer.from_dir(tmp_path / "copy")
    assert "\n" not in str(raised.value)


def test_a_post_processor_with_an_unknown_token_is_one_error(folders: dict[str, Path], tmp_path: Path) -> None:
    """tokenizers answers it with a panic, which is no Exception."""
    shutil.copytree(folders[FILES[0]], tmp_path / "copy")
    content = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    write_json(tmp_path / "copy" / "tokenizer.json", content)
    with pytest.raises(TokenizerError):
        Tokenizer.from_dir(tmp_path / "copy")
