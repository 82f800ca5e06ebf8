"""Small tokenizers of every kind, trained on the spot: what test_tokenizer.py and test_chat_template.py read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PHRASES = [
    "Hello world, it's a test.",
    "naïve café",
    "Grüße aus Köln",
    "Привет, мир",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "স্বাগতম বিশ্ব",
    "สวัสดีชาวโลก",
    "안녕하세요 세계",
    "한국어 텍스트",
    "こんにちは世界",
    "你好,世界",
    "გამარჯობა მსოფლიო",
    "Բարեւ աշխարհ",
    "ሰላም ልዑል",
    "e\u0301 a\u0308 o\u0302\u0323 Z\u0351\u036b",
    "👩‍👩‍👧‍👦 family",
    "👍🏽 🇰🇷 ❤️‍🔥",
    "def f(x):\n    return x**2  # square",
    '\tif (a[i] != "\\n") { b += 1; }\r\n',
    "x = {'k': [1, 2.5, -3e10]}",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀",
    "a real \ufffd in the text",
]
# The same in eight places: where spaces and line ends are lost, if they are.
SHAPES = ["{}", " {}", "   {}", "{}  ", "\n{}\n\n", "a {}", "{0} {0}", "{0}  {0}"]
STRINGS = [shape.format(phrase) for phrase in PHRASES for shape in SHAPES]

# Half of the scripts are in the training text, so that the others are spelled byte by byte.
TRAINING_TEXT = [phrase for phrase in PHRASES[::2] for _ in range(20)] + ["the quick brown fox says Hello again"] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def byte_level(folder: Path, add_prefix_space: bool = False, **config: Any) -> Path:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen; id 0 `<unk>`, 1 `<s>`, 2 `</s>`, then `<tool>`, not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return save(folder, tokenizer, **config)


def llama2(folder: Path, style: str = "metaspace", **config: Any) -> Path:
    """BPE over "▁" words with byte tokens, as Llama 2's tokenizer.json: the older and the newer way to write it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TRAINING_TEXT, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [token for token in model["vocab"] if token not in tokens]
    tokens += [] if "▁" in tokens else ["▁"]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(folder, tokenizer, **config)


def save(folder: Path, tokenizer: Any, **config: Any) -> Path:
    """tokenizer.json and a tokenizer_config.json; a class that does not rebuild what the file says."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})
    return folder


def sentencepiece(folder: Path, model_type: str = "bpe", trainer: dict[str, Any] | None = None, **config: Any) -> Path:
    """tokenizer.model: "bpe" as Llama's (bytes for what it lacks, spaces kept), "unigram" as the trainer has it."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    llama = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    options = {"vocab_size": 450, **llama} if model_type == "bpe" else {"vocab_size": 200, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TRAINING_TEXT for line in text.splitlines() if line),
        model_prefix=str(folder / "tokenizer"),
        model_type=model_type,
        character_coverage=0.99,
        minloglevel=2,
        **{**options, **(trainer or {})},
    )
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


KINDS: dict[str, Any] = {
    "byte_level": byte_level,
    "byte_level_prefix_space": lambda folder: byte_level(folder, add_prefix_space=True),
    "llama2_metaspace": llama2,
    "llama2_legacy": lambda folder: llama2(folder, style="legacy"),
    "sentencepiece_bpe": sentencepiece,
    "sentencepiece_unigram": lambda folder: sentencepiece(folder, "unigram"),
}
