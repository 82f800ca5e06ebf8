"""Text to token ids and back: one class over both file formats, the chat template, and a decoder that streams.

What is decided here, since checkpoints and libraries differ:

* BOS. Where a model wants one, `encode` gives exactly one: a text that already begins with its BOS ("<s>Hello") gets no
  second. `add_bos_token` of tokenizer_config.json says whether; where it says nothing, the post-processor of
  tokenizer.json does, and a tokenizer.model wants one. (transformers 5 heeds `add_bos_token` only without a
  tokenizer.json, so the two may differ.) An end mark that a file would append (`add_eos_token`) is left out: generation
  goes on from the text. A chat template writes its own BOS, so its text is encoded with nothing added.
* Special tokens written in a text ("</s>", "<|im_end|>") become their ids, in prompts and in messages alike.
* Decoding is streaming: `decode(ids)` is what a `Detokenizer` says when it is fed `ids`, so the two are equal for every
  input. Special tokens are skipped by id; added tokens that are not special stay.
* Bytes that are no UTF-8 become U+FFFD as Python's "replace" does it; an unfinished character at the end becomes
  exactly one U+FFFD, and what is finished before it stays. (tokenizers and sentencepiece write one for each byte.)
* The space in front. Llama 2's vocabulary spells the first word of a text "▁Hello", and decoding takes that space off.
  The ids of a continuation begin with "▁" too, so decoded alone it loses a space which belongs between prompt and
  answer. `decode(ids)` and `detokenizer()` treat ids as a text of its own: "Paris". `detokenizer(prompt_token_ids)`
  treats them as what follows the prompt: " Paris". Byte-level vocabularies (Llama 3, Qwen) keep the space either way.
* `clean_up_tokenization_spaces` is not applied: it would eat spaces of code, and no stream could follow it.
"""

from __future__ import annotations

import codecs
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .chat_template import ChatTemplate
from .errors import TokenizerError
from .json_file import read_json
from .vocabulary import AddedToken, JsonVocabulary, SentencePieceVocabulary, Vocabulary, one_line

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# A character is 4 bytes at most, so the last tokens of a prompt are all that a continuation depends on.
PROMPT_TAIL = 8


class Tokenizer:
    """The tokenizer of one checkpoint. Use `Tokenizer.from_dir`. Safe to share between threads.

    `vocab_size`: ids are below it, those of added tokens included; a model may have more rows.
    `bos_token_id` and `eos_token_id` are None where the checkpoint names none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        names: Mapping[str, str],
        add_bos_token: bool | None = None,
        chat_template: str | None = None,
        model_vocab_size: int | None = None,
    ) -> None:
        """`names`: special tokens by name; `add_bos_token`: None leaves it to the vocabulary's file."""
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self._id_bound = None if model_vocab_size is None else max(vocabulary.size, model_vocab_size)
        ids = {name: vocabulary.token_to_id(token) for name, token in names.items()}
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        self._special_ids = vocabulary.special_ids | {i for i in ids.values() if i is not None}

        prefix = [i for i in vocabulary.default_prefix() if i != self.eos_token_id]
        if self.bos_token_id is None and prefix:
            self.bos_token_id = prefix[0]
            names = {**names, "bos_token": vocabulary.id_to_token(prefix[0])}
        if add_bos_token is not None:
            prefix = [self.bos_token_id] if add_bos_token and self.bos_token_id is not None else []
        self._prefix = prefix
        self._chat_template = ChatTemplate(chat_template, names) if chat_template is not None else None

    @classmethod
    def from_dir(cls, path: str | Path, model_vocab_size: int | None = None) -> Tokenizer:
        """Read tokenizer.json, or else tokenizer.model, and the files beside it that say how it is used.

        `model_vocab_size` is `vocab_size` of config.json: ids up to there may come out of the model though the
        tokenizer lacks them, and decode to ""; beyond, an id is an error. Without it there is no upper bound.
        Raises TokenizerError if there is no tokenizer, or one of the files is broken.
        """
        try:
            return cls._from_files(Path(path), model_vocab_size)
        except TokenizerError:
            raise
        except BaseException as error:  # files may hold anything, and tokenizers answers some of it with a panic
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise TokenizerError(f"{path}: the files of the tokenizer are broken: {one_line(error)}") from error
            raise

    @classmethod
    def _from_files(cls, folder: Path, model_vocab_size: int | None) -> Tokenizer:
        config = _read_json(folder / "tokenizer_config.json")
        names = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
        added = _added_tokens(config, _read_json(folder / "added_tokens.json"), set(names.values()))
        vocabulary: Vocabulary
        if (folder / "tokenizer.json").is_file():
            vocabulary = JsonVocabulary(folder / "tokenizer.json", added, names.values())
        elif (folder / "tokenizer.model").is_file():
            pieces = SentencePieceVocabulary(
                folder / "tokenizer.model",
                added,
                names.values(),
                legacy=config.get("legacy") is not False,
                add_prefix_space=config.get("add_prefix_space") is not False,
            )
            own = {"bos_token": pieces.bos_id, "eos_token": pieces.eos_id}
            names = {name: pieces.id_to_token(i) for name, i in own.items() if i is not None} | names
            vocabulary = pieces
        else:
            raise TokenizerError(f"{folder} holds no tokenizer: neither tokenizer.json nor tokenizer.model is there")
        add_bos = config.get("add_bos_token")
        if not isinstance(add_bos, (bool, type(None))):
            raise TokenizerError(
                f"{folder}: add_bos_token of tokenizer_config.json must be true or false, not {add_bos!r}"
            )
        return cls(vocabulary, names, add_bos, _chat_template(folder, config), model_vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; with `add_special_tokens` one BOS in front, if the model wants it and it is not there.

        Raises TokenizerError if `text` is no str or holds a lone surrogate, which has no UTF-8.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"{text[error.start]!r} at position {error.start}"
            raise TokenizerError(f"the text is not valid Unicode: {problem} is half of a surrogate pair") from error
        ids = self._vocabulary.encode(text)
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            return [*self._prefix, *ids]
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as a text of its own (see the module's docstring about the space in front).

        Ids that a padded model has and the tokenizer lacks give "". Raises TokenizerError for ids out of range.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        try:
            ids = list(token_ids)
        except TypeError:
            raise TokenizerError(f"token ids must be a list of ints, not {type(token_ids).__name__}") from None
        return "".join([detokenizer.add(token_id) for token_id in ids]) + detokenizer.flush()

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for ids that come one by one, as what follows `prompt_token_ids`, or as a text of its own."""
        skip = self._special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._vocabulary, skip, self._id_bound, prompt_token_ids)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, written by the checkpoint's template; then the head of the answer, if asked.

        Raises TokenizerError if there is no template, a message is malformed, or the template fails or refuses.
        """
        if self._chat_template is None:
            raise TokenizerError("this model has no chat template: give it a plain prompt, or use an instruct model")
        return self.encode(self._chat_template.render(messages, add_generation_prompt), add_special_tokens=False)


class Detokenizer:
    """Turns ids into text as they come: every piece is final, and none holds half a character.

    What an id adds depends on the id before it and on whether the text has begun, so a step costs the same however long
    the text is. At most 3 bytes are held back. After any ids, the pieces and `flush()` joined are `decode(ids)`.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip: frozenset[int], id_bound: int | None, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip
        self._id_bound = id_bound
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._previous: int | None = None
        self._at_start = True
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in skip:
                tail.append(token_id)
            if len(tail) == PROMPT_TAIL:
                break
        for token_id in reversed(tail):
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """The text that is final now that `token_id` has come; "" while a character is unfinished.

        Raises TokenizerError for an id that is negative, beyond the model's vocabulary, or no int.
        """
        token_id = self._checked(token_id)
        if token_id in self._skip or token_id >= self._vocabulary.size:
            return ""
        piece = self._vocabulary.piece(token_id, self._previous, self._at_start)
        self._previous = token_id
        self._at_start = self._at_start and not piece
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left when no more ids come: one U+FFFD for an unfinished character, else ""."""
        return self._utf8.decode(b"", final=True)

    def _checked(self, token_id: int) -> int:
        try:
            token_id = operator.index(token_id)  # an int, or a NumPy or PyTorch number that is one
        except TypeError:
            raise TokenizerError(f"a token id must be an int, not {type(token_id).__name__}") from None
        if token_id < 0 or (self._id_bound is not None and token_id >= self._id_bound):
            limits = "below 0" if token_id < 0 else f"not below the vocabulary's {self._id_bound}"
            raise TokenizerError(f"token id {token_id} is {limits}")
        return token_id


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file."""
    return read_json(path, TokenizerError) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """A token is written "<s>" or {"content": "<s>", ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _values(tokens: Any) -> list[Any]:
    """`extra_special_tokens` is a list of tokens, or names and tokens, or null."""
    return list(tokens.values() if isinstance(tokens, dict) else tokens or [])


def _named_tokens(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...}: those that are named, tokenizer_config.json before special_tokens_map.json."""
    found = {name: _content(config.get(name)) or _content(special_tokens_map.get(name)) for name in NAMED_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _added_tokens(config: dict[str, Any], added_tokens: dict[str, Any], named: set[str]) -> dict[int, AddedToken]:
    """The added tokens by id: `added_tokens_decoder` of tokenizer_config.json, else the older added_tokens.json."""
    described = config.get("added_tokens_decoder") or {str(i): {"content": token} for token, i in added_tokens.items()}
    added: dict[int, AddedToken] = {}
    try:
        special = {_content(token) for key in LISTED_TOKENS for token in _values(config.get(key))} | named
        for key, token in described.items():
            content = token["content"]
            is_special = bool(token.get("special", False)) or content in special
            added[int(key)] = AddedToken(
                content,
                is_special,
                bool(token.get("lstrip", False)),
                bool(token.get("rstrip", False)),
                bool(token.get("normalized", not is_special)),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"the added tokens beside the tokenizer are malformed: {error!r}") from error
    return added


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else `chat_template` of the config: a text, or named ones, of which "default" counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} cannot be read: {one_line(error)}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
