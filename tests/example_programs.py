"""The programs in examples/ as modules, and their servers in a thread, for the tests of them."""

import importlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.server import ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(FOLDER.parent)}  # for this checkout's minillm


def load(name: str) -> ModuleType:
    """`examples/NAME.py` as a module. As for a program that is run there, its folder comes first."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> CompletedProcess[str]:
    """What `python examples/NAME.py ARGUMENTS` does, without a process that imports torch once more."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            status = load(name).main()
        except SystemExit as end:
            status = end.code
    return CompletedProcess([name, *arguments], int(status or 0), out.getvalue(), err.getvalue())


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[int]:
    """The server in a thread; gives its port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
