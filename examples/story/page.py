"""The figures of a run of the whole story, on its page and as a picture. Nothing is typed in by hand.

    python -m examples.story --json examples/results/h200-story.json
    python -m examples.story.page examples/results/h200-story.json

The second command writes examples/figures/story.png, and the part of README.md between its two marks.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minillm.bench.report import check_plot, write_file
from minillm.command import Parser, run, write
from minillm.errors import ConfigError
from minillm.json_file import read_json

PAGE = Path(__file__).with_name("README.md")
PICTURE = Path(__file__).parents[1] / "figures" / "story.png"
FIRST, BETWEEN, LAST = "#b8b8b8", "#8fb4dc", "#2f6db3"  # as in `minillm/bench/picture.py`
PLACE = re.compile(r"(?<=<!-- table: story -->\n).*?(?=\n<!-- end -->)", re.S)


def read_result(path: Path) -> dict[str, Any]:
    """What `python -m examples.story --json` wrote. Raises: ConfigError."""
    data = read_json(path, ConfigError)
    if data.get("bench") != "story" or not data.get("rows"):
        raise ConfigError(f"{path} is no result of `python -m examples.story --json`")
    return data


def gain(row: dict[str, Any]) -> str:
    """How many times less the last bar is than the first."""
    first, *_, last = row["bars"].values()
    return f"{first / last:.1f}x"


def block(data: dict[str, Any], path: Path) -> str:
    """The part of the page that shows a result, which lies at `path`: picture, table, what was measured besides."""
    words = ", ".join(dict.fromkeys(f"{row['chapter']}: {gain(row)}" for row in data["rows"]))
    return "\n".join(
        (
            f"![Bars of each program, without its trick and with it; {words}](../figures/{PICTURE.name})",
            "",
            "| | program | shape | milliseconds | gain |",
            "|---|---|---|---|---|",
            *map(table_line, data["rows"]),
            "",
            *(f"- {row['chapter']}, {row['shape']}: {note.strip()}" for row in data["rows"] for note in row["notes"]),
            "",
            f"{circumstances(data)}; `../results/{path.name}`.",
        )
    )


def table_line(row: dict[str, Any]) -> str:
    bars = ", ".join(f"{name} {value:#.3g}" for name, value in row["bars"].items())
    return f"| {row['chapter']} | {row['title']} | {row['shape']} | {bars}; {row['unit']} | {gain(row)} |"


def circumstances(data: dict[str, Any]) -> str:
    return f"{data['machine']}, {data['date'][:10]}, {data['versions']}"


def in_words(data: dict[str, Any]) -> str:
    """What the picture shows, as a text, which the file carries: for whoever cannot see it, and for a test."""
    return "\n".join((*map(table_line, data["rows"]), circumstances(data)))


def panels(data: dict[str, Any]) -> Iterator[tuple[str, list[str], list[float], list[str]]]:
    """(title, names, milliseconds, colours) of each row."""
    for row in data["rows"]:
        names, values = list(row["bars"]), list(row["bars"].values())
        colours = [FIRST, *[BETWEEN] * (len(names) - 2), LAST]
        title = f"{row['chapter']}. {row['title']}, {row['shape']}: {gain(row)}"
        yield f"{title}\nmilliseconds {row['unit']}", names, values, colours


def draw(data: dict[str, Any], output: Path) -> None:
    """A panel for each row, with an axis of its own, linear and from zero. Raises: ConfigError."""
    check_plot(output, "the picture")
    from matplotlib.figure import Figure

    counts = [len(row["bars"]) for row in data["rows"]]
    figure = Figure(figsize=(9, 0.6 + sum(0.66 + 0.27 * count for count in counts)), layout="constrained")
    grid = figure.subplots(len(counts), squeeze=False, height_ratios=counts)[:, 0]
    for axes, (title, names, values, colours) in zip(grid, panels(data), strict=True):
        drawn = axes.barh(range(len(names)), values, color=colours, height=0.75)
        axes.bar_label(drawn, [f"{value:#.3g} ms" for value in values], padding=4, fontsize=9)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(values))
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
    figure.supxlabel(circumstances(data), fontsize=8, color="#555555")
    about = {"Description": in_words(data)}
    write_file(output, lambda: figure.savefig(output, dpi=150, metadata=about, pil_kwargs={"optimize": True}))


def show(result: Path, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Draw the picture and fill the page. Raises: ConfigError."""
    data = read_result(result)
    draw(data, picture)
    text, count = PLACE.subn(lambda _: block(data, result), page.read_text(encoding="utf-8"))
    if count != 1:
        raise ConfigError(f"{page} must have one place between `<!-- table: story -->` and `<!-- end -->`, not {count}")
    write_file(page, lambda: page.write_text(text, encoding="utf-8"))
    write(f"{picture} and {page} show {result}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    parser = Parser("examples.story.page", "Show the figures of a run of the whole story on its page and as a picture.")
    parser.add_argument("result", type=Path, help="what `python -m examples.story --json` wrote")
    show(parser.parse_args(arguments).result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
