"""JSON files of a checkpoint: read whole, and taken apart with the types that are due.

A file that somebody else wrote may hold anything. What is read through `Fields` has the type and the range that the
code relies on, or is one clear error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, MinillmError


def read_json(path: Path, error: type[MinillmError]) -> dict[str, Any]:
    """The JSON object in a UTF-8 file; raises `error` if the file is unreadable, broken, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise error(f"{path} cannot be read: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise error(f"{path} is not valid JSON: {fault}") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def is_integer(value: object) -> bool:
    """True for a whole number; Python counts True and False as integers too, JSON does not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Fields:
    """Typed reading of one JSON object; a null counts as a missing key. `where` names the object in errors.

    Every method raises `ConfigError` if the value has the wrong type or lies outside its range.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int, minimum: int = 1) -> int:
        value = self.get(key, default)
        if not is_integer(value) or not minimum <= value < 2**31:
            raise ConfigError(f"{self.where}: {key} must be a whole number from {minimum} to 2**31 - 1, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, zero_allowed: bool = False) -> float:
        """A finite number above 0, or from 0 on; without a default the key must be there."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        number = value if is_integer(value) or isinstance(value, float) else -1
        if not (0 < number <= sys.float_info.max or (zero_allowed and number == 0)):  # also false for NaN
            bound = "of at least" if zero_allowed else "above"
            raise ConfigError(f"{self.where}: {key} must be a finite number {bound} 0, not {value!r}")
        return float(number)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value
