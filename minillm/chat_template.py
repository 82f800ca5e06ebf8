"""A chat template: the Jinja program of a checkpoint that writes a conversation the way its model was trained on.

A model knows no roles. It knows texts such as "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", and goes on
from there. Each family has its own marks, so the checkpoint carries the template. It is code from the internet: it runs
in Jinja's sandbox, sees the messages and a few names, and can reach nothing else. (It may still loop for ever.)

The names that a template may use are those of transformers' `apply_chat_template`, where templates are tried out:
`messages`, `add_generation_prompt`, `tools` and `documents` (none here), `bos_token` and its like, the functions
`raise_exception` and `strftime_now`, the filter `tojson`, `break` and `continue`, and the block `generation`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import TokenizerError
from .vocabulary import one_line

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """`source` is the template; `names` are the special tokens by name (`bos_token` and so on), those that exist."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is broken in line {error.lineno}: {one_line(error)}") from error
        except Exception as error:
            raise TokenizerError(f"the chat template cannot be compiled: {one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text, special tokens written out; `add_generation_prompt` adds the answer's head.

        Raises TokenizerError if a message lacks a string `role` or `content`, or if the template fails or refuses.
        """
        conversation = check_messages(messages)
        try:
            return self._compiled.render(
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._names,
            )
        except TokenizerError:
            raise
        except Exception as error:  # whatever the template does wrong, from an undefined name to 1 / 0
            raise TokenizerError(f"the chat template fails on these messages: {one_line(error)}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of `messages`, each a dict with a string `role` and a string `content`; other keys stay."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise TokenizerError('messages is empty: give at least {"role": "user", "content": "..."}')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise TokenizerError(f'message {index} must be a dict with "role" and "content", not {kind}')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise TokenizerError(f'message {index} needs a string as its "{key}", and has {found}')
    return [dict(message) for message in messages]


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates expect it: sandboxed, lines that hold only a block leave no trace."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the answers for training; for us it is its content."""

        tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter writes for HTML: "<" as "\u003c".
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
