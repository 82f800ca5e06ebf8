"""The command: all stages, one after another, each within its seconds. The package says what they do."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minillm.loading import pick_device

from . import evaluate, sample, split, teacher, train
from .fit import Log


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_stories", description="Make the bundled story model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--teacher", type=Path, required=True, metavar="DIR", help="SmolLM2-135M-Instruct, as minillm reads it")
    add("--corpus", type=Path, required=True, metavar="FILE", help="real stories, <|endoftext|> between them")
    add("--work", type=Path, required=True, metavar="DIR", help="what the stages leave for each other; kept")
    add("--out", type=Path, required=True, metavar="DIR", help="the model with its card, logs and figures")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    for name, seconds in (("teacher", 50), ("sample", 200), ("train", 190), ("evaluate", 30)):
        add(f"--{name}-seconds", type=float, default=seconds, metavar="S", help="its budget (default: %(default)s)")
    defaults = sample.Sampling()
    add("--workers", type=int, default=defaults.workers, help="processes that sample (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=defaults.temperature,
        help="of the stories that the teacher writes (default: %(default)s)",
    )
    add("--rows", type=int, default=defaults.rows, help="stories at once in each of them (default: %(default)s)")
    return parser


class Journal:
    """What happened when: lines on the screen and in `out/log.txt`, losses in `out/losses-*.jsonl`, counts of stages.

    Counts are kept in `work`, because a stage whose result is there is not run again, and its counts are still wanted.
    """

    def __init__(self, work: Path, out: Path) -> None:
        self._counts_file, self._out = work / "counts.json", out
        self._started = time.perf_counter()
        found = self._counts_file.is_file()
        self.counts: dict[str, Any] = json.loads(self._counts_file.read_text("utf-8")) if found else {}

    def say(self, text: str) -> None:
        line = f"{time.perf_counter() - self._started:7.1f} s  {text}"
        print(line, flush=True)
        with (self._out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def losses(self, stage: str) -> Log:
        """Where a training loop tells its losses. An earlier run's are forgotten at the first of them."""
        mode = "w"

        def log(entry: dict[str, object]) -> None:
            nonlocal mode
            with (self._out / f"losses-{stage}.jsonl").open(mode, encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            mode = "a"
            if "validation" in entry:
                self.say(f"{stage}: {json.dumps(entry)}")

        return log

    def stage(self, name: str, result: Path, body: Callable[[], Any]) -> None:
        """Run a stage unless its result is there, and remember what it returned."""
        if result.is_file() and name in self.counts:
            return self.say(f"{name}: {result} is there, not run again")
        self.say(f"{name} begins")
        self.counts[name] = body()
        self._counts_file.write_text(json.dumps(self.counts, indent=2) + "\n", "utf-8")
        self.say(f"{name} ended: {json.dumps(self.counts[name])[:600]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def plot(out: Path) -> None:
    """The loss curves of the models that this run trained, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    for file in out.glob("losses-*.jsonl"):
        entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        held = [entry for entry in entries if "validation" in entry]
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([e["epoch"] for e in entries], [e["loss"] for e in entries], label="training, nats per token")
        axes.plot([e["epoch"] for e in held], [e["validation"] for e in held], label="validation, nats per byte")
        axes.set(title=file.stem, xlabel="epoch", yscale="log")
        axes.legend()
        figure.savefig(file.with_suffix(".png"), dpi=120)


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    work, out, device = options.work, options.out, pick_device(options.device)
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(work, out)
    sampling = sample.Sampling(
        workers=options.workers, rows=options.rows, temperature=options.temperature, device=options.device
    )
    seconds = {name: getattr(options, f"{name}_seconds") for name in ("teacher", "sample", "train", "evaluate")}
    journal.stage("split", work / "held_out.jsonl", lambda: split.run(options.corpus, work))
    journal.stage(
        "teacher",
        work / "teacher" / "config.json",
        lambda: teacher.run(options.teacher, work, seconds["teacher"], device, journal.losses("teacher")),
    )
    journal.stage("sample", work / "sampled.jsonl", lambda: sample.run(work, seconds["sample"], sampling))
    journal.stage(
        "train",
        work / "stories" / "config.json",
        lambda: train.run(work, seconds["train"], device, journal.losses("train")),
    )
    journal.stage(
        "evaluate", out / "stories" / "README.md", lambda: evaluate.run(work, out, seconds["evaluate"], device)
    )
    plot(out)
    journal.say("done")


if __name__ == "__main__":
    main()
