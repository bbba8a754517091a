"""The patches on DeepEP's real trees: where they apply, exactly, and where they must not."""

import json
import re
import shutil
import subprocess

import pytest
from deepep_ci import pairing, patches, paths
from support import DEEPEP_COMMITS

LAYOUT, BOUND = "deep-ep-564-rc-layout.patch", "deep-ep-rc-bound.patch"
LOADING = "deep-ep-loading.patch"


def apply(tree, name, dry=False):
    """Exit code and output of patch, without fuzz: context that does not match is an error."""
    command = ["patch", "-p1", "--fuzz=0", "--forward", "-d", str(tree)]
    done = subprocess.run(
        [*command, *(["--dry-run"] if dry else []), "-i", str(paths.PATCHES / name)],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(deepep_tree, tmp_path):
    """Function: a copy of DeepEP's tree of a version to patch."""

    def make(version):
        target = tmp_path / version
        shutil.copytree(deepep_tree(version), target, ignore=shutil.ignore_patterns(".git"))
        return target

    return make


ROWS = pairing.table()["rows"]
AFFECTED = sorted({row["deepep"] for row in ROWS if row["rc_layout_backport"]})
FIXED = sorted({row["deepep"] for row in ROWS if row["rc_layout_backport"] is None})


def test_table_has_every_revision_of_the_recipe():
    assert set(AFFECTED) | set(FIXED) == set(DEEPEP_COMMITS)


@pytest.mark.sources
@pytest.mark.parametrize("version", AFFECTED)
def test_both_apply_to_affected(tree, version):
    copy = tree(version)
    code, said = apply(copy, BOUND, dry=True)
    assert code != 0, "the bound must not apply without #564"
    for name in (LAYOUT, BOUND):
        code, said = apply(copy, name)
        assert code == 0, said
        assert "fuzz" not in said
        code, said = apply(copy, name, dry=True)
        assert code != 0, f"{name} must not apply twice"


@pytest.mark.sources
@pytest.mark.parametrize("version", FIXED)
def test_only_the_bound_applies_to_fixed(tree, version):
    copy = tree(version)
    assert apply(copy, LAYOUT, dry=True)[0] != 0
    code, said = apply(copy, BOUND)
    assert code == 0, said
    assert "fuzz" not in said


def test_recipe_uses_these_very_files():
    package = paths.RECIPES / "packages" / "py_deep_ep"
    for name in patches.index():
        assert (package / name).is_symlink()
        assert (package / name).resolve() == (paths.PATCHES / name).resolve()
        assert f'"{name}"' in (package / "package.py").read_text()


def test_index_is_whole():
    assert patches.problems() == []


@pytest.mark.sources
@pytest.mark.parametrize("version", [*AFFECTED, *FIXED])
def test_loading_applies_everywhere(tree, version):
    """The module is imported after torch and before the extensions, in every revision."""
    copy = tree(version)
    code, said = apply(copy, LOADING)
    assert code == 0 and "fuzz" not in said, said
    lines = (copy / "deep_ep" / "__init__.py").read_text().splitlines()
    order = [lines.index(line) for line in ("import torch", "from . import _loading")]
    extension = next(n for n, line in enumerate(lines) if line.startswith("from deep_ep_cpp"))
    package = next(n for n, line in enumerate(lines) if line.startswith("from .utils"))
    assert order == sorted(order) and order[1] < min(extension, package)
    assert 'NVSHMEM = "@NVSHMEM_VERSION@"' in (copy / "deep_ep" / "_loading.py").read_text()
    assert apply(copy, LOADING, dry=True)[0] != 0, "it must not apply twice"


def test_readme_tells_the_index():
    text = (paths.PATCHES / "README.md").read_text()
    for name, entry in patches.index().items():
        assert name in text
        assert entry["sha256"] in text, f"README.md has another sha256 for {name}"
        # Ours alone are said to be so
        pull = re.search(r"pull/\d+", entry["upstream"])
        assert (pull.group() if pull else f"| `{name}` | none: ours |") in text


def test_provenance_is_stated():
    for entry in json.loads((paths.PATCHES / "index.json").read_text())["patches"].values():
        upstream = entry["upstream"]
        assert upstream == "none" or "/deepseek-ai/DeepEP/pull/" in upstream
