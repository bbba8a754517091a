"""Reads JSON and YAML files and holds them against their JSON schema (draft 2020-12)."""

import json
from pathlib import Path
from typing import Any

from .errors import DocumentError
from .paths import SCHEMAS, TOP


def shown(path: Path) -> str:
    """A path as people see it: relative to the repository where it lies inside."""
    try:
        return str(path.resolve().relative_to(TOP))
    except ValueError:
        return str(path)


def read_text(path: Path) -> str:
    """The file's text (UTF-8). Raises DocumentError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DocumentError(f"{shown(path)}: no such file") from None
    except IsADirectoryError:
        raise DocumentError(f"{shown(path)}: is a folder, a file was expected") from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"{shown(path)}: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise DocumentError(f"{shown(path)}: {error.strerror}") from None


def load_json(path: Path) -> Any:
    """The document in a JSON file. Raises DocumentError with the line of a syntax error."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        end = " (the file ends early: truncated?)" if error.pos >= len(text.rstrip()) else ""
        raise DocumentError(
            f"{shown(path)}:{error.lineno}: not JSON: {error.msg} at column {error.colno}{end}"
        ) from None


def load_yaml(path: Path) -> Any:
    """The document in a YAML file. Raises DocumentError with the line of a syntax error."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    text = read_text(path)
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else "?"
        raise DocumentError(f"{shown(path)}:{line}: not YAML: {error.problem}") from None
    except YAMLError as error:
        raise DocumentError(f"{shown(path)}: not YAML: {error}") from None


def validated(path: Path, schema: str) -> Any:
    """The document in a JSON or YAML file that satisfies ci/schemas/SCHEMA.schema.json.

    Raises DocumentError: one line for each violation, with file, line, JSON path, expectation.
    """
    document = load_yaml(path) if path.suffix in (".yaml", ".yml") else load_json(path)
    validate(document, schema, path)
    return document


def validate(document: Any, schema: str, path: Path) -> None:
    """Holds a document read from path against a schema; see validated()."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(load_json(SCHEMAS / f"{schema}.schema.json"))
    violations = sorted(validator.iter_errors(document), key=lambda error: error.json_path)
    if violations:
        raise DocumentError(
            "\n".join(
                f"{shown(path)}:{_line(path, violation.absolute_path)}: {violation.json_path}: "
                f"{_expectation(violation)}"
                for violation in violations
            )
        )


def _expectation(violation: Any) -> str:
    """What was expected, in words; the schema's own description where it has one."""
    description = violation.schema.get("description") if isinstance(violation.schema, dict) else ""
    return f"{violation.message}" + (f" (expected: {description})" if description else "")


def _line(path: Path, keys: Any) -> int | str:
    """Line of the value at a JSON path. JSON is YAML, so one parser with positions serves both."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        node = YAML().compose(read_text(path))
    except YAMLError:
        return "?"
    line = node.start_mark.line
    for key in keys:
        if node.id == "mapping":
            pair = next((pair for pair in node.value if pair[0].value == str(key)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
        elif node.id == "sequence" and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line
        else:
            break
    return line + 1
