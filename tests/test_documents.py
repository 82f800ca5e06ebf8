"""Every Markdown document keeps its word: commands, options, code, excerpts, links, files, and figures of results.

In a document, a fenced block of `sh` is commands, and a block of `python` runs (with a tiny model under every name);
`python sketch` is only compiled, and `python minillm/x.py` is an excerpt of that file, word for word.
"""

import contextlib
import functools
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from minillm import hub
from minillm.bench.picture import in_words, read_panel

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, RESULTS = ROOT / "examples", ROOT / "examples" / "results"
DOCUMENTS = [*ROOT.glob("*.md"), *sorted(EXAMPLES.rglob("*.md")), *sorted((ROOT / "weights").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}

FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`(python3? [^`]+)`")
SHELL = {"echo", "printf", "cat", "cd", ".", "pip", "curl", "git", "head"}  # commands that are not ours
WITH_COMMANDS = {"minillm", "minillm.bench"}  # modules whose first words name a command


def blocks(language: str) -> list[Any]:
    """(info, code) of every fenced block of a language, with the document and a number as its name."""
    found = [
        pytest.param(info.strip(), code, id=f"{name}:{text[: match.start()].count(chr(10)) + 1}")
        for name, text in TEXTS.items()
        for match in FENCE.finditer(text)
        for found_language, info, code in [match.groups()]
        if found_language == language
    ]
    assert found, language
    return found


def commands() -> list[Any]:
    """Every simple command of the documents, as its words; those of inline code that begin with python too."""
    found: dict[tuple[str, ...], str] = {}
    for name, text in TEXTS.items():
        fenced = [code for language, _, code in FENCE.findall(text) if language == "sh"]
        for code in [*fenced, *INLINE.findall(FENCE.sub("", text))]:
            for words in simple_commands(code if code in fenced else " ".join(code.split())):
                found.setdefault(words, name)
    return [pytest.param(words, id=f"{name}:{' '.join(words)}") for words, name in found.items()]


def simple_commands(code: str) -> Iterator[tuple[str, ...]]:
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;<>()"):
                if words:
                    yield tuple(words)
                words = []
            else:
                words.append(word)


@functools.cache
def help_of(*words: str) -> str:
    done = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------- commands


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("_", "code"), blocks("sh"))
def test_shell_parses(_: str, code: str) -> None:
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", commands())
def test_a_command_and_its_options_exist(words: tuple[str, ...]) -> None:
    program, *rest = words
    if program == "minillm":
        program, rest = "python", ["-m", "minillm", *rest]
    if program not in ("python", "python3"):
        assert program in SHELL
        return
    if rest[0] == "-m":
        target, rest = rest[:2], rest[2:]
        if target[1].partition(".")[0] not in ("minillm", "examples"):
            assert importlib.util.find_spec(target[1]) is not None
            return
        while target[1] in WITH_COMMANDS and rest and re.fullmatch("[a-z]+", rest[0]):
            target.append(rest.pop(0))
    else:
        target, rest = rest[:1], rest[1:]
        assert (ROOT / target[0]).is_file()
    said = help_of(*target)
    assert said.startswith("usage:")
    for option in (word.partition("=")[0] for word in rest if re.match("--?[a-z]", word)):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", said), f"{option} is no option of {target}"


# ---------------------------------------------------------------------- code


@pytest.fixture(scope="module")
def everything_is_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A directory where the models of the documents are, all of them a tiny one."""
    root = tmp_path_factory.mktemp("documents")
    model = make_tiny_model(root / "weights" / "SmolLM2-135M-Instruct")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MINILLM_WEIGHTS", str(root / "weights"))
        patch.setattr(hub, "bundled_model", lambda: model)
        yield


@pytest.mark.parametrize(("info", "code"), blocks("python"))
def test_code_runs_and_excerpts_are_verbatim(info: str, code: str, everything_is_tiny: None) -> None:
    if info in ("", "sketch"):
        program = compile(code, info or "document", "exec")
        if not info:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(program, {"__name__": "__main__"})
        return
    excerpt = textwrap.dedent(code).splitlines()
    source = (ROOT / info).read_text(encoding="utf-8").splitlines()
    places = (source[at : at + len(excerpt)] for at in range(len(source)))
    assert any(textwrap.dedent("\n".join(place)).splitlines() == excerpt for place in places), f"no longer in {info}"


def test_the_walkthrough_shows_the_whole_way() -> None:
    shown = {info for _, info, _ in FENCE.findall(TEXTS["examples/walkthrough.md"]) if info}
    way = ("prompts", "service", "engine", "model", "kernels/reference", "cache", "state", "step", "sampling", "graphs")
    assert shown >= {f"minillm/{name}.py" for name in (*way, "readback", "pending")}


# ---------------------------------------------------------------------- links and files


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[name])):
        if not re.match("[a-z]+:|#", target):
            assert ((ROOT / name).parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name: str) -> None:
    """Paths from the root, the document's folder or the package; a Python file without a folder may be anywhere."""
    bases = (ROOT, (ROOT / name).parent, ROOT / "minillm")
    anywhere = {path.name for folder in ("minillm", "examples", "tests") for path in (ROOT / folder).rglob("*.py")}
    for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", TEXTS[name])):
        for path in re.findall(r"(?<![\w/.-])[\w./-]+\.(?:py|md|json|png|svg)\b", code):
            if "/" in path:
                assert any((base / path).exists() for base in bases), path
            elif path.endswith(".py"):
                assert path in anywhere, path


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_well_formed_and_have_a_title(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert root.get("viewBox")


# ---------------------------------------------------------------------- figures


def decode_results() -> list[Path]:
    return [RESULTS / f"h200-decode-{shape}.json" for shape in ("135m", "1b", "8b")]


OURS = ("eager", "graph", "fused eager", "fused graph")  # of a decode result, which may have rows of peers too


def shape_of(data: dict[str, Any]) -> str:
    """llama-3.2-1b, say."""
    name: str = data["model"].partition(",")[0]
    return name


def launch_table() -> Iterator[str]:
    yield "| shape | step | host, µs a step | whole step, ms | floor, ms |"
    yield "|---|---|---|---|---|"
    for path in decode_results():
        data = json.loads(path.read_text())
        for row in data["rows"]:
            if (row["batch"], row["cache"]) == (1, 1024) and row["mode"] in OURS:
                figures = f"{row['host_us']:,.0f} | {row['step_ms_p50']:.3f} | {row['floor_ms']:.3f}"
                yield f"| {shape_of(data)} | {row['mode']} | {figures} |"


def rows_table() -> Iterator[str]:
    yield "| rows | plain, ms | fused, ms | floor, ms | share |"
    yield "|---|---|---|---|---|"
    rows = json.loads((RESULTS / "h200-decode-1b.json").read_text())["rows"]
    short = {(row["batch"], row["mode"]): row for row in rows if row["cache"] == 1024}
    for batch in dict.fromkeys(row["batch"] for row in rows):
        plain, fused = short[batch, "graph"], short[batch, "fused graph"]
        times = f"{plain['step_ms_p50']:.3f} | {fused['step_ms_p50']:.3f} | {fused['floor_ms']:.3f}"
        yield f"| {batch} | {times} | {fused['share_of_ceiling']:.0%} |"


def prefill_table() -> Iterator[str]:
    yield "| prompt | eager: host, ms | whole, ms | recorded: host, ms | whole, ms | floor, ms |"
    yield "|---|---|---|---|---|---|"
    rows = json.loads((RESULTS / "h200-prefill-1b.json").read_text())["rows"]
    recorded = {row["prompt"]: row for row in rows if row["mode"].startswith("fused graph of ")}
    for row in rows:
        if row["mode"] == "fused":
            eager, padded = host_and_whole(row), host_and_whole(recorded.get(row["prompt"]))
            yield f"| {row['prompt']:,} | {eager} | {padded} | {row['floor_ms']:.2f} |"


def host_and_whole(row: dict[str, Any] | None) -> str:
    return " | " if row is None else f"{row['host_ms_p50']:.2f} | {row['wall_ms_p50']:.2f}"


def many_steps_table() -> Iterator[str]:
    yield "| shape | `steps_per_graph` | launches | ms a token | gap, p99, ms | processor, µs a token |"
    yield "|---|---|---|---|---|---|"
    for name in ("stories", "135m", "1b"):
        data = json.loads((RESULTS / f"h200-launches-{name}.json").read_text())
        for row in data["rows"]:
            figures = f"{row['ms_per_token_p50']:.4f} | {row['gap_ms_p99']:.2f} | {row['cpu_us_per_token']:.0f}"
            yield f"| {shape_of(data)} | {row['steps_per_graph']} | {row['launches']} | {figures} |"


def pieces_table() -> Iterator[str]:
    yield "| pieces | graphs | whole step, ms | host, µs a step | pool |"
    yield "|---|---|---|---|---|"
    for row in json.loads((RESULTS / "h200-pieces-1b.json").read_text())["rows"]:
        figures = f"{row['step_ms_p50']:.3f} | {row['host_us_p50']:.0f} | {row['pool_bytes'] / 2**20:.0f} MiB"
        yield f"| {row['pieces']} | {row['graphs']} | {figures} |"


def retarget_table() -> Iterator[str]:
    rows = json.loads((RESULTS / "h200-retarget-1b.json").read_text())["rows"]
    what = f"{rows[0]['graphs']} graphs, up to {rows[0]['max_rows']} rows, to"
    yield f"| {what} | captured anew, ms | first change, ms | later change, ms |"
    yield "|---|---|---|---|"
    for row in rows:
        name = {"cache": "another cache", "weights": "other weights"}[row["what"]]
        yield f"| {name} | {row['capture_ms']:.0f} | {row['first_ms']:.0f} | {row['again_ms']:.1f} |"


def pool_table() -> Iterator[str]:
    names = ("one pool, largest first", "one pool, smallest first", "a pool for each graph")
    rows = json.loads((RESULTS / "h200-pool-1b.json").read_text())["rows"]
    what = f"{rows[0]['graphs']} graphs, up to {rows[0]['max_rows']} rows, llama-3.2-1b"
    yield f"| {what} | pool | taken from the driver |"
    yield "|---|---|---|"
    for name, row in zip(names, rows, strict=True):
        yield f"| {name} | {row['pool_bytes'] / 2**20:.0f} MiB | {row['driver_bytes'] / 2**20:.0f} MiB |"


def serve_table() -> Iterator[str]:
    rows = json.loads((RESULTS / "h200-serve-1b.json").read_text())["rows"]
    yield f"| {rows[0]['requests']} requests of 1 to 32 rows | requests/s | latency, mean | jitter at a size |"
    yield "|---|---|---|---|"
    for row in rows:
        latency = f"{row['latency_ms_mean']:.1f} ms"
        yield f"| {row['mode']} | {row['requests_per_s']:.1f} | {latency} | {row['jitter_at_a_size']:.1%} |"


TABLES = (
    launch_table, rows_table, prefill_table, many_steps_table, pieces_table, retarget_table, pool_table, serve_table
)  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_tables_show_the_committed_results(table: Any) -> None:
    name = table.__name__.removesuffix("_table")
    found = re.findall(rf"<!-- table: {name} -->\n(.*?)\n<!-- end -->", TEXTS["examples/cuda_graphs.md"], re.S)
    expected = "\n".join(table())
    assert found == [expected], f"the results say\n{expected}"


@pytest.mark.parametrize("name", TEXTS)
def test_results_are_named_with_their_date(name: str) -> None:
    for paragraph in re.split(r"\n\s*\n", TEXTS[name]):
        for file in re.findall(r"results/([\w.-]+\.json)", FENCE.sub("", paragraph)):
            assert json.loads((RESULTS / file).read_text())["date"][:10] in paragraph, file


def steps_of(shape: str, **setting: object) -> dict[str, dict[str, Any]]:
    """The rows of a decode result with this setting, by mode."""
    rows = json.loads((RESULTS / f"h200-decode-{shape}.json").read_text())["rows"]
    return {row["mode"]: row for row in rows if setting.items() <= row.items()}


def test_the_readme_shows_the_committed_steps() -> None:
    for name, shape in (("Llama-3.2-1B", "1b"), ("Llama-3.1-8B", "8b"), ("SmolLM2-135M", "135m")):
        steps = steps_of(shape, batch=1, cache=1024)
        figures = [steps[mode]["step_ms_p50"] for mode in OURS] + [steps["eager"]["floor_ms"]]
        assert f"| {name} | {' | '.join(f'{ms:#.3g}' for ms in figures)} |\n" in TEXTS["README.md"]


@pytest.mark.parametrize(
    ("shape", "words"), [("1b", "{} for 8 rows and {} for 32, which is {} and {} %"), ("8b", "{} and {}, {} and {} %")]
)
def test_the_readme_shows_the_committed_steps_of_more_rows(shape: str, words: str) -> None:
    eight, many = (steps_of(shape, batch=batch, cache=1024)["fused graph"] for batch in (8, 32))
    times = [f"{row['step_ms_p50']:#.3g} ms" for row in (eight, many)]
    shares = [f"{100 * row['share_of_ceiling']:.0f}" for row in (eight, many)]
    assert words.format(*times, *shares) in " ".join(TEXTS["README.md"].split())


def test_the_picture_of_the_speed_shows_the_committed_results() -> None:
    shown = in_words([read_panel(path) for path in decode_results()])
    assert shown.encode("latin-1") in (EXAMPLES / "figures" / "decode-speed.png").read_bytes(), (
        "draw it again: python -m minillm.bench picture examples/results/h200-decode-{135m,1b,8b}.json "
        "--output examples/figures/decode-speed.png"
    )
