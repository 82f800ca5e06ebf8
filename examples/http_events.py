"""What the web servers here stand on: JSON in; JSON, a page, or server-sent events out; and hang-ups noticed.

This is no program, but the part of `web_app.py` and `openai_server.py` that is about HTTP and not about models. It is
the server of Python's standard library, with a thread for each connection. Server-sent events are lines "data: ...",
each followed by an empty line, in an answer that grows while somebody reads it.

A client that goes away must not keep a row of the model busy. A write to it would fail, but a request that waits for
its first token writes nothing. So while there are handles, a second thread listens on the connection, hears the end of
it, and cancels them, wherever they are by then: in the queue, in the prefill, or half-way.
"""

import json
import queue
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minillm import Chunk
from minillm.handle import Handle

Json = dict[str, Any]
MAX_BODY = 8 * 2**20  # bytes
LISTEN = 0.25  # seconds from one look whether a call has ended to the next


class Refused(Exception):
    """A call that is not answered as it is. `code` and `param` tell a program what is wrong, and with which field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Server(ThreadingHTTPServer):
    """The server. `closing`: whether new calls are refused."""

    request_queue_size = 128  # connections that are not accepted yet
    closing = False

    def __init__(self, address: tuple[str, int], handler: type["Handler"]) -> None:
        self.calls = set[Handler]()  # the connections that wait for an answer
        super().__init__(address, handler)

    def drain(self, seconds: float) -> None:
        """Refuse new calls, and give those on their way some time to end."""
        self.closing, deadline = True, time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:
            time.sleep(0.05)


class Handler(BaseHTTPRequestHandler):
    """One connection, and the calls that come through it one after another."""

    server: Server
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    timeout = 60.0  # seconds that a client may take to send or to read

    def answer(self, method: str, path: str, body: bytes) -> None:
        """Answer a call, with `reply` or `send_events`. What it raises goes through `refusal`."""
        raise NotImplementedError

    def refusal(self, error: Exception) -> tuple[int, Json]:
        """Status and content for a call that failed."""
        raise NotImplementedError

    def reply(self, status: int, content: Json | str) -> None:
        """A whole answer: an object as JSON, a text as a page."""
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        kind = "text/html; charset=utf-8" if isinstance(content, str) else "application/json"
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(data))})
        self.wfile.write(data)

    def send_events(self, events: Iterable[Json | str]) -> None:
        """An answer in pieces, each as soon as the iterator gives it."""
        # in HTTP/1.0 such an answer is as long as the connection; in HTTP/1.1 it comes in chunks
        self.close_connection |= self.request_version == "HTTP/1.0"
        length = {} if self.request_version == "HTTP/1.0" else {"Transfer-Encoding": "chunked"}
        self._head(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-store", **length})
        self._streaming = True
        for event in events:
            self._event(event)
        self._chunk(b"")

    @contextmanager
    def cancelling(self) -> Iterator[list[Handle]]:
        """A list for handles, which are cancelled when the client hangs up, and at the end of the block."""
        handles, ended, ear = list[Handle](), threading.Event(), self.connection.dup()

        def cancel() -> None:
            for handle in tuple(handles):
                handle.cancel()

        def listen() -> None:
            with ear:
                ear.settimeout(LISTEN)  # of its own: the connection keeps another
                while not ended.is_set():
                    try:
                        if ear.recv(1, socket.MSG_PEEK):
                            return  # the next call, which comes early
                    except TimeoutError:
                        continue
                    except OSError:
                        pass
                    cancel()
                    ended.wait(LISTEN)

        threading.Thread(target=listen, daemon=True).start()
        try:
            yield handles
        finally:
            ended.set()
            cancel()

    def handle(self) -> None:
        with suppress(ConnectionError):  # it ends between two calls
            super().handle()

    def do_POST(self) -> None:
        self._streaming = False
        self.server.calls.add(self)
        try:
            if self.server.closing:
                raise Refused(503, "the server is closing: ask again later")
            self.answer(self.command, self.path.partition("?")[0], self._body())
        except (OSError, CancelledError):  # there is nobody left to answer
            self.close_connection = True
        except Exception as error:
            status, content = self.refusal(error)
            if status == 500:
                traceback.print_exception(error)
            if self._streaming:  # too late for a status
                self._event(content)
                self._chunk(b"")
            else:
                self.reply(status, content)
        finally:
            self.server.calls.discard(self)

    do_GET = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses, such as a strange method."""
        self.close_connection = True
        self.reply(code, self.refusal(Refused(code, message or "this is no call"))[1])

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "" if self.command == "POST" else "0")
        known, digits = length.isascii() and length.isdecimal(), length.lstrip("0") or "0"
        # how many digits comes first: Python refuses to read a number of thousands of them
        if known and len(digits) <= len(str(MAX_BODY)) and int(digits) <= MAX_BODY:
            return self.rfile.read(int(digits))
        self.close_connection = True  # the body stands where the next call should begin
        raise Refused(413 if known else 411, f"a body needs a Content-Length of at most {MAX_BODY} bytes")

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, event: Json | str) -> None:
        self._chunk(b"data: %b\n\n" % (event if isinstance(event, str) else json.dumps(event)).encode())

    def _chunk(self, data: bytes) -> None:
        """A piece of an answer; the empty one is the end."""
        old = self.request_version == "HTTP/1.0"
        self.wfile.write(data if old else b"%x\r\n%b\r\n" % (len(data), data))


def merged(handles: Sequence[Handle]) -> Iterator[tuple[int, Chunk]]:
    """The chunks of several answers, each as soon as it is there, with the index of its handle."""
    arrived: queue.SimpleQueue[tuple[int, Chunk] | Exception | None] = queue.SimpleQueue()

    def read(index: int) -> None:
        try:
            for chunk in handles[index]:
                arrived.put((index, chunk))
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    for index in range(len(handles)):
        threading.Thread(target=read, args=[index], daemon=True).start()
    ended = 0
    while ended < len(handles):
        item = arrived.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            ended += 1
        else:
            yield item
