"""The card of the story model: where it comes from, what it is worth, and what it writes, from the figures alone."""

from __future__ import annotations

from typing import Any

JUDGEMENT = "(to be written by whoever has read the samples)"

NO_REASONS = ("kept", "tokens made", "graph replays", "workers")  # what stage 3 counts beside the reasons


def card(figures: dict[str, Any], counts: dict[str, dict[str, Any]], config: dict[str, Any], size: int) -> str:
    """README.md of the model directory.

    Args:
        figures: of `evaluate.measure`. counts: what the stages counted, by stage. size: bytes of the files.
    """
    split, sampled = counts["split"], counts["sample"]
    fallen = {reason: n for reason, n in sampled.items() if reason not in NO_REASONS}
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in fallen.items()) or "none"
    samples = figures["samples"]
    longest_real = max(sample["longest_real"] for sample in samples)
    longest_sampled = max(sample["longest_sampled"] for sample in samples)
    ended = sum(sample["ended"] for sample in samples)
    return f"""# stories: a small model that writes very short stories

A Llama of {figures["parameters"]:,} parameters ({size / 1e6:.1f} MB with its tokenizer), made to show minillm at work
without a download: `python -m minillm.generate --prompt "Once upon a time"`.

## What it is

{config["num_hidden_layers"]} layers of {config["hidden_size"]}, {config["num_attention_heads"]} query heads over \
{config["num_key_value_heads"]} kv heads of {config["head_dim"]}, an MLP of {config["intermediate_size"]}, \
{config["vocab_size"]:,} tokens (byte-level BPE) with
tied embeddings, a context of {config["max_position_embeddings"]} tokens, {config["torch_dtype"]}. \
`<|endoftext|>` begins a text and ends it.

## How it was made

By `examples/train_stories` of this repository, in minutes on one GPU. Random weights, trained on two kinds of text:

- {split["train"]:,} real stories of TinyStories (4 MB of its training set; licence CDLA-Sharing-1.0), without \
{split["broken"]:,} broken ones
  and without those held out;
- {sampled["kept"]:,} stories that SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) wrote after it had been fine-tuned \
on the real ones.
  Of what it wrote, these fell: {reasons}.

No training text is part of the repository. The weights are under the licence of the repository, Apache-2.0.

## What was measured

With minillm in float32.

| | stories model | fine-tuned teacher |
|---|---|---|
| parameters | {figures["parameters"]:,} | {figures["teacher_parameters"]:,} |
| nats per byte of held-out real stories, end token included | {figures["student_nats_per_byte"]:.4f} \
| {figures["teacher_nats_per_byte"]:.4f} |
| stories measured in the time there was, of {figures["held_out_stories"]} held out | {figures["student_stories"]} \
| {figures["teacher_stories"]} |

The {len(samples)} samples below: {ended} ended by themselves; distinct-3 {figures["distinct_3"]:.3f}; the longest
run of words shared with a real training story is {longest_real} words, with a sampled one {longest_sampled}.

## What it cannot do

It knows short stories for small children in simple English and nothing else: it answers no questions, follows no
instructions, has no chat template, and does not know the world. Its stories lose their thread, and characters change
their names or what they want. It has no filter; names and habits are those of its data.

## Judgement

{JUDGEMENT}

## Samples, none chosen

Prompt and answer, of at most {config["max_position_embeddings"] - 16} tokens (`--max-tokens`); \
temperature {figures["temperature"]}, everything else
off; seeds counted up from 0.

{"".join(_sample(sample) for sample in samples)}"""


def _sample(sample: dict[str, Any]) -> str:
    prompt = f'"{sample["prompt"]}"' if sample["prompt"] else 'none (`--prompt ""`)'
    end = "" if sample["ended"] else " (cut by the limit)"
    text = "\n".join(f"> {line}".rstrip() for line in sample["text"].strip().splitlines())
    return f"**Seed {sample['seed']}**, prompt {prompt}{end}\n\n{text}\n\n"
