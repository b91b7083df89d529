"""Defects planted in this process's code, and taken out again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import nano_inference

ROOT = Path(nano_inference.__file__).parent
_PACKAGE = "nano_inference"


class Defect(NamedTuple):
    """A replacement in one file. `old` stands there once.

    Attributes:
        name: What is wrong with it.
        file: Path below the package.
    """

    name: str
    file: str
    old: str
    new: str


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Run functions with a defect while the context is open.

    Functions of the file get the code of the changed text. Module constants that contain the text,
    such as scripts, are replaced wherever they were imported.
    """
    text = (ROOT / defect.file).read_text()
    assert text.count(defect.old) == 1, f"{defect.file} has {text.count(defect.old)}: {defect.name}"
    name = f"{_PACKAGE}.{defect.file.removesuffix('.py').replace('/', '.')}"
    module = import_module(name)
    source = compile(text.replace(defect.old, defect.new), str(ROOT / defect.file), "exec")
    changed = {code.co_qualname: code for code in _codes(source)}
    undo: list[tuple[Any, str, Any]] = []
    try:
        for function in _functions(module):
            code = changed.get(function.__code__.co_qualname)
            if code is not None and code != function.__code__:
                undo.append((function, "__code__", function.__code__))
                function.__code__ = code
        for owner, attribute, value in _constants(defect.old):
            undo.append((owner, attribute, value))
            setattr(owner, attribute, value.replace(defect.old, defect.new))
        assert undo, f"nothing was changed: {defect.name}"
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Return the functions of a module, and of its classes."""
    owners: list[Any] = [module]
    seen = set()
    while owners:
        for value in list(vars(owners.pop()).values()):
            for found in _unwrapped(value):
                if id(found) in seen or getattr(found, "__module__", None) != module.__name__:
                    continue
                seen.add(id(found))
                if isinstance(found, FunctionType):
                    yield found
                elif isinstance(found, type):
                    owners.append(found)


def _unwrapped(value: Any) -> Iterator[Any]:
    if isinstance(value, property):
        yield from (each for each in (value.fget, value.fset) if each is not None)
        return
    while (
        inner := getattr(value, "__wrapped__", None) or getattr(value, "__func__", None)
    ) is not None:
        yield value
        value = inner
    yield value


def _constants(text: str) -> Iterator[tuple[ModuleType, str, str]]:
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE + ".") and ".tests." not in name:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, str) and attribute != "__doc__" and text in value:
                    yield module, attribute, value
