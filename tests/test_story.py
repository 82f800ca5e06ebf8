"""The story as programs: what they say without a GPU, and that their tricks are right, on a CPU that records."""

import ast
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recorder import CpuGraph, pretend_cuda, update
from small import FakeBackend

from examples.story import page, s1_loop, s2_capture, s3_inputs, s4_batches, s5_prefill, s6_edit, s7_many_steps, tell
from examples.story.__main__ import PROGRAMS
from examples.story.common import CACHE, PROMPT, Parts, build, start
from examples.story.tell import Gain, Options
from minillm.sampling import Mode
from minillm.step import decode_step

ROOT = Path(__file__).resolve().parents[1]
STORY, RESULT = ROOT / "examples" / "story", ROOT / "examples" / "results" / "h200-story.json"
FILES = sorted(STORY.glob("s[0-9]_*.py"))
STEPS = 8


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As `tell.main` runs the programs."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def parts() -> Parts:
    with torch.inference_mode():
        return tiny(rows=4)


def tiny(shape: str = "tiny", rows: int = 1) -> Parts:
    """The smallest, whatever shape is asked for; in float64, which decodes any number of rows in the same way."""
    return build("tiny", rows, device="cpu", dtype=torch.float64)


def said(program: ModuleType, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = tell.main(program.NAME, program.__doc__ or "", [program.measure], arguments)
    return status, out.getvalue(), err.getvalue()


# ---------------------------------------------------------------------- the files


def test_there_are_seven_in_reading_order() -> None:
    assert [Path(program.__file__ or "") for program in PROGRAMS] == FILES
    assert [int(file.stem[1]) for file in FILES] == list(range(1, 8))
    shown = re.findall(r"\]\((s\d_\w+\.py)\)", (STORY / "README.md").read_text())
    assert shown == [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_program_is_short_and_tells_its_chapter(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) < 120
    told = ast.get_docstring(ast.parse(text)) or ""
    assert told.startswith(f"{file.stem[1]}. ")
    assert f"python -m examples.story.{file.stem}" in told
    assert "can go wrong" in told


# ---------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.rpartition(".")[2])
def test_without_a_gpu_a_program_says_what_it_needs(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = said(program)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert out.startswith(f"{program.__name__} needs a CUDA device")


@pytest.mark.parametrize("module", ["examples.story", "examples.story.s6_edit"])
def test_as_a_command_too(module: str) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, cwd=ROOT, env=hidden)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{module} needs a CUDA device")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "1"), "--steps must be from 2 to 384, not 1"),
        (("--steps", "385"), "not 385"),
        (("--shape", "llama-9"), "llama-9"),
        (("--json", "/no/such/folder/a.json"), "/no/such/folder"),
    ],
)
def test_an_impossible_option_gets_one_line(arguments: tuple[str, ...], words: str) -> None:
    status, out, err = said(s1_loop, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


# ---------------------------------------------------------------------- on a CPU that records


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    for program in PROGRAMS:
        monkeypatch.setattr(program, "build", tiny)
    monkeypatch.setattr(s1_loop, "kernel_milliseconds", lambda work: (0.25, 700))
    monkeypatch.setattr(s6_edit, "update", update)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setattr(tell, "describe", lambda *_: {"machine": "a CPU", "versions": "torch 2", "date": "2026-01-02"})
    for module in PROGRAMS:
        if hasattr(module, "milliseconds"):
            monkeypatch.setattr(module, "milliseconds", partial(once, module.milliseconds))


def once(clock: Any, work: Any, count: int = 1, rounds: int = 1) -> float:
    return clock(work, count, 1)


@pytest.mark.usefixtures("pretended")
def test_all_programs_run_to_their_end_and_their_figures_are_written(tmp_path: Path) -> None:
    out, file = io.StringIO(), tmp_path / "story.json"
    with redirect_stdout(out):
        arguments = ("--shape", "tiny", "--steps", str(STEPS), "--json", str(file))
        assert tell.main("examples.story", "All.", [program.measure for program in PROGRAMS], arguments) == 0
    data = page.read_result(file)
    assert [row["chapter"] for row in data["rows"]] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert data["command"] == f"python -m examples.story --shape tiny --steps {STEPS} --json {file}"
    for row in data["rows"]:
        assert all(value > 0 for value in row["bars"].values())
        assert row["checked"] in out.getvalue()
        assert page.gain(row) in out.getvalue()
    notes = {row["chapter"]: " ".join(row["notes"]) for row in data["rows"]}
    assert f"an eager step writes [{PROMPT + 1}], a replay writes [{PROMPT}]" in notes[2]
    repeated = re.search(r"bound anew: \[(\d+), (\d+), (\d+)", notes[3])
    assert repeated is not None
    assert len(set(repeated.groups())) == 1
    assert "0 of 1 a launch, 3 of 4 a launch" in notes[7]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("program", [s2_capture, s3_inputs, s4_batches, s5_prefill, s7_many_steps])
def test_a_recording_that_does_something_else_is_no_gain(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuGraph, "replay", lambda self: None)
    with pytest.raises(AssertionError):
        program.measure(Options("tiny", STEPS))


def test_without_cuda_bindings_chapter_6_says_so_and_the_others_go_on(
    pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    status, out, _ = said(s6_edit, "--shape", "tiny", "--steps", "4")
    assert status == 0
    assert "needs cuda.bindings" in out
    assert "pip install cuda-bindings" in out


# ---------------------------------------------------------------------- the pieces


def test_the_loop_writes_the_text_of_the_decode_step(parts: Parts) -> None:
    def step() -> None:
        decode_step(parts.model, parts.cache, parts.state.narrow(0, 1), CACHE, Mode.GREEDY)

    one = parts._replace(state=parts.state.narrow(0, 1))
    text = s3_inputs.feeding_itself(one, step, 24)
    assert s1_loop.loop(parts, 24) == text
    assert len(set(text)) > 8  # else a text proves nothing


def test_bound_anew_is_right_eagerly_and_wrong_for_whoever_reads_the_old_tensors(parts: Parts) -> None:
    one = parts._replace(state=parts.state.narrow(0, 1))
    old = one._replace(state=replace(one.state))
    text = s3_inputs.bound_anew(one, lambda: s3_inputs.next_token(one, CACHE), STEPS)
    assert s3_inputs.in_place(one, lambda: s3_inputs.next_token(old, CACHE), STEPS) == text
    assert s3_inputs.bound_anew(one, lambda: s3_inputs.next_token(old, CACHE), STEPS) == text[:1] * STEPS
    assert s3_inputs.agree(text, text) == STEPS
    assert s3_inputs.agree(text, [*text[:3], -1, *text[4:]]) == 3


def test_a_length_that_is_frozen_goes_wrong_late(parts: Parts) -> None:
    one = parts._replace(state=parts.state.narrow(0, 1))
    text, frozen = (s3_inputs.in_place(one, partial(s3_inputs.next_token, one, n), 24) for n in (CACHE, PROMPT))
    assert 0 < s3_inputs.agree(text, frozen) < 24


@pytest.mark.parametrize(("count", "size"), [(1, 64), (63, 64), (64, 64), (65, 128), (100, 512), (512, 512)])
@pytest.mark.parametrize("row", [0, 2])
def test_a_padded_prefill_is_a_prefill(parts: Parts, count: int, size: int, row: int) -> None:
    model, cache, _, _ = parts
    token_ids = torch.randint(model.config.vocab_size, (count,))
    cache.kv.normal_()
    before = cache.kv.clone()
    expected = model.prefill(token_ids, row, 0, cache)
    filled = cache.kv.clone()
    cache.kv.copy_(before)
    prompt = s5_prefill.Prompt(torch.device("cpu"))
    prompt.token_ids.random_(model.config.vocab_size)  # padding may be any token
    prompt.put(token_ids, row)
    torch.testing.assert_close(s5_prefill.padded_prefill(model, cache, prompt, size), expected, atol=1e-5, rtol=0)
    changed = (cache.kv != before).any(-1).any(3).any(1).any(0)
    places = [[row, slot] for slot in range(count)] + [[row, cache.scratch_slot]] * (count < size)
    assert changed.nonzero().tolist() == places
    kept = (..., slice(CACHE), slice(None))
    torch.testing.assert_close(cache.kv[kept], filled[kept], atol=1e-5, rtol=0)


def test_padding_of_a_batch_writes_to_scratch_slots_only(parts: Parts) -> None:
    runner = s4_batches.make_runner(parts, FakeBackend())
    parts.cache.kv.normal_()
    before = parts.cache.kv.clone()
    s4_batches.begin(parts, 3)
    runner.step(3, CACHE, Mode.GREEDY)
    scratch = parts.cache.scratch_slot
    assert s4_batches.written(parts.cache, before) == [[0, PROMPT], [1, PROMPT], [2, PROMPT], [3, scratch]]


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_many_steps_are_single_steps_and_nothing_comes_after_the_end(parts: Parts, count: int) -> None:
    one = parts._replace(state=parts.state.narrow(0, 1))
    single, many = s7_many_steps.ManySteps(one, 1), s7_many_steps.ManySteps(one, count)
    text, rest = s7_many_steps.text_of(single, single, 20)
    assert rest == 0
    assert s7_many_steps.text_of(many, many, 20) == (text, -20 % count)
    stop = s7_many_steps.an_end(text)
    length = text.index(stop) + 1
    assert 5 < length < 20
    assert s7_many_steps.text_of(many, many, 20, [stop]) == (text[:length], -length % count)


def test_the_longest_text_stays_within_the_cache(parts: Parts) -> None:
    one = parts._replace(state=parts.state.narrow(0, 1))
    many = s7_many_steps.ManySteps(one, max(s7_many_steps.COUNTS))
    start(one)
    for _ in range(-(-tell.MOST_STEPS // len(many.ring))):
        many()
    assert many.ring[:, 0, 1].tolist() == [0] * len(many.ring)  # still running


# ---------------------------------------------------------------------- the page


def made_up() -> dict[str, Any]:
    bars = {"eager": 12.0, "4 a launch": 3.0, "64 a launch": 2.0}
    gain = Gain(7, "many steps", "tiny", bars, "a token", "9 ids", ["a note"])
    machine = {"machine": "NVIDIA Made-up", "versions": "torch 9", "date": "2026-03-04T05:06:07+00:00"}
    return {"bench": "story", **machine, "rows": [vars(gain), vars(replace(gain, chapter=8))]}


def test_a_gain_is_the_first_by_the_last() -> None:
    row = made_up()["rows"][0]
    assert page.gain(row) == "6.0x"
    assert Gain(**row).text().splitlines() == [
        "checked: 9 ids",
        "a note",
        "eager 12.0 ms, 4 a launch 3.00 ms, 64 a launch 2.00 ms a token: 6.0x",
    ]


def test_the_page_shows_the_result_and_can_be_filled_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, text, picture = tmp_path / "made-up.json", tmp_path / "page.md", tmp_path / "story.png"
    text.write_text((STORY / "README.md").read_text())
    for shape in ("tiny", "small"):
        data = made_up()
        data["rows"][0]["shape"] = shape
        result.write_text(json.dumps(data))
        page.show(result, text, picture)
        shown = page.PLACE.findall(text.read_text())
        assert shown == [page.block(data, result)]
        assert (
            f"| 7 | many steps | {shape} | eager 12.0, 4 a launch 3.00, 64 a launch 2.00; a token | 6.0x |" in shown[0]
        )
        assert f"- 7, {shape}: a note" in shown[0]
        assert "NVIDIA Made-up, 2026-03-04, torch 9; `../results/made-up.json`" in shown[0]
        assert page.in_words(data).encode("latin-1") in picture.read_bytes()


def test_every_bar_of_the_picture_has_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    texts: list[str] = []

    def look(self: Any, *_: object, **__: object) -> None:
        texts.extend(text.get_text() for text in self.findobj(lambda artist: hasattr(artist, "get_text")))

    monkeypatch.setattr(figure.Figure, "savefig", look)
    page.draw(made_up(), tmp_path / "story.png")
    assert {"eager", "12.0 ms", "4 a launch", "3.00 ms", "64 a launch", "2.00 ms"} <= set(texts)
    assert "7. many steps, tiny: 6.0x\nmilliseconds a token" in texts


@pytest.mark.parametrize("content", ["[]", "no JSON", '{"bench": "decode", "rows": [1]}', '{"bench": "story"}'])
def test_what_is_no_result_gets_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.json").write_text(content)
    assert page.main([str(tmp_path / "given.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "given.json" in err


def test_the_page_and_the_picture_show_the_committed_result() -> None:
    shown = page.PLACE.findall(page.PAGE.read_text())
    if not RESULT.exists():
        assert [text.partition(":")[0] for text in shown] == ["Not measured yet"]
        return
    again = f"show it again: python -m examples.story.page {RESULT.relative_to(ROOT)}"
    data = page.read_result(RESULT)
    assert shown == [page.block(data, RESULT)], again
    assert page.in_words(data).encode("latin-1") in page.PICTURE.read_bytes(), again
