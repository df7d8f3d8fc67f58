"""Tables of a TOML file, taken key by key, and what is wrong in them with its lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeVar

from gpipe_compiler.cluster.quantities import Quantity

T = TypeVar("T")

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")


class Faults:
    """The faults of a file.

    Args:
        text: of the file, in which lines are looked up.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._found: list[tuple[int, str]] = []

    def add(self, where: str, problem: str) -> None:
        """Notes a fault of the value at a place such as `hosts[1].link.bandwidth`."""
        line = self._line(where)
        self._found.append((line, f"{f'line {line}: ' if line else ''}{where} {problem}"))

    def __len__(self) -> int:
        return len(self._found)

    @property
    def listing(self) -> str:
        """A line for every fault, from the top of the file; what is missing in it last."""
        ordered = sorted(self._found, key=lambda fault: fault[0] or math.inf)
        return "".join(f"\n  - {text}" for _, text in ordered)

    def _line(self, where: str) -> int:
        """The line of a place, or the closest above it that is found; 0 for none.

        TOML's reader says nothing of lines, so headers and keys are looked for as they are mostly
        written.
        """
        names = re.findall(r"[^.\[\]]+|\[\d+\]", where)
        seen: dict[str, int] = {}
        header, best, matched = "", 0, 0
        for number, text in enumerate(self._lines, start=1):
            match = _HEADER.fullmatch(text)
            if match:
                header = re.sub(r"[\s\"']", "", match[2])
                if match[1] == "[[":
                    index = seen.get(header, 0)
                    seen[header] = index + 1
                    header += f"[{index}]"
            else:
                key = text.split("=")[0].strip().strip("\"'") if "=" in text else ""
                if not key or key.startswith("#"):
                    continue
            place = header if match else ".".join(filter(None, (header, key)))
            parts = re.findall(r"[^.\[\]]+|\[\d+\]", place)
            if parts == names[: len(parts)] and len(parts) > matched:
                best, matched = number, len(parts)
        return best


@dataclass(eq=False)
class Table:
    """A table, whose keys are taken one by one; what is left over is a fault.

    Args:
        path: where in the file it stands; empty for the whole of it.
    """

    _content: Mapping[str, object]
    _path: str
    _faults: Faults
    _known: list[str] = field(default_factory=list, init=False)

    def wrong(self, key: str, problem: str) -> None:
        """Notes what is wrong with a key; with the table itself where the key is empty."""
        self._faults.add(self._where(key), problem)

    def has(self, key: str) -> bool:
        return key in self._content

    def is_table(self, key: str) -> bool:
        return isinstance(self._content.get(key), dict)

    def inner(self, key: str) -> Table:
        content = self._taken(key)
        return Table(content if isinstance(content, dict) else {}, self._where(key), self._faults)

    def tables(self, key: str) -> list[Table]:
        """The tables of an array such as `[[hosts]]`."""
        content = self._taken(key)
        if content is None:
            return []
        if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
            self.wrong(key, f"has to be tables, each under [[{key}]]")
            return []
        where = self._where(key)
        return [Table(item, f"{where}[{i}]", self._faults) for i, item in enumerate(content)]

    def named_tables(self, key: str) -> Iterator[tuple[str, Table]]:
        """The tables under names of the user's own, such as `[devices.mine]`."""
        content = self._taken(key)
        if content is None:
            return
        if not isinstance(content, dict):
            self.wrong(key, f"has to be tables, each under [{key}.<name>]")
            return
        for name, item in content.items():
            if isinstance(item, dict):
                yield name, Table(item, f"{self._where(key)}.{name}", self._faults)
            else:
                self.wrong(f"{key}.{name}", f"= {item!r} is no table: write [{key}.{name}]")

    def value(self, key: str, read: Callable[[object], T], example: str = "") -> T | None:
        """What is made of the value that stands there; None where it is missing or wrong.

        Args:
            read: raises ValueError for a wrong value, saying what is wrong and how to write it.
            example: how to write one that is needed; "" for one that may be missing.
        """
        written = self._taken(key)
        if written is None:
            if example:
                self.wrong(key, f"is missing: write {example}")
            return None
        try:
            return read(written)
        except ValueError as error:
            self.wrong(key, f"= {error}")
            return None

    def quantity(self, key: str, quantity: Quantity, *, needed: bool = False) -> float | None:
        return self.value(key, quantity.read, quantity.example if needed else "")

    def refuse_others(self) -> None:
        """Notes the keys that nobody has asked for."""
        for key in self._content:
            if key not in self._known:
                near = get_close_matches(key, self._known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                self.wrong(key, f"means nothing here; {advice}")

    def _taken(self, key: str) -> object:
        self._known.append(key)
        return self._content.get(key)

    def _where(self, key: str) -> str:
        return ".".join(filter(None, (self._path, key)))
