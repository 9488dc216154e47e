"""The release's prompt texts out of its encoder file: parsed, never run.

The file is Python, and its texts lie in it in whatever way its authors write such things, as
constants, sums, templates with fields for markers and schemas. So every expression in it that is a
text is worked out as far as that needs no code of theirs to run, with a hole where it does; then
each block is looked for by its length and SHA-256 at every position of every text. Where a block
begins and ends is not for us to know, and what does not match to the byte is not found.

The blocks and their hashes are the caller's (spec/api.md 1.2).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import string
import textwrap
import warnings
from typing import TYPE_CHECKING

from ds4d.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Blocks = Mapping[str, tuple[int, str]]  # name to bytes in UTF-8 and sha256

FILE_LIMIT = 1 << 20  # bytes; the real one has some ten thousand
SEARCHED_LIMIT = 2 << 20  # characters: some seconds of hashing
MADE_LIMIT = 64 << 20  # characters of all texts that expressions come to
_HOLE = "\0"  # in no block


def find(source: bytes, where: str, blocks: Blocks) -> dict[str, str]:
    """The blocks that are in the encoder file `source`, in the order of `blocks`; `where` names it
    to a person. Raises ModelFileError for what is no Python file, or an absurd one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, about their escapes
            texts = _Texts(ast.parse(source)).all()
    except (SyntaxError, ValueError) as error:
        raise ModelFileError(f"{where}: not a Python file: {error}") from None
    except (RecursionError, MemoryError):
        raise ModelFileError(f"{where}: nests too deeply to be the release's encoder") from None
    except _TooMuch:
        raise ModelFileError(f"{where}: holds too many texts to be the release's encoder") from None
    encoded = [text.encode("utf-8", "replace") for text in texts]
    found = {}
    for block, (n_bytes, digest) in blocks.items():
        wanted = bytes.fromhex(digest)
        text = next((t for e in encoded if (t := _within(e, n_bytes, wanted)) is not None), None)
        if text is not None:
            found[block] = text
    return found


def as_json(texts: Mapping[str, str]) -> bytes:
    """The file from which the daemon loads them."""
    return (json.dumps(texts, ensure_ascii=False, indent=2) + "\n").encode()


def check(path: Path, blocks: Blocks) -> None:
    """Raises ModelFileError unless the file that `as_json` made holds every block to the byte."""
    try:
        texts = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path}: not a JSON file") from None
    for block, (_, digest) in blocks.items():
        text = texts.get(block) if isinstance(texts, dict) else None
        if not isinstance(text, str):
            raise ModelFileError(f"{path}: holds no text {block}")
        found = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if found != digest:
            raise ModelFileError(f"{path}: {block} has sha256 {found}, expected {digest}")


def _within(data: bytes, n_bytes: int, wanted: bytes) -> str | None:
    view = memoryview(data)
    for start in range(len(data) - n_bytes + 1):
        if data[start] & 0xC0 == 0x80:
            continue  # inside a character
        window = view[start : start + n_bytes]
        if hashlib.sha256(window).digest() == wanted:
            return bytes(window).decode()
    return None


class _TooMuch(Exception):
    """More text than any encoder has: an attack on memory or time."""


class _Texts:
    """Every text that the expressions of a module come to. A part that would need code to run, or
    that is no text, is a hole."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._n_made = 0
        self._names: dict[str, str] = {}
        self._folded: dict[str, str] = {}  # the same by name in lower case
        self._learn()

    def all(self) -> set[str]:
        """Raises _TooMuch."""
        found: set[str] = set()
        inner: set[int] = set()  # the beginnings of sums; ast.walk comes to the whole first
        n_found = 0
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Constant | ast.BinOp | ast.JoinedStr | ast.Call):
                continue
            if isinstance(node, ast.BinOp) and _is_sum(node.left):
                inner.add(id(node.left))
            text = _HOLE if id(node) in inner else self._value(node)
            if text.strip(_HOLE):
                new = {text, self._filled(text, {})} - found
                n_found += sum(map(len, new))
                if n_found > SEARCHED_LIMIT:
                    raise _TooMuch
                found |= new
        return found

    def _learn(self) -> None:
        """What names stand for: assignments of the module first, which win; then those elsewhere;
        then keywords and defaults, which name the fields of templates."""
        for nodes in (self._tree.body, ast.walk(self._tree)):
            for node in nodes:
                for name, value in _assigned(node):
                    self._note(name, value)
        for node in ast.walk(self._tree):
            for name, value in _hinted(node):
                self._note(name, value)

    def _note(self, name: str, value: ast.expr) -> None:
        if name in self._names:
            return
        text = self._value(value)
        if _HOLE not in text:
            self._names[name] = text
            self._folded.setdefault(name.lower(), text)

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._names.get(name, _HOLE)
            case ast.BinOp(op=ast.Add()):
                return self._joined([self._value(term) for term in _terms(node)])
            case ast.JoinedStr(values=parts):
                return self._joined([self._value(part) for part in parts])
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.Call(func=ast.Attribute(value=receiver, attr=method)):
                return self._joined([self._called(node, self._value(receiver), method)])
            case ast.Call(func=ast.Name(id="dedent" | "cleandoc" as function), args=[text]):
                return self._joined([_cleaned(function, self._value(text))])
        return _HOLE

    def _called(self, call: ast.Call, text: str, method: str) -> str:
        """What a method of a text, or a function of a module, gives."""
        arguments = [self._value(a) for a in call.args]
        match method, arguments:
            case (("strip" | "lstrip" | "rstrip"), ([] | [_])) if _HOLE not in arguments:
                stripped: str = getattr(text, method)(*arguments)
                return stripped
            case (("dedent" | "cleandoc"), [argument]):
                return _cleaned(method, argument)
            case "replace", [old, new] if old and _HOLE not in old:
                return self._joined(text.split(old), new)
            case "join", [_] if isinstance(call.args[0], ast.List | ast.Tuple):
                return self._joined([self._value(e) for e in call.args[0].elts], text)
            case "format", []:
                own = {k.arg: self._value(k.value) for k in call.keywords if k.arg is not None}
                return self._filled(text, own)
        return _HOLE

    def _filled(self, template: str, own: Mapping[str, str]) -> str:
        """The template with its fields filled in as far as their names are known."""
        if "{" not in template and "}" not in template:
            return template
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError:
            return template  # its braces are only braces
        texts = []
        for literal, field, spec, conversion in parts:
            texts.append(literal)
            if field is not None:
                texts.append(_HOLE if spec or conversion else self._field(field, own))
        return self._joined(texts)

    def _field(self, name: str, own: Mapping[str, str]) -> str:
        text = own.get(name, _HOLE)
        if _HOLE in text:
            text = self._names.get(name, self._folded.get(name.lower(), _HOLE))
        return text

    def _joined(self, parts: list[str], separator: str = "") -> str:
        """Raises _TooMuch before the memory is taken."""
        self._n_made += sum(map(len, parts)) + len(separator) * max(len(parts) - 1, 0)
        if self._n_made > MADE_LIMIT:
            raise _TooMuch
        return separator.join(parts)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((t.id, value) for t in targets if isinstance(t, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value


def _hinted(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Call(keywords=keywords):
            yield from ((k.arg, k.value) for k in keywords if k.arg is not None)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        case ast.arguments(posonlyargs=first, args=rest, kwonlyargs=only):
            named = [*first, *rest]
            yield from zip(
                (a.arg for a in named[len(named) - len(node.defaults) :]),
                node.defaults,
                strict=True,
            )
            for argument, default in zip(only, node.kw_defaults, strict=True):
                if default is not None:
                    yield argument.arg, default


def _is_sum(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _terms(node: ast.expr) -> list[ast.expr]:
    """`a + b + c`, which nests to the left, without recursion."""
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _cleaned(function: str, text: str) -> str:
    return textwrap.dedent(text) if function == "dedent" else inspect.cleandoc(text)
