"""The shapes of real models, as their config.json says them: a benchmark needs sizes, not trained weights.

The time of a decode step depends on how many bytes are read and in which pieces, and not on their values. So random
weights of the right shape measure the same, without a download.
"""

from typing import Any

_LLAMA_3 = dict(
    vocab_size=128256,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_id=128001,
)
_SMOLLM2 = dict(
    vocab_size=49152,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
_ALL = dict(model_type="llama", rms_norm_eps=1e-5, dtype="bfloat16", bos_token_id=1, eos_token_id=2)


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _ALL
    | dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    ),
    "stories": _ALL  # what examples/train_stories makes
    | dict(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": _ALL
    | _SMOLLM2
    | dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    ),
    "smollm2-360m": _ALL
    | _SMOLLM2
    | dict(
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        head_dim=64,
    ),
    "llama-3.2-1b": _ALL
    | _LLAMA_3
    | dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        rope_parameters=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _ALL
    | _LLAMA_3
    | dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        head_dim=128,
        rope_parameters=_llama3_rope(8.0),
        tie_word_embeddings=False,
    ),
    "llama-2-7b": _ALL
    | dict(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
}
