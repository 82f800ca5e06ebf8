"""`picture`: decode results, written by `decode --json`, as one picture for people: a panel for each model.

Each bar is a whole decode step: eager, as one CUDA Graph, as one graph of fused kernels, and the floor, which is what
the step must read, divided by the bandwidth that was measured in the same run. All panels have one axis, linear and
from zero, so that a bar twice as long is twice the time; short bars are read by the figure beside them. Of a result
with several batches, prompts or caches, the first is drawn, and its panel says which that was.

Nothing is typed in by hand: names, machine and date come from the files too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..json_file import read_json
from .report import check_plot, write_file

MODES = {
    "eager": ("eager", "#b8b8b8"),
    "graph": ("one graph", "#8fb4dc"),
    "fused graph": ("one graph, fused kernels", "#2f6db3"),
}
FLOOR = ("floor: bytes / bandwidth", "#e0a030")


class Panel(NamedTuple):
    """What is drawn of one result. bars: (name, colour, milliseconds), the floor last."""

    title: str
    bars: list[tuple[str, str, float]]
    circumstances: str


def picture(results: Sequence[Path], output: Path) -> None:
    """Draw the results, in their order. Raises: ConfigError if one is no result of decode, or for the output."""
    check_plot(output, "--output")
    panels = [read_panel(path) for path in results]
    draw(panels, output)


def read_panel(path: Path) -> Panel:
    """The first setting of a decode result. Raises: ConfigError."""
    data = read_json(path, ConfigError)
    if data.get("bench") != "decode":
        raise ConfigError(f"{path} is no result of `bench decode --json`, which is what the picture shows")
    try:
        rows = data["rows"]
        setting = {key: rows[0][key] for key in ("batch", "prompt", "cache")}
        times = {row["mode"]: _milliseconds(row["step_ms_p50"]) for row in rows if setting.items() <= row.items()}
        bars = [(*MODES[mode], times[mode]) for mode in MODES if mode in times]
        bars.append((*FLOOR, _milliseconds(rows[0]["floor_ms"])))
        title = f"{_subject(data['model'])}; {', '.join(f'{key} {value}' for key, value in setting.items())}"
        circumstances = f"{data['machine']}, {data['date'][:10]}, {_without(data['versions'], 'transformers')}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} is a broken result of `bench decode --json`: {error!r} in it") from error
    return Panel(title, bars, circumstances)


def draw(panels: Sequence[Panel], output: Path) -> None:
    """Horizontal bars, the first on top, each with its milliseconds. Raises: ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    counts = [len(panel.bars) for panel in panels]
    figure = Figure(figsize=(9, 1.3 + sum(0.45 + 0.27 * count for count in counts)), layout="constrained")
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=counts)
    longest = max(value for panel in panels for _, _, value in panel.bars)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        names, colours, values = zip(*panel.bars, strict=True)
        drawn = axes.barh(range(len(names)), values, color=colours, height=0.75)
        axes.bar_label(drawn, [f"{value:#.3g} ms" for value in values], padding=4, fontsize=9)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * longest)
        axes.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
        axes.tick_params(left=False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    grid[-1, 0].set_xlabel("milliseconds a decode step, median", fontsize=9)
    caption = dict.fromkeys(panel.circumstances for panel in panels)  # each once
    figure.supxlabel("\n".join(caption), fontsize=8, color="#555555")
    about = {"Description": in_words(panels)}
    write_file(output, lambda: figure.savefig(output, dpi=150, metadata=about, pil_kwargs={"optimize": True}))


def in_words(panels: Sequence[Panel]) -> str:
    """What the picture shows, as a text, which the file carries: for whoever cannot see it, and for a test."""
    return "\n".join(
        f"{title}: {', '.join(f'{name} {value:#.3g} ms' for name, _, value in bars)} ({circumstances})"
        for title, bars, circumstances in panels
    )


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _subject(model: str) -> str:
    """Without how long the weights took to load."""
    return model.partition(", ready in")[0]


def _without(versions: str, package: str) -> str:
    return ", ".join(part for part in versions.split(", ") if not part.startswith(package))
