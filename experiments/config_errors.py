"""One-line message for an error of a config file: the file, the line, the problem and the fix."""

from __future__ import annotations

import os
import re
import tokenize
import traceback
from collections.abc import Iterable

BEGIN = "from eejax.train.config.default_config()"
_COMMA = re.compile(r"object is not (callable|subscriptable)|indices must be integers")
_STARTS = (tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # of a statement
_TYPE = re.compile(
    r"Could not override field '(\w+)'.*\. (.*) is of original type <class '([\w.]+)'> and cannot "
    r"be casted to type <class '(\w+)'>",
    re.DOTALL,
)


def located(error: BaseException, path: str) -> str | None:
    """Describe an error that was raised while the file `path` ran; None for any other error.

    ml_collections and absl raise errors of their own in place of the file's, so the first error of
    the chain with a line of the file counts.
    """
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for cause in reversed(chain):
        if isinstance(cause, SyntaxError) and cause.filename and _same(cause.filename, path):
            return _message(path, cause.lineno, cause.msg, cause.text)
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if _same(f.filename, path)]
        if frames:
            return _message(path, frames[-1].lineno, _cause(cause), frames[-1].line)
    return _file_error(" ".join(map(str, chain)), path)


def with_line(error: str, path: str, overridden: Iterable[str] = ()) -> str:
    """Add the line of the file that sets a field to an error that begins with the field's name.

    The error stays as it is unless exactly one line has the name, as a word of the code or as a
    string of its own. It also stays where the file is not to blame: it lacks the field, or the
    command line overrides it.

    Args:
      error: the message, such as `train.steps = 0: must be ...`.
      path: the config file.
      overridden: fields that the command line sets, such as `train.steps`.
    """
    found = re.match(r"(?:\w+\.)*([A-Za-z_]\w*) ?[=:](?! missing\b)", error)
    if found is None or found[1] in {field.rpartition(".")[2] for field in overridden}:
        return error
    lines = _lines_with(found[1], path)
    return f"{path}, line {lines.pop()}: {error}" if len(lines) == 1 else error


def _lines_with(name: str, path: str) -> set[int]:
    """Return the lines of a Python file with a token that is the name, or a string of it."""
    try:
        with open(path, "rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
    except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return set()
    code = [t for t in tokens if t.type not in (tokenize.COMMENT, tokenize.NL)]
    lines = set()
    for before, token, after in zip(code, code[1:], code[2:], strict=False):
        docstring = before.type in _STARTS and after.type == tokenize.NEWLINE
        if token.type == tokenize.NAME and token.string == name:
            lines.add(token.start[0])
        elif token.type == tokenize.STRING and token.string[1:-1] == name and not docstring:
            lines.add(token.start[0])
    return lines


def returns(path: str, kind: str) -> str:
    """Describe the error of a `get_config` that returns a value of this type."""
    kind = kind.replace("NoneType", "nothing")
    return f"{path}: get_config() returns {kind}, not a config. Let it end with: return config."


def _message(path: str, line: int | None, what: str, code: str | None) -> str:
    end = "" if what.endswith((".", "?")) else "."
    shown = f" The line is: {' '.join(code.split())}" if code and code.strip() else ""
    return f"{path}, line {line}: {what}{end}{shown}"


def _cause(error: BaseException) -> str:
    """Describe an error, with a fix if one is known."""
    argument = error.args[0] if len(error.args) == 1 else error
    if isinstance(argument, BaseException):  # as ConfigDict raises it for an unknown name
        argument = argument.args[0] if len(argument.args) == 1 else argument
    text = " ".join(str(argument).split())
    if found := _TYPE.search(text):
        field, value, given, wanted = found.groups()
        given = given.rsplit(".", 1)[-1].replace("ConfigDict", "dict")
        fix = "Write (VALUE,), with the comma, for a tuple of one" if wanted == "tuple" else ""
        return f"{field} must be of type {wanted}, not the {given} {value}. {fix}".rstrip(". ")
    if found := re.match(r"""["']*(\w+)['"]* Did you mean "(\w+)\"""", text):
        return f"there is no field {found[1]}. Did you mean {found[2]}?"
    if _COMMA.search(text):
        return f"{text}; perhaps a comma is missing"
    if isinstance(error, NameError):
        return f"{text}. Define it, or import it"
    if isinstance(error, ImportError):
        return f"{text}. Install it, or fix the import"
    if isinstance(error, OSError) or type(error).__module__.startswith("eejax"):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _file_error(text: str, path: str) -> str | None:
    """Describe an error that no line of the file raises, or return None."""
    define = f"Define it without arguments, let it begin {BEGIN}, and return that config."
    if "has no attribute 'get_config'" in text:
        return f"{path}: there is no function get_config. {define}"
    if found := re.search(r"Attribute <class '(NoneType|int|float|str|bool)'>", text):
        return returns(path, found[1])
    if "Flag --config must have a value other than None" in text:
        return returns(path, "NoneType")
    if "null bytes" in text:
        return f"{path}: holds null bytes, so it is not a Python file."
    if found := re.search(r"get_config\(\) (missing|takes) [^:\n]*", text):
        return f"{path}: {found[0].strip()}. {define}"
    return None


def _same(file: str, path: str) -> bool:
    return os.path.abspath(file) == os.path.abspath(path)
