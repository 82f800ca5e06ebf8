"""examples/batch_file.py: order, errors with their lines, going on after a stop, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from example_programs import ENVIRONMENT, FOLDER, load, run
from tiny import make_tiny_model

from minillm import LLM, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


def batch(model: Path, source: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run the program on a file beside its answers."""
    target = source.with_name("out.jsonl")
    done = run("batch_file", str(source), str(target), "--model", str(model), "--rows", "3", *options)
    return done, [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_every_line_gets_its_answer_in_order(model: Path, tmp_path: Path) -> None:
    """The first ones are the longest, so that the last are done before them."""
    lines: list[dict[str, Any]] = [
        {"id": f"n{i}", "prompt": "the king", "max_tokens": 40 - i, "ignore_eos": True, "seed": i, "temperature": 1.2}
        for i in range(30)
    ]
    lines += [{"messages": [{"role": "user", "content": "the king"}]}, {"prompt": [5, 6], "id": 7}]
    done, records = batch(model, write(tmp_path / "in.jsonl", *lines), "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert [record["id"] for record in records] == [*(f"n{i}" for i in range(30)), 31, 7]
    assert [record["line"] for record in records] == list(range(1, 33))
    assert [record["completion_tokens"] for record in records[:30]] == [40 - i for i in range(30)]
    with LLM(model, device="cpu") as llm:
        for line, record in zip(lines[:3], records[:3], strict=True):
            own = {name: value for name, value in line.items() if name not in ("id", "prompt")}
            assert record["text"] == llm.generate("the king", SamplingParams(**own)).text
        chat = llm.chat(lines[30]["messages"], SamplingParams(max_tokens=5, temperature=0))
        assert (records[30]["text"], records[30]["prompt_tokens"]) == (chat.text, len(chat.prompt_token_ids))
        assert records[31]["text"] == llm.generate([5, 6], SamplingParams(max_tokens=5, temperature=0)).text


def test_bad_lines_are_told_with_their_number_and_the_others_answered(model: Path, tmp_path: Path) -> None:
    bad = {
        2: ("{", "not valid JSON"),
        3: ("[1]", "must be a JSON object"),
        4: ({"id": "x"}, "needs a prompt or messages"),
        5: ({"prompt": "a", "messages": []}, "not both"),
        6: ({"prompt": "a", "temprature": 1}, "'temprature' is not known"),
        7: ({"prompt": "a", "temperature": -1}, "temperature"),
        8: ({"prompt": ""}, "prompt is empty"),
        9: ({"messages": [{"role": "user"}]}, "content"),
        10: ({"id": "first", "prompt": "a"}, "line 1 already"),
        11: ({"id": [], "prompt": "a"}, "an id must be"),
        12: ({"id": "long", "prompt": "the " * 20000}, "context 16384"),
        13: ({"prompt": 5}, "a text or a list of token ids"),
    }
    source = write(
        tmp_path / "in.jsonl",
        {"id": "first", "prompt": "the"},
        *(line for line, _ in bad.values()),
        "",
        {"prompt": "a"},
    )
    done, records = batch(model, source, "--max-tokens", "3")
    assert done.returncode == 1
    assert [record["line"] for record in records] == [*range(1, 14), 15]
    assert "text" in records[0]
    assert "text" in records[-1]
    for record, (number, (_, words)) in zip(records[1:-1], bad.items(), strict=True):
        assert words in record["error"]
        assert f"line {number}: {record['error']}" in done.stderr
    assert (records[11]["id"], records[1]["id"]) == ("long", 2)
    assert "12 of 14 lines could not be answered" in done.stderr


def test_a_second_run_keeps_answers_and_tries_errors_again(model: Path, tmp_path: Path) -> None:
    lines = [{"id": name, "prompt": "the"} for name in "abc"]
    kept = {"id": "b", "line": 9, "text": "kept", "finish_reason": "stop"}
    other = {"id": "z", "line": 1, "text": "of another input"}
    write(tmp_path / "out.jsonl", kept, other, {"id": "c", "line": 3, "error": "out of luck"}, '{"id": "a", "te')
    done, records = batch(model, write(tmp_path / "in.jsonl", *lines), "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert [record["id"] for record in records] == ["a", "b", "c", "z"]
    assert records[1] == kept | {"line": 2}
    assert records[3] == other
    assert records[2]["completion_tokens"] == 3
    before = (tmp_path / "out.jsonl").read_bytes()
    assert batch(model, tmp_path / "in.jsonl")[0].returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(model: Path, tmp_path: Path) -> None:
    long: dict[str, Any] = {"prompt": "the", "ignore_eos": True, "max_tokens": 16000}
    lines = [long | {"id": "long"}, *({"id": i, "prompt": "the"} for i in range(20)), *[long] * 20]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command = [sys.executable, FOLDER / "batch_file.py", source, target, "--model", model, "--rows", "2"]
    process = subprocess.Popen([*command, "--max-tokens", "2"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while not target.exists() or target.read_text().count("\n") < 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["id"] for record in records] == list(range(20))  # in order, and nothing that was cut short
    write(source, *lines[1:21], {"id": "last", "prompt": "the"})
    done, records = batch(model, source, "--max-tokens", "2")
    assert done.returncode == 0
    assert [record["id"] for record in records] == [*range(20), "last"]


def test_answers_are_on_disk_as_they_come(model: Path, tmp_path: Path) -> None:
    """Whatever ends the process: each answer is in the file before the next one is waited for."""
    program = load("batch_file")
    tasks = program.read_tasks(write(tmp_path / "in.jsonl", *({"prompt": "the", "id": i} for i in range(6))))
    lines: list[int] = []
    with LLM(model, device="cpu", max_batch_size=2) as llm:
        answer_all = program.answer_all

        def watched(*given: Any) -> Any:
            for pair in answer_all(*given):
                yield pair
                lines.append((tmp_path / "out.jsonl").read_text().count("\n"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "answer_all", watched)
            assert program.run(tasks, tmp_path / "out.jsonl", llm, {"max_tokens": 2}, 3) == 0
    assert lines == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_run_is_one_line(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "the"})
    for arguments, words in (
        ((str(tmp_path / "no.jsonl"), str(tmp_path / "o"), "--model", str(model)), "no.jsonl"),
        ((str(source), str(tmp_path / "no" / "o"), "--model", str(model)), "o.part"),
        ((str(source), str(source), "--model", str(model)), "a file of their own"),
        ((str(source), str(tmp_path / "o"), "--model", "/no/such/folder"), "/no/such/folder"),
        ((str(source), str(tmp_path / "o"), "--max-tokens", "0"), "max_tokens"),
    ):
        done = run("batch_file", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert json.loads(source.read_text()) == {"prompt": "the"}
    help_text = run("batch_file", "--help").stdout
    assert all(option in help_text for option in ("IN.jsonl", "OUT.jsonl", "--model", "--rows", "--max-tokens"))
