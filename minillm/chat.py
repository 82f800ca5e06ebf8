"""`python -m minillm.chat`: a conversation that keeps its history, with answers that stream.

A model has no memory: each answer is made from the whole conversation so far, written out by the model's chat template.
So the history is a list here, it grows with every exchange, and one day it is longer than the model's context. What
goes then is for the person to say (`/drop`, `/reset`); nothing is forgotten behind their back.

It works without a terminal too: every line of a pipe is one message, and stdout holds the answers and nothing else.
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .command import (
    Parser,
    add_options,
    decode_input,
    is_terminal,
    leave,
    load_llm,
    note,
    on_interrupt,
    run,
    sampling_params,
    write,
)
from .errors import MinillmError, RequestError, TokenizerError
from .hub import default_model
from .reply import Reply, StatsLine

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling import SamplingParams

HELP = """/help          this list
/reset         forget the conversation (the system message stays)
/drop          forget the oldest message and its answer
/system TEXT   set the system message; without TEXT, show it
/exit          leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C stops an answer; what was said of it stays in the conversation.
A message that begins with / needs a space in front."""


@dataclass
class Conversation:
    """Who said what. An exchange is a message of the user and the answer to it."""

    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, new: str) -> list[dict[str, str]]:
        """Everything said so far and a new message, as a chat template wants it."""
        said = [] if self.system is None else [("system", self.system)]
        for user, assistant in self.exchanges:
            said += [("user", user), ("assistant", assistant)]
        return [{"role": role, "content": content} for role, content in [*said, ("user", new)]]


class Chat:
    """A conversation with a model.

    Args:
        stats: makes the line of figures after an answer, None if it is not wanted.
    """

    def __init__(
        self, llm: "LLM", params: "SamplingParams", system: str | None, stats: StatsLine | None = None
    ) -> None:
        if not llm.tokenizer.has_chat_template:
            raise TokenizerError(
                "this model has no chat template: use python -m minillm.generate, or an instruct model"
            )
        self._llm, self._params, self._stats = llm, params, stats
        self.conversation = Conversation(system)

    def take(self, line: str) -> bool:
        """Answer a line, or obey it; returns whether to go on. Raises: RequestError, TokenizerError."""
        if line.startswith("/"):
            return self._obey(*line.strip().partition(" ")[::2])
        if line.strip():
            self._answer(line.strip())
        return True

    def _obey(self, command: str, text: str) -> bool:
        conversation, text = self.conversation, text.strip()
        if command == "/help":
            note(HELP)
        elif command == "/reset":
            conversation.exchanges.clear()
            note("the conversation is forgotten")
        elif command == "/drop":
            if conversation.exchanges:
                note(
                    f"forgotten: {conversation.exchanges.pop(0)[0]:.60} ({len(conversation.exchanges)} exchanges stay)"
                )
            else:
                note("there is nothing to forget")
        elif command == "/system":
            conversation.system = text or conversation.system
            note(f"system message: {conversation.system or '(what the template says)'}")
        elif command not in ("/exit", "/quit"):
            raise RequestError(f"{command:.60} is no command: /help lists them, a space in front makes it a message")
        return command not in ("/exit", "/quit")

    def _answer(self, message: str) -> None:
        reply, interrupted = Reply(self._encode(message)), False
        try:
            with on_interrupt(_interrupt_once):
                reply.stream(self._llm, self._params, write)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            write("\n")
        if interrupted and not reply.token_ids:
            return note("stopped before the first word: the message is taken back")
        self.conversation.exchanges.append((message, reply.text))
        if interrupted:
            note("stopped; the conversation keeps what was said")
        elif reply.finish_reason == "length":
            note(self._cut_off(reply))
        if self._stats is not None:
            note(self._stats(reply.stats()))

    def _encode(self, message: str) -> list[int]:
        """Token ids of the conversation with the new message. Raises: RequestError if no answer has room after it."""
        ids, context = (
            self._llm.tokenizer.apply_chat_template(self.conversation.messages(message)),
            self._llm.max_seq_len,
        )
        if len(ids) < context:
            return ids
        what = "with this message the conversation has" if self.conversation.exchanges else "this message has"
        todo = "/drop forgets the oldest exchange, /reset all" if self.conversation.exchanges else "shorten it"
        raise RequestError(f"{what} {len(ids)} tokens, and the context {context}, the answer included: {todo}")

    def _cut_off(self, reply: Reply) -> str:
        if len(reply.prompt_token_ids) + len(reply.token_ids) < self._llm.max_seq_len:
            return f"cut off after {len(reply.token_ids)} tokens: --max-tokens allows more"
        return f"cut off: the context of {self._llm.max_seq_len} tokens is full; /drop forgets the oldest exchange"


def _interrupt_once() -> None:
    """The first Ctrl-C stops the answer; impatient further ones must not disturb how it is put away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def read_line(interactive: bool) -> str | None:
    """The next line, None at the end. Raises: RequestError if it is not UTF-8."""
    if interactive:
        try:
            return input("> ")
        except EOFError:
            write("\n")
            return None
        except UnicodeDecodeError as error:
            raise RequestError("that line is not UTF-8: type it again") from error
    data = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    return decode_input(data) if data else None


def converse(chat: Chat, interactive: bool) -> None:
    """Read and answer until the end. At a terminal a bad line is complained about; in a pipe it ends the command."""
    while True:
        try:
            line = read_line(interactive)
            if line is None or not chat.take(line):
                return
        except MinillmError as error:
            if not interactive:
                raise
            note(f"error: {error}")
        except KeyboardInterrupt:  # at the prompt: an answer keeps its own
            return write("\n")


def chat(arguments: Sequence[str] | None) -> int:
    parser = Parser("minillm.chat", "Talk with a model. Type /help there for the commands.")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: what the model's template says)")
    add_options(parser, max_tokens=1024, default_model=f"{default_model(chat=True)}, fetched once")
    options = parser.parse_args(arguments)
    params = sampling_params(options)
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    with load_llm(options, chat=True) as llm:
        conversation = Chat(llm, params, options.system, StatsLine(llm) if options.stats else None)
        if interactive:
            with suppress(ImportError):  # gives input() a history and line editing, where there is one
                import readline  # noqa: F401
            note(f"{llm.max_seq_len} tokens of context on {llm.device}. /help lists the commands, Ctrl-D leaves.")
        converse(conversation, interactive)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status that `command.py` lists."""
    return run(lambda: chat(arguments))


if __name__ == "__main__":
    leave(main())
