"""Answer a file of prompts: one JSON object a line in, one a line out, in the same order.

    python examples/batch_file.py prompts.jsonl answers.jsonl --model MODEL --rows 32

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 64}
    {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}

A line may set any field of SamplingParams; the options of the command hold for lines that do not. A line without an id
is called by its number. What comes of a line has its id, its number, and either text, finish_reason, prompt_tokens and
completion_tokens, or an error. Run it again and it goes on where it was stopped: answers are kept, errors tried again.

What it teaches: with more requests handed in than the model has rows, no row is ever idle; a callback says which one is
done, whatever their order. Each answer is in the file as soon as it is made, and at the end the file is put in order.
Ctrl-C cancels what is not done, and keeps the rest.
"""

import argparse
import json
import os
import queue
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minillm import LLM, MinillmError, SamplingParams
from minillm.handle import Handle

Json = dict[str, Any]
SAMPLING = {f.name for f in fields(SamplingParams)}


class BadLine(MinillmError):
    """A line that cannot be answered, and why."""


@dataclass
class Task:
    """One line of the input: its number, its id, what to answer, and how. `error`: why it cannot be answered."""

    line: int
    id: str | int
    given: Json = field(default_factory=dict)
    error: str | None = None

    def submit(self, llm: LLM, defaults: Json) -> Handle:
        """Raises: MinillmError."""
        params = SamplingParams(**defaults | {name: self.given[name] for name in SAMPLING & self.given.keys()})
        if "messages" in self.given:
            return llm.submit_chat(self.given["messages"], params)
        return llm.submit(self.given["prompt"], params)

    def answered(self, handle: Handle) -> Json:
        """What is written of a handle that is done."""
        if (error := handle.exception()) is not None:
            return self.failed(error)
        answer = handle.result()
        return {
            "id": self.id,
            "line": self.line,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.stats.prompt_tokens,
            "completion_tokens": answer.stats.completion_tokens,
        }

    def failed(self, error: object) -> Json:
        return {"id": self.id, "line": self.line, "error": str(error)}


def read_tasks(path: Path) -> list[Task]:
    """A task for each line that is not empty; a bad line is one too."""
    tasks: list[Task] = []
    lines: dict[str | int, int] = {}
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        if text.strip():
            task = Task(number, number)
            try:
                task.given = read_line(text)
                task.id = task.given.pop("id", number)
                if (first := lines.setdefault(task.id, number)) != number:
                    raise BadLine(f"the id {task.id!r} is that of line {first} already")
            except BadLine as error:
                task.error = str(error)
            tasks.append(task)
    return tasks


def read_line(text: bytes) -> Json:
    """The object in a line. Raises: BadLine. The values of its fields are for `submit` to look at."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"this is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadLine(f"a line must be a JSON object, not a {type(given).__name__}")
    if len({"prompt", "messages"} & given.keys()) != 1:
        raise BadLine("a line needs a prompt or messages, and not both")
    if unknown := given.keys() - SAMPLING - {"id", "prompt", "messages"}:
        raise BadLine(f"the field {min(unknown)!r} is not known")
    if type(given.get("id", 0)) not in (int, str):
        raise BadLine(f"an id must be a text or a whole number, not {given['id']!r}")
    return given


def read_answers(path: Path) -> dict[str | int, Json]:
    """The answers that a former run has written, by id. Its errors, and a line that it could not end, do not count."""
    answers = {}
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(text)
            answers[record["id"]] = record | {"text": record["text"]}
        except (ValueError, KeyError, TypeError):
            continue
    return answers


def answer_all(llm: LLM, tasks: Sequence[Task], defaults: Json, ahead: int) -> Iterator[tuple[Task, Json]]:
    """Each task with its record, as they are done. `ahead`: how many are handed in at a time."""
    done: queue.SimpleQueue[tuple[Task, Handle]] = queue.SimpleQueue()
    running: dict[int, Handle] = {}

    def next_done() -> tuple[Task, Json]:
        task, handle = done.get()
        del running[task.line]
        return task, task.answered(handle)

    try:
        for task in tasks:
            try:
                handle = task.submit(llm, defaults)
            except MinillmError as error:
                yield task, task.failed(error)
                continue
            running[task.line] = handle
            handle.add_done_callback(lambda handle, task=task: done.put((task, handle)))  # type: ignore[misc]
            if len(running) == ahead:
                yield next_done()
        while running:
            yield next_done()
    finally:
        for handle in running.values():
            handle.cancel()


def write_all(path: Path, records: Sequence[Json]) -> None:
    """The whole file at once, or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)


def run(tasks: Sequence[Task], target: Path, llm: LLM, defaults: Json, ahead: int) -> int:
    """Answer what is not answered yet; returns how many lines have an error."""
    kept = read_answers(target)
    there = [task for task in tasks if task.error is None and task.id in kept]
    records = {task.line: kept.pop(task.id) | {"line": task.line} for task in there}
    strangers = list(kept.values())  # not of this input: not ours to drop
    write_all(target, [*records.values(), *strangers])
    bar = tqdm(total=len(tasks), initial=len(records), unit="line", disable=None)
    try:
        with bar, target.open("a") as file:

            def put(task: Task, record: Json) -> None:
                records[task.line] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                bar.update()
                if "error" in record:
                    bar.write(f"line {task.line}: {record['error']}", file=sys.stderr)

            for task in tasks:
                if task.error is not None:
                    put(task, task.failed(task.error))
            todo = [task for task in tasks if task.line not in records]
            for task, record in answer_all(llm, todo, defaults, ahead):
                put(task, record)
    finally:
        write_all(target, [*(records[task.line] for task in tasks if task.line in records), *strangers])
    return sum("error" in record for record in records.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer a file of prompts, one JSON object a line.")
    add = parser.add_argument
    add("source", type=Path, metavar="IN.jsonl", help='lines such as {"id": "a", "prompt": "Hi"}, or with "messages"')
    add("target", type=Path, metavar="OUT.jsonl", help="the answers; if it exists, what is missing in it is added")
    add("--model", help="directory, .gguf file, or hub id; messages need one that can chat (default: the story model)")
    add("--rows", type=int, default=32, metavar="N", help="answers at the same time (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is the likeliest (default: %(default)s)")
    options = parser.parse_args()
    defaults = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    try:
        SamplingParams(**defaults)
        tasks = read_tasks(options.source)
        if options.target.exists() and options.target.samefile(options.source):
            raise MinillmError("the answers need a file of their own")
        ahead = 4 * max(options.rows, 1)
        with LLM(options.model, max_batch_size=options.rows, max_waiting=ahead, progress=sys.stderr.isatty()) as llm:
            errors = run(tasks, options.target, llm, defaults, ahead)
    except (MinillmError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"stopped: {options.target} has what was done, and the same command goes on\n")
    if errors:
        print(f"{errors} of {len(tasks)} lines could not be answered: see {options.target}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
