"""What torch relied on of sizes, in terms of the graph's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sympy

from gpipe_compiler.ir.symbolic import requirements
from gpipe_compiler.runtime.sizes import Size


def test_requirements_have_one_order_in_all_processes() -> None:
    """Which sympy's sets have not: their order follows from hashes of names."""
    symbols = sympy.symbols("s:9", integer=True, positive=True)
    sizes: dict[Any, Any] = {
        symbol: Size(f"x_{number}", ("x", number), 20 + number)
        for number, symbol in enumerate(symbols)
    }
    together = sympy.And(*(3 * symbol < 100 + number for number, symbol in enumerate(symbols)))
    guard = SimpleNamespace(expr=together)
    environment: Any = SimpleNamespace(guards=[guard], replace=lambda expression: expression)

    found = list(requirements(environment, sizes, lambda guard: ""))

    assert len(found) == len(symbols)
    order = [next(iter(condition.free_symbols)) for condition in together.args]
    named = [str(sizes[symbol].name) for symbol in order]
    assert [next(own for own in named if own in str(one)) for one in found] == named
