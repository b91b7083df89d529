"""All refusals, as the source makes them: their codes, and what a person reads."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nano_inference.config.error_codes import error_codes
from nano_inference.config.sampling import RANGES

ROOT = Path(__file__).parent.parent
ROOMS = (
    *("bus", "cli", "config", "gateway", "kserve", "media", "models", "pipeline", "stages"),
    *("store", "telemetry", "text"),
)
LISTED = {code for entries in error_codes().values() for entry in entries for code in entry.codes}

# The exceptions that reach a person, and the function that makes one of a field.
KINDS = (
    *("NanoInferenceError", "RequestError", "FieldError", "field_error", "ModelError"),
    *("ConfigError", "BusError", "WeightsError", "AdapterError", "EngineError", "ArgumentError"),
    "TensorError",
)
MAY_REFUSE = re.compile(rf"\b(?:{'|'.join(KINDS)}|Cancel|Malformed)\(|\bcode ?=")
CONSTANT = re.compile(r'^([A-Z_]+) = "(.*)"$', re.M)

# An imperative begins a clause, or the part of one after "or" and the like.
VERBS = (
    "add ask begin build call change check choose compare compress connect convert copy correct "
    "count create decode delete download empty encode end enlarge export finish follow fork free "
    "give install join keep leave let list load look lower make mark mend merge move name open "
    "pack pass pip publish pull put raise read register reject remove repeat replace replay report "
    "request resize restart resume retry return revoke run save scale say see send serve set share "
    "shorten show spawn split start step summarise take tie tokenise train try unload upload use "
    "wait write"
).replace(" ", "|")
REMEDY = re.compile(rf"(?:^|[;.:,(]\s*|\b(?:or|and|so|then|else)\s+)(?:{VERBS})\b", re.I)
LIMIT = re.compile(
    r"\b(?:must|may|needs?|takes?|has to|at (?:most|least)|can be|such as|log says|process says)\b"
)
# A value that has a limit or a remedy itself: the message of another error, a decoder's words about
# the place and the kind of value that it expected, or a variable of one of these names.
WHOLE = re.compile(
    r"\.message\}|\b(?:nearest|told_of|missing_model|_why)\(|, line \{"
    r"|\b(?:advice|remedy|why|wrong|reason|message|trouble|change|may_be|likely|there|end|limit|instead)\}"
    r"|^\{path\}: \{error\}|^\{param\}\{rest"
    r"|(?:no JSON object|not valid YAML|can't be used): \{\w+\}"
    r"|^\{(?:\w+\.)?(?:error|removed)\}(?: \(rank \{rank\}\))?$"
)
# Reasons within a line of a log.
IN_LOGS = {
    "it changes at the moment",
    "it was not read from a folder",
    "the files of {each.folder} have changed",
    "they were not read from one folder",
    "{changed}",
}


class Refusal(NamedTuple):
    """A refusal's place in the source, and its text with the names of its values in braces."""

    place: str
    text: str


@cache
def sources() -> dict[Path, str]:
    """Return the text of each module of the product."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return {path: path.read_text() for path in paths}


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the modules that make errors or give a code; to parse all of them takes seconds."""
    return {path: ast.parse(text) for path, text in sources().items() if MAY_REFUSE.search(text)}


def constants(*texts: str) -> dict[str, str]:
    """Return the named texts of modules; those of the last win."""
    return {name: text for each in texts for name, text in CONSTANT.findall(each)}


def rendered(node: ast.expr, named: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(rendered(value, named) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return rendered(left, named) + rendered(right, named)
        case ast.IfExp(body=value) | ast.FormattedValue(value=value):
            return rendered(value, named)
        case ast.Name(id=name) if name in named:
            return named[name]
        case _:
            return f"{{{ast.unparse(node)}}}"


@cache
def refusals() -> list[Refusal]:
    """Return all refusals of the product, as a person reads them."""
    every, found = constants(*sources().values()), []
    for path, tree in trees().items():
        named = every | constants(sources()[path])
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[_, *_] as args) if kind in KINDS:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    given = {each.arg: rendered(each.value, named) for each in node.keywords}
                    texts = [rendered(each, named) for each in args]
                    if kind == "field_error":
                        texts[:2] = [" ".join(texts[:2]).replace(" :", ":")]
                    texts += [given[name] for name in ("limit", "remedy") if name in given]
                    found.append(Refusal(place, "; ".join(texts)))
    return found


def test_each_refusal_has_the_limit_or_a_remedy() -> None:
    bare = [
        f"{each.place} {each.text}"
        for each in refusals()
        if not any(rule.search(each.text) for rule in (REMEDY, LIMIT, WHOLE))
        if each.text not in IN_LOGS
    ]
    assert len(refusals()) > 900
    assert not bare, "\n".join(bare)


def test_each_refusal_is_one_sentence() -> None:
    """No space or mark too many, no stop at its end, and no placeholder for a secret as a value."""
    wrong = re.compile(r"^\s|\s$|  |[,;:]$|[;,][;,.]| [;,]|\*\*\*")
    assert not [each for each in refusals() if wrong.search(each.text)]


def test_each_code_is_in_the_table() -> None:
    """Every code that the source has in `code=`, as a class's `code`, or as that of a Cancel."""
    used = {f"invalid_{name}" for name in RANGES}
    for tree in trees().values():
        used |= codes_in(tree)
    assert {"malformed", "lane_failed", "stage_failed", "invalid_top_p"} <= used
    assert used - LISTED - {""} == set()


def test_each_code_has_a_cause_and_a_remedy() -> None:
    entries = [entry for section in error_codes().values() for entry in section]
    assert sum(len(entry.codes) for entry in entries) == len(LISTED)
    for entry in entries:
        assert entry.cause
        assert REMEDY.search(entry.remedy), entry


def codes_in(tree: ast.AST) -> set[str]:
    """Return the string constants that stand where a code is given (see `MAY_REFUSE`)."""
    places = {"Cancel": 3, "Malformed": 1}
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="code", value=value):
                found.append(value)
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                found.append(value)
            case ast.Call(func=ast.Name(id=name), args=values) if name in places:
                found += values[places[name] : places[name] + 1]
    return {
        node.value
        for node in found
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
