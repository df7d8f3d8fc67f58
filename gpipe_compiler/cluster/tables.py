"""Tables of a TOML file that remember what was wrong with them, and where."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from gpipe_compiler.cluster.quantities import Quantity

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")


class Faults:
    """What is wrong with a file.

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
        """The line of a place, or the closest above it that can be told; 0 for none.

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


class Table:
    """A table, whose keys are taken one by one; what is left over is a fault.

    Args:
        path: where in the file it stands; empty for the whole of it.
    """

    def __init__(self, content: Mapping[str, object], path: str, faults: Faults) -> None:
        self._content = content
        self._path = path
        self._faults = faults
        self._known: list[str] = []

    def wrong(self, key: str, problem: str) -> None:
        """Notes what is wrong with a key; with the table itself where the key is empty."""
        self._faults.add(self._where(key), problem)

    def has(self, key: str) -> bool:
        """Whether there is such a key."""
        return key in self._content

    def is_table(self, key: str) -> bool:
        """Whether a table stands there."""
        return isinstance(self._content.get(key), dict)

    def inner(self, key: str) -> Table:
        """The table that stands there."""
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

    def quantity(
        self, key: str, quantity: Quantity, *, needed: bool = False, default: float | None = None
    ) -> float | None:
        """The quantity that stands there, or the default; None where it is wrong or missing."""
        written = self._taken(key)
        if written is None:
            if needed:
                self.wrong(key, f"is missing: write {quantity.example}")
            return default
        try:
            return quantity.read(written)
        except ValueError as error:
            self.wrong(key, f"= {error}")
            return None

    def text(self, key: str) -> str | None:
        """The text that stands there, if any."""
        written = self._taken(key)
        if written is None or (isinstance(written, str) and written.strip()):
            return written
        self.wrong(key, f"= {written!r} is no name")
        return None

    def texts(self, key: str) -> list[str]:
        """The text, or the list of texts, that has to stand there."""
        written = self._taken(key)
        items = written if isinstance(written, list) else [written]
        texts = [item for item in items if isinstance(item, str) and item.strip()]
        if items and len(texts) == len(items):
            return texts
        said = "is missing" if written is None else f"= {written!r} names no devices"
        self.wrong(key, f'{said}: write {key} = "4xH100" or ["2xV100", "2xP40"]')
        return []

    def count(self, key: str, default: int) -> int:
        """The whole number of at least 1 that stands there, or the default."""
        written = self._taken(key)
        if written is None:
            return default
        if isinstance(written, bool) or not isinstance(written, int) or written < 1:
            self.wrong(key, f"= {written!r} is not a whole number of at least 1")
            return default
        return written

    def pairs(self, key: str) -> list[list[int]]:
        """The pairs of whole numbers that have to stand there."""
        written = self._taken(key)
        if isinstance(written, list) and written and all(map(_is_pair, written)):
            return written
        said = "is missing" if written is None else f"= {written!r} is no list of pairs"
        self.wrong(key, f"{said}: write {key} = [[0, 1], [2, 3]]")
        return []

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


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in item)
    )
