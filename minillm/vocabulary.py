"""The two file formats of a vocabulary: tokenizer.json (tokenizers) and tokenizer.model (sentencepiece).

Both turn text into ids. Back from ids to text they look different, and are the same underneath: a token is a few bytes.
A character may be spread over several tokens, so a token alone need not be text. `piece()` says which bytes a token
adds to the text before it; `tokenizer.Detokenizer` puts them together. How a token spells its bytes:

    byte-level (GPT-2, Llama 3, Qwen)       one letter a byte: "Ġhel" is b" hel", "Ã©" is b"\\xc3\\xa9" = "é"
    sentencepiece (Llama 1 and 2, Mistral)  text, with "▁" for a space; a character that the vocabulary lacks is spelled
                                            with byte tokens, "<0xC3>" "<0xA9>" = "é"
    others (word level, WordPiece)          text, joined by rules of the file's `decoder`

sentencepiece puts a space before a text that is encoded, so that "word" is the same token at the start and later on,
and takes it off again at the start of a text that is decoded. Hence `at_start` of `piece()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from .errors import TokenizerError

# Appended to a serialised sentencepiece model: `normalizer_spec { add_dummy_prefix: false }` (fields 3 and 3 of
# sentencepiece_model.proto). Protocol buffers merge a message that comes twice, so only this one setting changes.
NO_SPACE_IN_FRONT = b"\x1a\x02\x18\x00"
# Characters from which on a text is encoded as a batch of one, during which the library lets other threads run. A
# microsecond a character, it would hold them up for seconds; for short texts its own threads are not worth starting.
LONG = 4096


class AddedToken(NamedTuple):
    """One token that is looked for in the text before anything else, as tokenizer_config.json describes it."""

    content: str
    special: bool  # a mark such as the end of a turn: decoding skips it when asked to
    lstrip: bool = False  # swallows the white space to its left
    rstrip: bool = False
    normalized: bool = False


class Vocabulary(Protocol):
    """What `Tokenizer` needs from either format."""

    size: int  # ids are 0 to size - 1; a model may have more rows (padding), which stand for no text
    special_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added around them; texts of added tokens become their ids."""

    def piece(self, token_id: int, previous: int | None, at_start: bool) -> bytes:
        """What token `token_id` adds to a text that ends with token `previous` (UTF-8, maybe half a character).

        `at_start`: the text is empty so far. An id inside `size` that stands for nothing gives b"".
        """

    def token_to_id(self, token: str) -> int | None:
        """The id whose token is exactly `token`, or None."""

    def id_to_token(self, token_id: int) -> str:
        """The token as the file writes it; "" if there is none."""

    def default_prefix(self) -> list[int]:
        """The ids that the file itself wants in front of a text: its BOS, or nothing."""


class JsonVocabulary:
    """tokenizer.json, with what the files beside it say about added tokens; where they differ, tokenizer.json wins.

    `added`: added tokens by id; `named`: tokens that are marks (BOS and its like), found in a text wherever they stand.
    """

    def __init__(self, path: Path, added: Mapping[int, AddedToken], named: Collection[str]) -> None:
        import tokenizers

        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every fault of the file
            raise TokenizerError(f"{path} is not a tokenizer that can be read: {one_line(error)}") from error
        # A file saved after training may still cut or pad every text to the length of its training batches.
        self._backend.no_truncation()
        self._backend.no_padding()
        present = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        for token_id, token in sorted(added.items()):
            known = self._backend.token_to_id(token.content)
            is_next = known is None and token_id == self._backend.get_vocab_size()
            if token.content not in present and (known == token_id or is_next):
                self._backend.add_tokens([tokenizers.AddedToken(**token._asdict())])
        for content in sorted(set(named) - present):
            if self._backend.token_to_id(content) is not None:
                self._backend.add_special_tokens([content])

        self._added = {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}
        self.size = max(self._backend.get_vocab().values(), default=-1) + 1  # the ids may have holes
        self.special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)
        # The decoder joins tokens to text. What it does is asked of it, not read from its many spellings in the file.
        decoder = self._backend.decoder
        self._join: Callable[[list[str]], str] = decoder.decode if decoder is not None else " ".join
        self._letters = byte_letters() if self._join(["a", "Ġ"]) == "a " else None
        self._byte_fallback = self._join(["a", "<0x41>"]) == "aA"

    def encode(self, text: str) -> list[int]:
        try:
            if len(text) > LONG:
                return list(self._backend.encode_batch([text], add_special_tokens=False)[0].ids)
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # a word-level vocabulary without an unknown token
            raise TokenizerError(f"the text cannot be encoded: {one_line(error)}") from error

    def piece(self, token_id: int, previous: int | None, at_start: bool) -> bytes:
        token = self.id_to_token(token_id)
        if not token:
            return b""
        if self._letters is not None:
            if token_id in self._added:  # written as it reads, not letter by byte
                return token.encode()
            try:
                return bytes([self._letters[letter] for letter in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        # Any other decoder looks back one token at most (is this the first? did the last one end a word?), so the
        # difference that the token makes to its predecessor is its text, at a cost that does not grow.
        before = [] if previous is None else [self.id_to_token(previous)]
        return self._join([*before, token])[len(self._join(before)) :].encode()

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def default_prefix(self) -> list[int]:
        # What the post-processor puts around nothing. A mark that it puts behind a text is not asked for here:
        # the model goes on where the text ends.
        return list(self._backend.encode("", add_special_tokens=True).ids[:1])


class SentencePieceVocabulary:
    """tokenizer.model: the pieces, and the tokens that tokenizer_config.json or added_tokens.json add to them.

    sentencepiece itself never reads "</s>" in a text as a mark, so a text is cut at the added tokens first. `legacy`:
    every stretch between them gets a space in front (Meta's code encodes each on its own); otherwise only the first.
    `add_prefix_space`: False if the model wants none at all. `added` and `named` as for `JsonVocabulary`.
    """

    def __init__(
        self,
        path: Path,
        added: Mapping[int, AddedToken],
        named: Collection[str],
        legacy: bool = True,
        add_prefix_space: bool = True,
    ) -> None:
        import sentencepiece

        try:
            model = path.read_bytes()
            self._without_space = sentencepiece.SentencePieceProcessor(model_proto=model + NO_SPACE_IN_FRONT)
            with_space = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{path} is not a sentencepiece model: {one_line(error)}") from error
        self._pieces = with_space if add_prefix_space else self._without_space
        self._stretches = self._pieces if legacy else self._without_space

        number = self._pieces.vocab_size()
        marks = {i: AddedToken(self._pieces.id_to_piece(i), special=True) for i in range(number) if self._is_mark(i)}
        found = {content: self._piece_to_id(content) for content in named}
        marks |= {i: AddedToken(content, special=True) for content, i in found.items() if i is not None}
        self._added = {**marks, **added}
        self.size = max([number, *(i + 1 for i in self._added)])
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes = {i: int(self._pieces.id_to_piece(i)[3:5], 16) for i in range(number) if self._pieces.is_byte(i)}
        self._ids = {token.content: i for i, token in self._added.items()}
        # The longest first, since one may begin another.
        by_length = sorted(self._added.values(), key=lambda token: -len(token.content))
        space = (r"", r"\s*")
        patterns = [f"{space[t.lstrip]}({re.escape(t.content)}){space[t.rstrip]}" for t in by_length if t.content]
        self._cut = re.compile("|".join(patterns) or r"(?!)")

    def _is_mark(self, token_id: int) -> bool:
        return bool(self._pieces.is_control(token_id) or self._pieces.is_unknown(token_id))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self._cut.finditer(text):
            ids += self._encode_stretch(text[end : found.start()], is_first=end == 0)
            ids.append(self._ids[found[found.lastindex or 0]])
            end = found.end()
        return ids + self._encode_stretch(text[end:], is_first=end == 0)

    def _encode_stretch(self, text: str, is_first: bool) -> list[int]:
        return list((self._pieces if is_first else self._stretches).encode(text)) if text else []

    def piece(self, token_id: int, previous: int | None, at_start: bool) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if token_id in self._bytes:
            return bytes([self._bytes[token_id]])
        if at_start and token_id < self._pieces.vocab_size():  # the library knows how many spaces this model takes off
            text: str = self._pieces.decode([token_id] if previous is None else [previous, token_id])
            return text.encode()
        return self.id_to_token(token_id).replace("▁", " ").encode()

    def token_to_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        return self._piece_to_id(token)

    def _piece_to_id(self, piece: str) -> int | None:
        found: int = self._pieces.piece_to_id(piece)  # the unknown piece stands for what is not there
        return None if self._pieces.is_unknown(found) else found

    def id_to_token(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id].content
        return str(self._pieces.id_to_piece(token_id)) if token_id < self._pieces.vocab_size() else ""

    def default_prefix(self) -> list[int]:
        return [self.bos_id] if self.bos_id is not None else []

    @property
    def bos_id(self) -> int | None:
        return self._pieces.bos_id() if self._pieces.bos_id() >= 0 else None

    @property
    def eos_id(self) -> int | None:
        return self._pieces.eos_id() if self._pieces.eos_id() >= 0 else None


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2).

    Bytes that print as Latin-1 letters stand for themselves; the other 68, white space and control codes among them,
    take the letters from U+0100 on, in order. So a token never holds white space, and " " is written "Ġ".
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def one_line(error: BaseException) -> str:
    """The message of an error of another library, fit to be part of one sentence."""
    return " ".join(str(error).split()) or type(error).__name__
