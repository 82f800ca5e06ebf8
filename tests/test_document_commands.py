"""Every command of every document is run, as it stands there, or it is said here why not.

They run beside a tiny model under the name of SmolLM2, the story model of this repository, and the few files that the
documents speak of.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_documents import RESULTS, ROOT, SHELL, commands
from tiny import make_tiny_model

LEFT_OUT = {
    "python -m pytest": "this is it",
    "python -m venv": "what these tests run in",
    "python -m minillm.convert": "needs a GGUF file: test_convert.py makes some",
    "python -m minillm.download": "needs the network: test_download.py stands in for it",
    "python -m minillm.bench decode": "takes hours of a CPU with these shapes: test_bench.py runs small ones",
    "python -m minillm.bench prefill": "as decode: test_bench_prefill.py",
    "python -m minillm.bench traffic": "as decode: test_bench_traffic.py",
    "python -m examples.story.page": "needs the figures of a GPU: test_story.py makes some up",
    "python -m examples.tune_kernels": "needs a GPU, for minutes",
    "python examples/web_app.py": "serves for ever: test_examples_web_app.py asks it",
    "python examples/openai_server.py": "serves for ever: test_examples_openai_server.py asks it",
}
GPU_ONLY = tuple(f"python -m minillm.bench {bench} " for bench in ("launches", "pieces", "pool", "retarget", "serve"))
STDIN = {
    "python -m minillm.generate --chat": "Write a haiku about rain.\n",
    "python -m minillm.chat": "Hello!\n/quit\n",
}


def to_run() -> list[object]:
    found = []
    for parameter in commands():
        (words,) = parameter.values
        line = " ".join(words).replace("python3 ", "python ", 1)
        reason = next((why for start, why in LEFT_OUT.items() if line.startswith(start)), None)
        if words[0] in SHELL:
            continue
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        found.append(pytest.param(words, id=parameter.id, marks=marks))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the documents' commands expect to find."""
    root = tmp_path_factory.mktemp("commands")
    make_tiny_model(root / "weights" / "SmolLM2-135M-Instruct")
    (root / "examples" / "results").mkdir(parents=True)
    shutil.copy(RESULTS / "h200-decode-1b.json", root / "1b.json")
    prompts = [{"prompt": f"Once upon a time, {what}", "max_tokens": 5} for what in ("a cat", "a dog")]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    return root


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the benchmarks and the story take minutes")
@pytest.mark.parametrize("words", to_run())
def test_a_command_runs(words: tuple[str, ...], place: Path) -> None:
    line = " ".join(words)
    if "picture" in words:
        pytest.importorskip("matplotlib", reason="pictures need matplotlib, the extra `plot`")
    found = [str(ROOT / word) if word.endswith(".py") else word for word in words[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MINILLM_WEIGHTS": str(place / "weights"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *found], cwd=place, env=env, capture_output=True, text=True, timeout=300,
        input=next((text for start, text in STDIN.items() if line.startswith(start)), ""),
    )  # fmt: skip
    if f"{line} ".startswith(GPU_ONLY):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "CUDA" in done.stderr or "--shape" in done.stderr  # it needs a GPU, or, in a sentence, a shape
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() or (place / "answers.jsonl").is_file()
