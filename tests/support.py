"""What several tests know about the repository, read from the recipes themselves."""

import ast
import re
from functools import cache
from pathlib import Path

from deepep_ci import paths

RECIPE = {
    name: paths.RECIPES / "packages" / name / "package.py"
    for name in ("nvshmem", "rdma_core", "nccl", "py_deep_ep")
}

#: File name of NVIDIA's wheel; the folder before it is of no matter to pip
PYPI_FILE = (
    "nvidia_nvshmem_cu13-{release}-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
)

#: Layout of RC queue pairs by NVSHMEM release of the recipe
NVSHMEM_LAYOUT = {
    "3.4.5-cu13": "v1",
    "3.5.19": "v2",
    "3.5.21": "v2",
    "3.6.5": "v2",
    "3.7.2": "v2",
    "3.8.0": "v2",
}


def _assigned(path: Path, name: str):
    """The literal that a recipe assigns to a module-level name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:  # type: ignore[attr-defined]
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} assigns no {name}")


@cache
def recipe_wheels() -> dict[str, dict[str, tuple[str, str]]]:
    """{version of the recipe: {machine: (sha256, folder)}} of the NVSHMEM recipe."""
    renamed = _assigned(RECIPE["nvshmem"], "_spack_version")
    wheels = _assigned(RECIPE["nvshmem"], "_wheels")
    return {renamed.get(release, release): machines for release, machines in wheels.items()}


def _deepep_commits() -> dict[str, str]:
    text = RECIPE["py_deep_ep"].read_text()
    pattern = r'version\(\s*"([^"]+)",[^)]*?commit="([0-9a-f]{40})"'
    return dict(re.findall(pattern, text))


#: {version of the recipe: commit} of the DeepEP recipe
DEEPEP_COMMITS = _deepep_commits()
