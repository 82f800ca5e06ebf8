"""`python -m minillm.generate --prompt "..."`: one prompt in, the model's text out, as it is made.

    python -m minillm.generate "Once upon a time"
    echo "Once upon a time" | python -m minillm.generate --temperature 0 --stats
    python -m minillm.generate --chat "What is a KV cache?" --json

Everything is checked before the model is loaded that can be: the options, the prompt, the sampling values.
"""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from .command import (
    Parser,
    add_options,
    decode_input,
    is_terminal,
    leave,
    load_llm,
    note,
    run,
    sampling_params,
    write,
)
from .errors import RequestError
from .hub import default_model
from .reply import Reply, StatsLine

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling import SamplingParams

DEFAULT_PROMPT = "Once upon a time"


def build_parser() -> Parser:
    parser = Parser("minillm.generate", "Generate text from a Llama checkpoint. The text goes to stdout as it is made.")
    add = parser.add_argument
    add(
        "text",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; - reads it from stdin, which a pipe does by itself, without one newline at its end "
        f'(default on a terminal: "{DEFAULT_PROMPT}")',
    )
    add("--prompt", metavar="PROMPT", help="the same as an option")
    add("--chat", action="store_true", help="ask it as a user of the model's chat template (default: plain text)")
    add("--system", metavar="TEXT", help="system message in front; implies --chat (default: what the template says)")
    add(
        "--json",
        action="store_true",
        help="instead of streaming, write one JSON object at the end: model, text, token_ids, prompt_token_ids, "
        "finish_reason (null if Ctrl-C ended it), stats, sampling, device, dtype (default: off)",
    )
    add_options(parser, max_tokens=512, default_model=f"{default_model()}; with --chat {default_model(chat=True)}")
    return parser


def read_prompt(parser: Parser, options: argparse.Namespace) -> str:
    """The prompt from wherever it is given. Raises: RequestError if stdin holds none, or is not UTF-8."""
    if options.text is not None and options.prompt is not None:
        parser.error("two prompts were given: use either --prompt or the plain argument")
    given = options.text if options.prompt is None else options.prompt
    if given is not None and given != "-":
        return given
    if given is None and is_terminal(sys.stdin):
        note(f'no prompt was given (--prompt "..."), so this continues: {DEFAULT_PROMPT}')
        return DEFAULT_PROMPT
    text = decode_input(sys.stdin.buffer.read()) if sys.stdin is not None else ""
    if not text and given is None:
        raise RequestError('there is no prompt: give one with --prompt "...", or pipe one in')
    # `echo` ends its line; a text that is nothing but a newline is meant
    return text.removesuffix("\n").removesuffix("\r") or text


def is_chat(options: argparse.Namespace) -> bool:
    """Whether the prompt goes through the model's chat template."""
    return options.chat or options.system is not None


def as_json(options: argparse.Namespace, llm: "LLM", params: "SamplingParams", reply: Reply) -> str:
    """The object of --json, on one line, in ASCII, so that no terminal's encoding can break it."""
    return json.dumps(
        {
            "model": default_model(is_chat(options)) if options.model is None else options.model,
            "text": reply.text,
            "token_ids": reply.token_ids,
            "prompt_token_ids": reply.prompt_token_ids,
            "finish_reason": reply.finish_reason,
            "stats": asdict(reply.stats()),
            "sampling": asdict(params),
            "device": str(llm.device),
            "dtype": str(llm.dtype).removeprefix("torch."),
        }
    )


def generate(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    prompt = read_prompt(parser, options)
    params = sampling_params(options)
    if options.json and params.seed is None:  # so that the object says how to make the same text again
        params = replace(params, seed=secrets.randbits(32))
    with load_llm(options, is_chat(options)) as llm:
        if is_chat(options):
            system = [] if options.system is None else [{"role": "system", "content": options.system}]
            ids = llm.tokenizer.apply_chat_template([*system, {"role": "user", "content": prompt}])
        else:
            ids = llm.tokenizer.encode(prompt)
        reply = Reply(ids)
        try:
            reply.stream(llm, params, show=write if not options.json else lambda text: None)
        finally:  # an interrupt or an error leaves what was made, too
            if reply.token_ids or reply.finish_reason is not None:
                write((as_json(options, llm, params, reply) if options.json else "") + "\n")
        if not reply.token_ids:
            note(f"the prompt has {len(ids)} tokens and fills the context of {llm.max_seq_len}: nothing could be added")
        if options.stats:
            note(StatsLine(llm)(reply.stats()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status that `command.py` lists."""
    return run(lambda: generate(arguments))


if __name__ == "__main__":
    leave(main())
