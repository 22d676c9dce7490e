"""The Jinja environment that chat templates run in.

A template comes with the model, from a stranger. Jinja's sandbox keeps it from reaching Python;
this one also bounds what it may cost: characters made, time, and every operation that makes a lot
out of a little (``'x' * 10**9``, ``10**10**10``, ``|indent(10**9)``, doubling in a loop).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from threading import local
from typing import Any, NoReturn

from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 24  # of one text; the longest context in use is some 2**22 characters
MAX_WORK = 1 << 29  # characters and list items made in one rendering, all together
MAX_SECONDS = 10.0
MAX_WIDTH = 999  # of a formatted field or an indentation
MAX_BITS = 4096  # of a whole number

# Filters that pad, decorate or draw lots, and methods that do; no chat template in use has them.
_DROPPED_FILTERS = frozenset(
    {"center", "pprint", "random", "striptags", "sum", "urlize", "wordwrap", "xmlattr"}
)
_DROPPED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_DROPPED_METHODS |= {"format", "format_map", "translate", "maketrans", "encode"}
# Filters that read all the text that their arguments refer to.
_TEXT_FILTERS = frozenset(
    {"capitalize", "lower", "title", "trim", "upper", "wordcount", "truncate"}
)
_TEXT_FILTERS |= {"e", "escape", "forceescape", "safe", "urlencode", "tojson", "string", "list"}
_TEXT_FILTERS |= {"indent", "join", "replace"}
_FIELD = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class Refused(TemplateRuntimeError):
    """The template called raise_exception."""


class _Budget(local):
    work = 0
    deadline = float("inf")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """As transformers configures it (trim_blocks, lstrip_blocks, loop controls, generation
    blocks), with budgets. One environment may render in several threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            optimized=False,  # constants are not folded: work happens in render, on its budget
            finalize=self._output,
            cache_size=0,
        )
        self._budget = _Budget()
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        for name in ("lipsum", "cycler"):
            del self.globals[name]
        self.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        for name in _TEXT_FILTERS:
            self.filters[name] = self._weighed(self.filters[name])
        self.filters["indent"] = self._indented(self.filters["indent"])
        self.filters["format"] = self._format
        for name in ("batch", "slice"):
            self.filters[name] = _counted(self.filters[name])

    def load(self, source: str) -> Any:
        """Compile a template; raises jinja2.TemplateError, RecursionError and the like."""
        return self.from_string(_Instrument().visit(self.parse(source)))

    def start(self) -> None:
        """Begin a rendering on this thread: a fresh budget."""
        self._budget.work = 0
        self._budget.deadline = time.monotonic() + MAX_SECONDS

    # -- what things cost ----------------------------------------------------------------------

    def tick(self) -> None:
        """Called once for every round of every loop, and for every call."""
        if time.monotonic() > self._budget.deadline:
            raise SecurityError(f"it ran for more than {MAX_SECONDS:.0f} seconds")

    def _spend(self, size: int) -> None:
        self._budget.work += size
        if size > MAX_CHARS:
            raise SecurityError(f"it makes a text or list of more than {MAX_CHARS} elements")
        if self._budget.work > MAX_WORK:
            raise SecurityError(f"it makes more than {MAX_WORK} characters on its way")
        self.tick()

    def _output(self, value: Any) -> Any:
        """Of every ``{{ expression }}``: about to become text."""
        if not isinstance(value, str):
            self._spend(_weight(value))
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """Of every macro, ``{% set %}`` block and of the whole output."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                break
        self._spend(size)
        return "".join(kept)

    def join_texts(self, pieces: Sequence[Any]) -> str:
        """The operator ``~``."""
        self._spend(sum(map(_weight, pieces)))
        return "".join(map(str, pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized = (str, bytes, list, tuple)
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            self._spend(len(left) + len(right))
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, sized) and isinstance(times, int):
                    self._spend(len(items) * max(times, 0))
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**" and isinstance(right, int):
            _check_bits(_bits(left) * abs(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "replace" and len(args) > 1:
                self._spend(_replaced(owner, args[0], args[1]))
            elif name == "join" and args:
                args = (_drawn(args[0]), *args[1:])
                self._spend(_weight(args[0]) + len(owner) * _length(args[0]))
            else:
                self._spend(len(owner))
        return super().call(context, obj, *args, **kwargs)

    def cut(self, obj: Any, start: Any, stop: Any, step: Any) -> Any:
        """``obj[start:stop:step]``, which makes a copy."""
        self._spend(_length(obj))
        return obj[start:stop:step]

    def wrap_str_format(self, value: Any) -> None:
        """No ``str.format``: `is_safe_attribute` refuses it."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _DROPPED_METHODS and isinstance(obj, (str, bytes, int)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _check_format(self, text: str, values: Any) -> None:
        """``'%9999999d' % n``: no field may be wide, and no width may be an argument."""
        widths = [width for field in _FIELD.finditer(text) for width in field.groups() if width]
        if re.search(r"%\([^)]*\(", text) or any(
            width == "*" or len(width) > 9 or int(width) > MAX_WIDTH for width in widths
        ):
            raise SecurityError(f"it formats a field wider than {MAX_WIDTH}")
        self._spend(len(text) + sum(map(int, widths)) + _weight(values) * (1 + text.count("%")))

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        """The filter ``format``."""
        self._spend(_weight(value))
        self._check_format(str(value), kwargs or args)
        return str(value) % (kwargs or args)

    def _weighed(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose result grows with all that its arguments refer to."""

        def weighed(*args: Any, **kwargs: Any) -> Any:
            drawn = [_drawn(arg) for arg in args]
            weights = [_weight(arg) for arg in (*drawn, *kwargs.values())]
            # join and replace may put a separator at every item and every character
            self._spend(sum(weights) + _most_inserted(drawn, weights))
            return filter(*drawn, **kwargs)

        weighed.__dict__.update(filter.__dict__)  # Jinja's marks: pass_eval_context and so on
        return weighed

    def _indented(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        def indented(s: Any, width: int | str = 4, *args: Any, **kwargs: Any) -> Any:
            wide = len(width) if isinstance(width, str) else width
            if wide > MAX_WIDTH:
                raise SecurityError(f"it indents by {wide}, more than {MAX_WIDTH}")
            self._spend((str(s).count("\n") + 1) * wide)
            return filter(s, width, *args, **kwargs)

        return indented


class GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model wrote, for training; here the
    body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Instrument(NodeTransformer):
    """Puts a `tick` into every loop, hands ``~`` to `join_texts` and slices to `cut`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_texts", lineno=node.lineno)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Call(join, [pieces], [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        edges = [edge or none for edge in (node.arg.start, node.arg.stop, node.arg.step)]
        cut = nodes.EnvironmentAttribute("cut", lineno=node.lineno)
        return nodes.Call(cut, [node.node, *edges], [], None, None, lineno=node.lineno)


def _counted(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filters ``batch`` and ``slice``, which pad with as many items as they are told to."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        for count in (*args, *kwargs.values()):
            if isinstance(count, int) and count > 10_000:
                raise SecurityError(f"it asks a filter for {count} items, more than 10000")
        return filter(*args, **kwargs)

    counted.__dict__.update(filter.__dict__)  # Jinja's marks: pass_eval_context and so on
    return counted


def _weight(value: Any, depth: int = 0) -> int:
    """About how many characters ``str(value)`` has; stops counting beyond the limit."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total = 8
    if depth < 100 and isinstance(value, (list, tuple, Mapping)):
        items = value.items() if isinstance(value, Mapping) else value
        for item in items:
            total += _weight(item, depth + 1)
            if total > MAX_CHARS:
                break
    return total


def _drawn(value: Any) -> Any:
    """A generator's items as a list, so that they can be weighed."""
    return list(value) if isinstance(value, Iterator) else value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, Mapping)) else 1


def _most_inserted(args: Sequence[Any], weights: Sequence[int]) -> int:
    """A bound on what a separator or replacement among ``args`` can add to the first text."""
    texts = [n for n, arg in enumerate(args) if isinstance(arg, (str, list, tuple))]
    if len(texts) < 2:
        return 0
    value, *others = texts
    if len(others) == 2 and isinstance(args[value], str):  # replace(text, old, new)
        old, new = args[others[0]], args[others[1]]
        return _replaced(args[value], old, new)
    return _length(args[value]) * max(weights[n] for n in others)


def _replaced(text: str, old: Any, new: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"it computes a number of more than {MAX_BITS} bits")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: key order kept, nothing escaped for HTML or ASCII."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 16:
        raise SecurityError("it indents JSON by more than 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object = "") -> NoReturn:
    raise Refused("" if isinstance(message, Undefined) else str(message))


def _strftime_now(format: object) -> str:
    text = str(format)
    if len(text) > 200 or re.search(r"%[^a-zA-Z]*\d", text):
        raise SecurityError("it asks strftime_now for too wide a date")
    return datetime.now().strftime(text)
