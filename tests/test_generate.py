"""`python -m minillm.generate`: where prompts come from, what is on which stream, and what bad input gets."""

import io
import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny import make_tiny_model

from minillm import LLM, Chunk, SamplingParams, Stats, generate
from minillm.command import Parser, add_options
from minillm.errors import CheckpointError
from minillm.reply import StatsLine

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
GREEDY_PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)


def command(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> str:
    """stdout of a run that succeeds and says nothing on stderr."""
    status = generate.main(["--model", str(model), "--device", "cpu", *arguments])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


# ---------------------------------------------------------------------- options and prompts


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], None),
        (["--chat"], "smollm2-135m-instruct"),
        (["--system", "Be brief."], "smollm2-135m-instruct"),
        (["--chat", "--model", "mine"], "mine"),
    ],
)
def test_a_chat_without_a_model_takes_one_that_can(
    options: list[str], wanted: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default of plain prompts, a story model, has no chat template."""
    asked = []

    def load(model: str | None, **_: object) -> None:
        asked.append(model)
        raise CheckpointError("not loaded")

    monkeypatch.setattr("minillm.llm.LLM", load)
    assert generate.main(["hello", *options]) == 2
    assert asked == [wanted]


def test_help_and_wrong_options_do_not_wait_for_torch() -> None:
    code = """if True:
        import sys
        from minillm import chat, generate
        options = "--help", "--version", "--nope"
        statuses = [module.main([option]) for module in (generate, chat) for option in options]
        print("statuses", statuses, "torch" in sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("statuses [0, 0, 2, 0, 0, 2] False\n")
    assert result.stderr.splitlines() == ["error: unrecognized arguments: --nope (--help lists the options)"] * 2


def test_every_option_is_explained_with_its_default() -> None:
    talk = Parser("minillm.chat", "")
    add_options(talk, max_tokens=1, default_model="any")
    for parser in (generate.build_parser(), talk):
        for action in parser._actions:
            if action.dest not in ("help", "version", "prompt"):
                assert "(default" in (action.help or ""), action.dest


@pytest.mark.parametrize("way", ["option", "argument", "pipe", "dash", "dash option"])
def test_the_prompt_comes_from_anywhere(
    way: str, tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "Once upon ☃"
    stdin(monkeypatch, prompt.encode() + b"\n")
    arguments = {
        "option": ["--prompt", prompt],
        "argument": [prompt],
        "pipe": [],
        "dash": ["-"],
        "dash option": ["--prompt", "-"],
    }[way]
    out = command(capsys, tiny, *arguments, *GREEDY)
    assert out == llm.generate(prompt, GREEDY_PARAMS).text + "\n"


@pytest.mark.parametrize(
    ("data", "prompt"), [(b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a ", " a "), (b" ", " "), (b"\n", "\n")]
)
def test_a_pipe_loses_one_newline_and_whitespace_is_a_prompt(
    data: bytes, prompt: str, tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, data)
    out = json.loads(command(capsys, tiny, "--json", "--max-tokens", "1"))
    assert out["prompt_token_ids"] == llm.tokenizer.encode(prompt)


def test_a_terminal_without_a_prompt_gets_a_default_that_is_named(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, b"never read", terminal=True)
    assert generate.main(["--model", str(tiny), *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == llm.generate(generate.DEFAULT_PROMPT, GREEDY_PARAMS).text + "\n"
    assert len(err.splitlines()) == 1
    assert generate.DEFAULT_PROMPT in err


def test_chat_and_system_go_through_the_template(tiny: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    for arguments, messages in (
        (["--chat"], [user]),
        (["--system", "be brief"], [system, user]),
        (["--chat", "--system", "be brief"], [system, user]),
        (["--system", ""], [{**system, "content": ""}, user]),
    ):
        out = json.loads(command(capsys, tiny, "hi", "--json", *arguments, *GREEDY))
        assert out["prompt_token_ids"] == llm.tokenizer.apply_chat_template(messages)
        assert out["text"] == llm.chat(messages, GREEDY_PARAMS).text


def test_every_sampling_option_arrives(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 7,
        "stop": ["QQ", "ZZ"],
        "ignore_eos": True,
    }
    arguments = "--max-tokens 3 --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --seed 7"
    out = json.loads(
        command(capsys, tiny, "hi", "--json", *arguments.split(), "--stop", "QQ", "--stop", "ZZ", "--ignore-eos")
    )
    assert out["sampling"] == asdict(SamplingParams(**wanted)) | {"stop": ["QQ", "ZZ"], "stop_token_ids": []}
    defaults = json.loads(command(capsys, tiny, "hi", "--json"))
    expected = asdict(SamplingParams(max_tokens=512, temperature=0.8)) | {"stop": [], "stop_token_ids": []}
    seed = defaults["sampling"]["seed"]
    assert defaults["sampling"] == expected | {"seed": seed}
    again = json.loads(command(capsys, tiny, "hi", "--json", "--seed", str(seed)))  # the drawn seed is told
    assert again["token_ids"] == defaults["token_ids"]


# ---------------------------------------------------------------------- what is written


def test_text_is_written_as_it_is_made(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(generate, "write", pieces.append)
    command(capsys, tiny, "hi", *GREEDY)
    expected = [chunk.text for chunk in llm.stream("hi", GREEDY_PARAMS)]
    assert len(expected) > 3
    assert pieces == [*expected, "\n"]


def test_json_is_one_object_that_says_what_the_library_says(
    tiny: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    out = command(capsys, tiny, "hi", "--json", *GREEDY)
    assert out.count("\n") == 1
    assert out.isascii()
    answer, completion = json.loads(out), llm.generate("hi", GREEDY_PARAMS)
    for key in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
        assert answer[key] == getattr(completion, key)
    assert (answer["model"], answer["device"], answer["dtype"]) == (str(tiny), "cpu", "float32")
    assert set(answer["stats"]) == set(asdict(completion.stats))
    assert answer["stats"]["prompt_tokens"] == 2
    assert answer["stats"]["completion_tokens"] == 12
    assert 0 < answer["stats"]["time_to_first_token"] < answer["stats"]["total_time"]
    assert answer["stats"]["tokens_per_second"] > 0


def test_a_prompt_that_fills_the_context_gives_an_empty_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--model", str(tiny), "a" * 128]) == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "128 tokens and fills the context of 128" in err
    assert generate.main(["--model", str(tiny), "a" * 128, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"


def test_stats_are_one_line_on_stderr(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minillm.bandwidth.measure_read_bandwidth", lambda device: 1e10)
    assert generate.main(["--model", str(tiny), "hi", "--stats", *GREEDY]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for words in ("2 prompt tokens, 12 made", "first token ", " tokens/s", "% of the 10 GB/s measured here"):
        assert words in err
    assert generate.main(["--model", str(tiny), "hi", "--stats", "--max-tokens", "1"]) == 0
    assert "measured" not in capsys.readouterr().err  # one token has no speed, so there is no share to give


def test_the_share_of_the_bandwidth_counts_weights_and_cache(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.bandwidth.measure_read_bandwidth", lambda device: 1e8)
    weights = sum(tensor.numel() * 4 for tensor in load_file(tiny / "model.safetensors").values())
    cache = 2 * 2 * 2 * 8 * 4 * (60 + 40 / 2)  # k and v, layers, kv heads, head_dim, float32; a mean of 80 positions
    line = StatsLine(llm)(Stats(60, 40, 0.25, 1.0, 500.0))
    assert f"reads {(weights + cache) / 1e9:.3g} GB a token" in line
    assert f"{(weights + cache) * 500 / 1e8:.0%} of the 0.1 GB/s" in line
    assert "first token 0.250 s; 500.0 tokens/s" in line


def test_what_libraries_say_stays_off_stdout(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A print in some library's loading code would become the beginning of the answer; a warning is one line."""
    from minillm import llm as module

    load_model = module.load_model

    def noisy(*arguments: Any) -> Any:
        print("a library prints")
        warnings.warn("a library warns", UserWarning, stacklevel=1)
        return load_model(*arguments)

    monkeypatch.setattr(module, "load_model", noisy)
    assert generate.main(["--model", str(tiny), "hi", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == llm.generate("hi", GREEDY_PARAMS).text + "\n"
    assert err.splitlines() == ["a library prints", "warning: a library warns"]


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snowman on an ASCII terminal was a UnicodeEncodeError in the middle of the answer."""
    monkeypatch.setattr(LLM, "stream", lambda *_: (chunk for chunk in [Chunk("a☃b", [1], "stop")]))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert generate.main(["--model", str(tiny), "hi"]) == 0
    assert out.getvalue() == b"a?b\n"


# ---------------------------------------------------------------------- bad input

BAD = {
    "no directory": (["hi", "--model", "/no/such/dir"], ["/no/such/dir", "no such directory"]),
    "prompt too long": (["a" * 200], ["200 tokens", "128"]),
    "empty prompt": (["--prompt", ""], ["empty", "begin token"]),
    "two prompts": (["a", "--prompt", "b"], ["two prompts"]),
    "temperature": (["hi", "--temperature", "-1"], ["temperature", "-1"]),
    "not a number": (["hi", "--temperature", "nan"], ["temperature", "nan"]),
    "no integer": (["hi", "--top-k", "abc"], ["--top-k", "abc"]),
    "top_p": (["hi", "--top-p", "0"], ["top_p must be above 0"]),
    "max_tokens": (["hi", "--max-tokens", "0"], ["max_tokens", "from 1 to"]),
    "seed": (["hi", "--seed", "-5"], ["seed", "-5"]),
    "stop": (["hi", "--stop", ""], ["stop"]),
    "dtype": (["hi", "--dtype", "float7"], ["float7", "bfloat16"]),
    "device": (["hi", "--device", "toaster"], ["toaster", "cuda"]),
    "no such GPU": (["hi", "--device", "cuda:99"], ["cuda:99", "CUDA devices"]),
    "graphs": (["hi", "--graphs", "on", "--device", "cpu"], ["graphs", "CUDA device"]),
    "graphs value": (["hi", "--graphs", "maybe"], ["--graphs", "maybe"]),
    "context": (["hi", "--max-seq-len", "129"], ["129", "128"]),
    "invalid unicode": (["a\udcff"], ["not valid Unicode"]),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--model", str(tiny), *arguments]) == 2
    refused(capsys, *words)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("data", "words"), [(b"ok \xff\xfe", ["not UTF-8", "0xff at offset 3"]), (b"", ["there is no prompt", "--prompt"])]
)
def test_bad_standard_input(
    data: bytes, words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, data)
    assert generate.main(["--model", str(tiny)]) == 2
    refused(capsys, *words)


def test_bad_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "no tokenizer": (make_tiny_model(tmp_path / "a", tokenizer=False), [], ["tokenizer"]),
        "no llama": (make_tiny_model(tmp_path / "b", model_type="mamba"), [], ["mamba"]),
        "no template": (make_tiny_model(tmp_path / "c", chat_template=None), ["--chat"], ["no chat template"]),
    }
    for model, arguments, words in cases.values():
        assert generate.main(["--model", str(model), "hi", *arguments]) == 2
        refused(capsys, *words)


def test_an_empty_prompt_is_fine_where_a_begin_token_starts_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = json.loads(command(capsys, make_tiny_model(tmp_path / "m", bos=True), "--prompt", "", "--json", *GREEDY))
    assert out["prompt_token_ids"] == [1]
