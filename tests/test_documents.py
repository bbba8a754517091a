"""Bad data files: each is answered with file, line or JSON path, and what was expected."""

import json

import pytest
from deepep_ci import documents, paths
from deepep_ci.errors import DocumentError
from jsonschema import Draft202012Validator


@pytest.mark.parametrize("schema", sorted(p.name for p in paths.SCHEMAS.glob("*.json")))
def test_schema_is_valid(schema):
    document = documents.load_json(paths.SCHEMAS / schema)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(document)


CASES = [
    # (file, text, what the message must say)
    ("a.json", '{"roots": [', r"a\.json:1: not JSON.*ends early"),
    ("a.json", '{\n  "roots": [],\n  oops\n}', r"a\.json:3: not JSON"),
    ("a.json", '{\n\n  "spack": {}\n}', r"a\.json:3: \$\.spack: .*'git' is a required"),
    ("a.yaml", "spack:\n  specs: [a\n", r"a\.yaml:\d: not YAML"),
    ("a.yaml", "spack:\n\tspecs: []\n", r"a\.yaml:2: not YAML"),
]


@pytest.mark.parametrize("name, text, said", CASES)
def test_bad_document(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    schema = "environment" if name.endswith("yaml") else "pins"
    with pytest.raises(DocumentError, match=said):
        documents.validated(path, schema)


def test_line_of_a_deep_value(tmp_path):
    path = tmp_path / "refusals.json"
    entries = [
        {"id": "good", "spec": "x", "because": "long enough a reason"},
        {"id": "Bad Id", "spec": "x", "because": "long enough a reason"},
    ]
    path.write_text(json.dumps({"refusals": entries}, indent=1))
    with pytest.raises(DocumentError) as error:
        documents.validated(path, "refusals")
    line = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if "Bad Id" in t)
    assert f"refusals.json:{line}: $.refusals[1].id" in str(error.value)
    assert "lower case, digits, dashes" in str(error.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(DocumentError, match="no such file"):
        documents.load_json(tmp_path / "absent.json")
    with pytest.raises(DocumentError, match="is a folder"):
        documents.load_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(DocumentError, match="byte 7 is not UTF-8"):
        documents.load_json(tmp_path / "latin.json")


ENVIRONMENT_CASES = [
    # A typing error in a key that Spack would ignore or refuse much later
    ({"spack": {"spec": ["a"], "include": ["x"], "view": False}}, "'specs' is a required"),
    ({"spack": {"specs": [], "include": ["x"], "view": False}}, r"\$\.spack\.specs"),
    ({"spack": {"specs": ["a"], "include": [{"pth": "x"}], "view": False}}, r"include\[0\]"),
    ({"spck": {}}, "'spack' is a required"),
]


@pytest.mark.parametrize("document, said", ENVIRONMENT_CASES)
def test_bad_environment(tmp_path, document, said):
    path = tmp_path / "spack.yaml"
    path.write_text(json.dumps(document))
    with pytest.raises(DocumentError, match=said):
        documents.validated(path, "environment")
