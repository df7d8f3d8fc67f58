"""The user's statements: which names they assign to and read, and how much they compute."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch import nn

from gpipe_compiler.codegen.size_questions import first_asked, is_size, size_asked
from gpipe_compiler.errors import SourceLocation

NOWHERE = ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), [], [])

_SHAPE_ATTRIBUTES = frozenset({"shape", "T", "mT", "H", "real", "imag", "ndim", "dtype", "device"})


@dataclass(frozen=True, eq=False)
class UserStatement:
    """One statement of the user's program, or an item of one that has a name and lines of its own.

    Attributes:
        method: the innermost function with arguments that it stands in, `NOWHERE` in none.
        targets: the names it assigns to; empty where it assigns to none, or to anything else.
        function: of the function whose result it returns, the name; "" where it returns nothing.
    """

    node: ast.stmt | ast.expr
    method: ast.FunctionDef
    targets: tuple[str, ...]
    function: str = ""

    @property
    def line(self) -> int:
        return self.node.lineno

    @cached_property
    def operations(self) -> int:
        """Calls, operators and subscripts in it; ops beyond that number come from inside the
        functions it calls. No limit for a comprehension."""
        parts = [*ast.walk(self.node)]
        if any(isinstance(part, ast.comprehension | ast.Lambda) for part in parts):
            return sys.maxsize
        counted = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.AugAssign)
        return sum(
            isinstance(part, counted)
            or (isinstance(part, ast.Attribute) and part.attr in _SHAPE_ATTRIBUTES)
            for part in parts
        )

    @cached_property
    def names_size(self) -> bool:
        """Whether it is `b = x.shape[0]`, `b, c = x.shape`, `b = x.size(0)` or the like."""
        value = getattr(self.node, "value", None)
        values = value.elts if isinstance(value, ast.Tuple) else (value,)
        return isinstance(self.node, ast.stmt) and any(map(is_size, values))

    def size_named(self, place: int, rank: int | None = None) -> str:
        """What it calls the size of a dimension; "" where it has no name for that alone.

        Args:
            rank: how many dimensions there are, where that is known.
        """
        value = getattr(self.node, "value", None) if isinstance(self.node, ast.stmt) else None
        if len(self.targets) > 1 and not isinstance(value, ast.Tuple):
            first = first_asked(value)
            if first is not None and first < 0:
                first = None if rank is None else rank + first
            dims = enumerate(self.targets, first or 0)
            named = tuple(own for dim, own in dims if dim == place and first is not None)
        else:
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            pairs = zip(self.targets, map(size_asked, values), strict=False)
            same = {place} if rank is None else {place, place - rank}
            named = tuple(own for own, dim in pairs if dim in same)
        return named[0] if len(named) == 1 and named[0] != "_" else ""

    @cached_property
    def rebinds(self) -> bool:
        """Whether it computes what it assigns from what the same name held before."""
        if isinstance(self.node, ast.expr):
            return False
        read = set(_names(self.node, ast.Load))
        return isinstance(self.node, ast.AugAssign) or not read.isdisjoint(self.targets)

    @property
    def listed(self) -> bool:
        """Whether what it assigns is computed item by item, in the order of the targets:
        `f(x), g(y)`, `(f(x) for f in functions)` or `map(f, items)`."""
        match getattr(self.node, "value", None) if isinstance(self.node, ast.stmt) else None:
            case ast.Call(func=ast.Name(id="map")) | ast.GeneratorExp() | ast.ListComp():
                return True
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return not any(isinstance(item, ast.Name | ast.Constant) for item in elements)
            case _:
                return False


def method_at(files: Iterable[str], owner: str, own: str) -> ast.FunctionDef | None:
    """A method that a class of some files of the user's defines itself; None where none does."""
    node = _class_of(files, owner)
    methods = (item for item in (node.body if node else ()) if isinstance(item, ast.FunctionDef))
    return next((item for item in methods if item.name == own), None)


def _class_of(files: Iterable[str], own: str) -> ast.ClassDef | None:
    nodes = (node for file in dict.fromkeys(files) for node in parsed(file).body)
    return next((n for n in nodes if isinstance(n, ast.ClassDef) and n.name == own), None)


def torch_base(files: Sequence[str], own: str) -> type[nn.Module] | None:
    """The layer of torch.nn that a class of the user's derives from; None for any other."""
    node = _class_of(files, own)
    for base in node.bases if node else ():
        known = getattr(base, "attr", "") or getattr(base, "id", "")
        found: type[nn.Module] | None = getattr(nn, known, None)
        if found is None and known != own:
            found = torch_base(files, known)
        if found not in (None, nn.Module):
            return found
    return None


def statement_at(location: SourceLocation | None) -> UserStatement | None:
    """The statement that a line belongs to; None where the source cannot be read."""
    if location is None:
        return None
    items = _named_items(location.file)
    return items.get(location.line) or _statements(location.file).get(location.line)


def size_name_in(method: ast.FunctionDef, file: str, variable: str, place: int, rank: int) -> str:
    """What statements of a method call the size of a variable's dimension; "" for none."""
    asking = (own for own, read in _asking_sizes(file) if own.method is method and read == variable)
    return next(filter(None, (own.size_named(place, rank) for own in asking)), "")


def place_at(location: SourceLocation | None) -> UserStatement | None:
    """The whole statement of a line in a method or function; None where it is in none."""
    found = None if location is None else _statements(location.file).get(location.line)
    return None if found is None or found.method is NOWHERE else found


def calls_at(location: SourceLocation, own: str) -> int:
    """How many calls of a function or method of a name the statement at a line has."""
    place = place_at(location)
    nodes = () if place is None else ast.walk(place.node)
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    names = (getattr(node, "id", "") or getattr(node, "attr", "") for node in called)
    return sum(name.strip("_") == own.strip("_") for name in names)


def is_closure(location: SourceLocation) -> bool:
    """Whether a line is one of a function in another, which that one does not call twice."""
    place = place_at(location)
    return place is not None and id(place.method) in _closures(location.file)


@cache
def _closures(file: str) -> frozenset[int]:
    found: set[int] = set()
    for outer in ast.walk(parsed(file)):
        inside = [*ast.walk(outer)] if isinstance(outer, ast.FunctionDef) else []
        called = Counter(ast.unparse(node.func) for node in inside if isinstance(node, ast.Call))
        inner = [node for node in inside[1:] if isinstance(node, ast.FunctionDef)]
        plain = (node for node in inner if parameters_of(node)[:1] != ["self"])
        found.update(id(node) for node in plain if called[node.name] < 2)
    return frozenset(found)


def is_repeated(location: SourceLocation) -> bool:
    """Whether a line stands in a loop."""
    return location.line in _loops(location.file)


def first_line(location: SourceLocation) -> int:
    """Where the statement at a line begins, or the outermost loop that it stands in."""
    statement = statement_at(location)
    line = statement.line if statement else location.line
    return _loops(location.file).get(location.line, line)


def repeated_line(location: SourceLocation | None) -> SourceLocation | None:
    """The line that stands in a loop, of one and of those that called the modules around it."""
    lines = () if location is None else (location, *(line for _, line in location.calls))
    return next(filter(is_repeated, lines), None)


def begins_with_module(location: SourceLocation) -> bool:
    """Whether what the statement at a line computes first is the call of a module: of `self`, of
    what a loop runs over, or of a local name."""
    place = place_at(location)
    if place is None:
        return False
    loops = (node for node in ast.walk(place.method) if isinstance(node, ast.For))
    ones = {"self"}.union(*(set(_names(node.target, ast.Store)) for node in loops))
    match next(_computed(place.node), None):
        case ast.Call(func=ast.Name() | ast.Subscript()):
            return True
        case ast.Call(func=function):
            return next(_names(function, ast.Load), "") in ones
        case _:
            return False


def _computed(node: ast.AST) -> Iterator[ast.expr]:
    """The calls, operators and subscripts in a statement, in the order in which they run."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.Call) or child is not node.func:
            yield from _computed(child)
    if isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript):
        yield node


@cache
def _loops(file: str) -> Mapping[int, int]:
    """By the lines that stand in a loop, the first one of the outermost loop."""
    loops = (node for node in ast.walk(parsed(file)) if isinstance(node, ast.For | ast.While))
    spans = [(node.lineno, (node.end_lineno or node.lineno) + 1) for node in loops]
    return {line: start for start, end in sorted(spans)[::-1] for line in range(start, end)}


@cache
def parsed(file: str) -> ast.Module:
    """A file of the user's; empty where it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _statements(file: str) -> Mapping[int, UserStatement]:
    """The simple statements of a file by each line they cover."""
    tree = parsed(file)
    around: dict[ast.AST, str] = {}
    method: dict[ast.AST, ast.FunctionDef] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside = [*ast.walk(function)]
            around.update(dict.fromkeys(inside, function.name))
            method.update(dict.fromkeys(inside if function.args.args else (), function))
    table: dict[int, UserStatement] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
            returns = around.get(node, "") if isinstance(node, ast.Return) else ""
            statement = UserStatement(node, method.get(node, NOWHERE), _targets(node), returns)
            for line in _lines(node):
                # Which of several statements of a line made a value is not known.
                several = line in table
                table[line] = dataclasses.replace(statement, targets=()) if several else statement
    return table


@cache
def _asking_sizes(file: str) -> tuple[tuple[UserStatement, str], ...]:
    """The statements of a file that name sizes of one variable, and that variable."""
    asking = (statement for statement in _statements(file).values() if statement.names_size)
    pairs = ((statement, {*_names(statement.node, ast.Load)}) for statement in asking)
    return tuple((statement, read.pop()) for statement, read in pairs if len(read) == 1)


@cache
def _named_items(file: str) -> Mapping[int, UserStatement]:
    """What the statements of a file make for dictionaries and the like, by each line it covers."""
    table: dict[int, UserStatement] = {}
    for whole in dict.fromkeys(_statements(file).values()):
        for own, value in _items(getattr(whole.node, "value", None)):
            table.update(dict.fromkeys(_lines(value), UserStatement(value, whole.method, (own,))))
    return table


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _items(value: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
    """What a dictionary, or an object of keywords alone, is made of: names, and what they stand
    for, where that has lines of its own."""
    pairs: list[tuple[object, ast.expr]] = []
    match value:
        case ast.Dict(keys=keys, values=values):
            pairs = [*zip((getattr(key, "value", None) for key in keys), values, strict=True)]
        case ast.Call(func=ast.Name(id=own), args=[], keywords=keywords) if own[:1].isupper():
            pairs = [(keyword.arg, keyword.value) for keyword in keywords]
    covered = Counter(line for _, item in pairs for line in _lines(item))
    for name, item in pairs:
        alone = all(covered[line] == 1 for line in _lines(item))
        named = isinstance(name, str) and name.isidentifier()
        if alone and named and not isinstance(item, ast.Name | ast.Constant):
            yield str(name), item


def _targets(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name), *_]):
            return (name,)
        case ast.Assign(targets=[ast.Tuple(elts=elements), *_]):
            names = [item.id for item in elements if isinstance(item, ast.Name)]
            return tuple(names) if len(names) == len(elements) else ()
        case ast.AugAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case _:
            return ()


def names_returned(location: SourceLocation | None) -> tuple[str, ...]:
    """What the function of a line returns in the end, item by item: names, "" for anything else."""
    place = place_at(location)
    returns = () if place is None else ast.walk(place.method)
    values = [node.value for node in returns if isinstance(node, ast.Return)]
    match values[-1:]:
        case [ast.Tuple(elts=items)]:
            return tuple(getattr(item, "id", "") for item in items)
        case [ast.Name(id=own)]:
            return (own,)
        case _:
            return ()


def parameters_of(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in every]


def names_of_parts(location: SourceLocation | None, count: int) -> tuple[str, ...]:
    """The names of the parts of what a line assigns to one name, as the user takes it apart.

    `q, k, v = qkv` and `q, k, v = map(f, qkv)` tell those of `qkv`, in its function or else in one
    alone of the file. Where none does they are numbered; () for what is assigned to no name.
    """
    place = place_at(location)
    if location is None or place is None:
        return ()
    targets = place.targets
    if len(targets) != 1:
        return ()
    for scope in (place.method, parsed(location.file)):
        parted = [
            (names, getattr(node.value, "id", ""))
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and len(names := _targets(node)) == count
            and targets[0] in _names(node.value, ast.Load)
        ]
        plainly = {names for names, own in parted if own == targets[0]}
        found = plainly or {names for names, _ in parted}
        if len(found) == 1:
            return found.pop()
    return tuple(f"{targets[0]}_{number}" for number in range(count))


def alias_of(location: SourceLocation | None, own: str) -> str:
    """The name to which the user assigns another one by itself, before a line or its callers."""
    found = [
        (node.lineno, alias)
        for place in _frames(location)
        for node, alias in _aliases(place.method, own)
        if node.lineno <= place.line
    ]
    return max(found, default=(0, ""))[1]


def alias_after(location: SourceLocation | None, own: str) -> str:
    """The same for what a line or its callers make, before the name stands for anything else."""
    for place in _frames(location):
        later = range(place.line + 1, sys.maxsize)
        named = (node for node in ast.walk(place.method) if isinstance(node, ast.Name))
        stored = (node for node in named if node.id == own and isinstance(node.ctx, ast.Store))
        end = min((node.lineno for node in stored if node.lineno in later), default=sys.maxsize)
        for node, alias in _aliases(place.method, own):
            if node.lineno in later and node.lineno < end and own in place.targets:
                return alias
    return ""


def _frames(location: SourceLocation | None) -> Iterator[UserStatement]:
    """The statements of a line and of its callers, from the inside out."""
    frames = () if location is None else (location, *reversed(location.callers))
    return filter(None, map(place_at, frames))


def _aliases(method: ast.FunctionDef, own: str) -> Iterator[tuple[ast.Assign, str]]:
    """The statements of a method that assign a name to another by itself, and the other."""
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=other)) if other == own:
                yield node, alias


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, context):
            yield part.id
