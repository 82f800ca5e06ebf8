"""The programs in examples/ as modules, and their servers in a thread, for the tests of them."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    """`examples/NAME.py` as a module. As for a program that is run there, its folder comes first."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python examples/NAME.py ARGUMENTS`, with this checkout's minillm."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


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
