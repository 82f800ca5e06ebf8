"""The tokenizer inside a GGUF file, written as the files that Hugging Face models ship.

GGUF stores a vocabulary as parallel lists (the text of each token, its kind, and either scores or merges), and names
the algorithm in `tokenizer.ggml.model`:

- "gpt2": byte-level BPE. Merges are given; how text is cut into words before merging is only a *name*
  (`tokenizer.ggml.pre`), because the rule itself is code in llama.cpp. It becomes tokenizer.json.
- "llama": SentencePiece BPE. Merges follow from the scores. It becomes tokenizer.model, which is a protobuf message;
  the few fields needed are encoded here by hand, in twenty lines, instead of depending on protobuf.

Beside either lie tokenizer_config.json and chat_template.jinja.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# The kinds of a token; GGUF uses SentencePiece's numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
# Chat models end a turn with one of these, but a file may name only the end of the whole text as its eos.
END_OF_TURN = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>"})

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
PRE_TOKENIZERS = {  # the names in tokenizer.ggml.pre -> the rule
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "default": "gpt2",
    "smollm": "digits",
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
}


def special_token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """`bos`, `eos`, `unk`, `pad` -> token id, those that the file names. Raises TokenizerError if out of range."""
    size = len(metadata.get("tokenizer.ggml.tokens", []))
    found = {}
    for name, key in SPECIAL_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        # Absent ids are written as the largest uint32 by some converters.
        if token_id is None or token_id == 0xFFFFFFFF:
            continue
        if not 0 <= token_id < size:
            raise TokenizerError(f"tokenizer.ggml.{key} is {token_id}, outside the vocabulary of {size} tokens")
        found[name] = token_id
    return found


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Every token that ends a text or a turn, the file's eos first."""
    ids = special_token_ids(metadata)
    ends = [ids["eos"]] if "eos" in ids else []
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    for key in ("eot_token_id", "eom_token_id"):
        token_id = metadata.get(f"tokenizer.ggml.{key}", -1)
        if 0 <= token_id < len(tokens):
            ends.append(token_id)
    ends += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in END_OF_TURN
    ]
    return list(dict.fromkeys(ends))


def write_tokenizer(metadata: dict[str, Any], directory: Path, context: int) -> None:
    """Write tokenizer.json or tokenizer.model, tokenizer_config.json and chat_template.jinja into `directory`.

    context: the model's context length, noted as `model_max_length`.
    Raises TokenizerError for a missing, unknown or inconsistent vocabulary.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"the tokenizer of this GGUF file is {model!r}; 'gpt2' and 'llama' can be converted")
    if not tokens or len(set(tokens)) != len(tokens) or "" in tokens:
        raise TokenizerError("the vocabulary of this GGUF file is missing, or has an empty or a repeated token")
    types = list(metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise TokenizerError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")

    byte_level = model == "gpt2"
    pre = metadata.get("tokenizer.ggml.pre", "")
    if byte_level and pre not in PRE_TOKENIZERS:
        names = ", ".join(PRE_TOKENIZERS)
        raise TokenizerError(f"unknown pre-tokenizer {pre!r} (tokenizer.ggml.pre); known are {names}")
    ids = special_token_ids(metadata)
    # llama.cpp's defaults, for files that do not say.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", not byte_level or PRE_TOKENIZERS[pre] == LLAMA3_SPLIT)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if byte_level else "LlamaTokenizer",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(add_bos and "bos" in ids),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in ids),
        **{f"{name}_token": tokens[token_id] for name, token_id in ids.items()},
        "added_tokens_decoder": {
            str(i): _added_token(token, special=kind != USER_DEFINED)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        },
    }
    if byte_level:
        _write_byte_level(metadata, tokens, types, config, directory / "tokenizer.json")
    else:
        config["add_prefix_space"] = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        config["legacy"] = False  # transformers' word for: a prefix space before the text only, not after each special
        _write_sentencepiece(metadata, tokens, types, config["add_prefix_space"], directory / "tokenizer.model")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (directory / "chat_template.jinja").write_text(template, "utf-8")


def _added_token(content: str, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, **flags, "special": special}


def _write_byte_level(
    metadata: dict[str, Any], tokens: list[str], types: list[int], config: dict[str, Any], path: Path
) -> None:
    """Byte-level BPE as tokenizer.json. Bytes without a token are dropped from a text, as llama.cpp does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pre = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    # A token that can be merged contains no space (byte 32 is written "Ġ"), so the space parts the pair.
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if not merges:
        raise TokenizerError("the GGUF file has a byte-level vocabulary but no tokenizer.ggml.merges")
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=pre == LLAMA3_SPLIT,  # Llama 3: a word that is a token is that token, merges or not
            )
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"the merges of this GGUF file do not fit its vocabulary: {error}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    added = [AddedToken(**token) for token in config["added_tokens_decoder"].values()]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    before = [config["bos_token"]] if config["add_bos_token"] else []
    after = [config["eos_token"]] if config["add_eos_token"] else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(before + after)],
        )
    tokenizer.save(str(path))


def _pre_tokenizer(rule: str) -> PreTokenizer:
    """How a text is cut before merging: GPT-2's rule, the same with each digit alone, or a regular expression."""
    from tokenizers import Regex, pre_tokenizers

    if rule == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _write_sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], add_dummy_prefix: bool, path: Path
) -> None:
    """SentencePiece BPE as tokenizer.model, read back once so that a bad vocabulary fails here and not at first use."""
    from sentencepiece import SentencePieceProcessor

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise TokenizerError(f"the GGUF file has {len(tokens)} tokens but {len(scores or [])} scores")
    ids = special_token_ids(metadata)
    if UNKNOWN not in types:
        types[ids.get("unk", 0)] = UNKNOWN  # SentencePiece demands one; older files mark it otherwise
    model = sentencepiece_model(tokens, scores, types, ids, add_dummy_prefix)
    try:
        SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise TokenizerError(f"the vocabulary of this GGUF file makes no SentencePiece model: {error}") from error
    path.write_bytes(model)


def sentencepiece_model(
    tokens: list[str], scores: list[float], types: list[int], ids: dict[str, int], add_dummy_prefix: bool
) -> bytes:
    """A SentencePiece `ModelProto` of the BPE kind. Field numbers: sentencepiece_model.proto."""
    pieces = b"".join(
        # In a text to be matched, spaces are already written "▁"; GGUF keeps them plain in user-defined tokens.
        _field(1, _field(1, token.replace(" ", "▁")) + _field(2, float(score)) + _field(3, kind or NORMAL))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, int(BYTE in types))  # BPE, size, byte_fallback
    for number, name, default in ((40, "unk", types.index(UNKNOWN)), (41, "bos", -1), (42, "eos", -1), (43, "pad", -1)):
        token_id = default if name == "unk" else ids.get(name, default)
        trainer += _field(number, token_id)
        if token_id >= 0:
            trainer += _field(number + 5, tokens[token_id])  # unk_piece = 45, bos_piece = 46, ...
    # Text is taken as it is: no Unicode folding, no removal of repeated spaces; spaces become "▁".
    normalizer = _field(1, "identity") + _field(3, int(add_dummy_prefix)) + _field(4, 0) + _field(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """One protobuf field: a key of number and wire type, then the value (varint, 4 bytes, or length + bytes)."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)  # a negative int takes all 64 bits
    data = value.encode("utf-8") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
