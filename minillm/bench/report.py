"""From samples to a table, a JSON file and a plot."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

Row = dict[str, Any]  # one line of the table: plain numbers and texts under the names that the JSON file has

CEILINGS = {"bytes": ("read ceiling", 1e9, "GB/s"), "flops": ("arithmetic ceiling", 1e12, "TFLOP/s")}
MAX_SAMPLES = 16_000  # raw samples in a JSON file, of all rows together: about 130 KB


class Column(NamedTuple):
    """A column of the table. A value of None is shown as a dash."""

    title: str
    key: str
    show: Callable[[Any], str] = str


class Bars(NamedTuple):
    """What a plot shows of each row, by key: the texts of its label, the length of its bar, a mark, and a limit."""

    label: Sequence[str]
    value: str
    unit: str
    mark: str | None = None
    limit: str | None = None


@dataclass
class Report:
    """A finished benchmark.

    Attributes:
        about: circumstances, printed above the table. notes: printed below it, such as ratios of rows.
        ceiling_unit: "bytes" read from memory, or "flops".
        samples: the key of the rows' raw samples, a list of floats, which the table does not show.
    """

    bench: str
    about: dict[str, str]
    ceiling: float  # per second, in `ceiling_unit`
    columns: list[Column]
    bars: Bars
    rows: list[Row]
    samples: str | None = None
    notes: list[str] = field(default_factory=list)
    ceiling_unit: str = "bytes"

    def text(self) -> str:
        name, scale, unit = CEILINGS[self.ceiling_unit]
        # rounded from the figure in the JSON, so that the two can be compared
        ceiling = f"{_rounded(self.ceiling) / scale:.4g} {unit}, measured in this run"
        about = {"bench": self.bench, **self.about, name: ceiling}
        width = max(len(name) for name in about)
        lines = [f"{name:<{width}}  {value}" for name, value in about.items()]
        return "\n".join([*lines, "", table(self.columns, self.rows), "", *self.notes]).rstrip() + "\n"

    def write_json(self, path: Path) -> None:
        """All of it, one row a line. Of too many samples, every k-th is kept; `sample_stride` is that k."""
        count = sum(len(row[self.samples]) for row in self.rows) if self.samples else 0
        stride = max(1, math.ceil(count / MAX_SAMPLES))
        rows = [{k: v[::stride] if k == self.samples else v for k, v in row.items()} for row in self.rows]
        ceiling = {f"ceiling_{self.ceiling_unit}_per_s": self.ceiling}
        head = {"bench": self.bench, **self.about, **ceiling, "sample_stride": stride}
        lines = [
            f"{json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in (head | {"notes": self.notes}).items()
        ]
        lines.append('"rows": [\n' + ",\n".join(json.dumps(_rounded(row)) for row in rows) + "\n]")
        write_file(path, lambda: path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8"))

    def plot(self, path: Path) -> None:
        """Horizontal bars, one a row."""
        from matplotlib.figure import Figure

        label, value, unit, mark, limit = self.bars
        rows, at = self.rows[::-1], range(len(self.rows))  # the first row on top
        figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(at, [row[value] for row in rows], color="#4c78a8", label=_words(value))
        for key, style in ((mark, "|k"), (limit, "|r")):
            if key is not None and all(row[key] is not None for row in rows):
                axes.plot([row[key] for row in rows], at, style, markersize=12, label=_words(key))
        axes.set_yticks(at, [", ".join(_label(key, row[key]) for key in label) for row in rows])
        axes.set_xlabel(unit)
        figure.suptitle(f"{self.bench}: {self.about['model']}\n{self.about['machine']}", fontsize=9)
        axes.legend()
        write_file(path, lambda: figure.savefig(path, dpi=150))


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Columns as wide as their widest cell: the first one flush left, the others flush right."""
    lines = [[c.title for c in columns]]
    lines += [["-" if row[c.key] is None else c.show(row[c.key]) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def fixed(digits: int) -> Callable[[float], str]:
    """Shows a number with so many digits after the point."""
    return lambda value: f"{value:.{digits}f}"


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the samples lie, interpolated linearly between the two nearest."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Find out before the measurement, and not after it, that its results cannot be written. Raises: ConfigError."""
    if json_path is not None:
        check_file(json_path)
    if plot_path is not None:
        check_plot(plot_path, "--plot")


def check_plot(path: Path, option: str) -> None:
    """Whether a picture can be drawn and written there, as `option` asks for. Raises: ConfigError."""
    check_file(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{option} writes a PNG image, and {path} does not end in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} needs matplotlib: pip install 'minillm[plot]'") from error


def check_file(path: Path) -> None:
    """Whether a file can be written there. Raises: ConfigError."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {folder}")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def write_file(path: Path, write: Callable[[], object]) -> None:
    """Have a file written. Raises: ConfigError if the system refuses."""
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _rounded(value: Any) -> Any:
    """Five significant digits: more than any clock here deserves. Whole numbers (bytes) stay exact."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def _words(key: str) -> str:
    return key.replace("_", " ")


def _label(key: str, value: object) -> str:
    return str(value) if isinstance(value, str) else f"{_words(key)} {'grows' if value is None else value}"
