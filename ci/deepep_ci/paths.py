"""Where things are. The only module that knows the layout of the repository and of the cache."""

import os
from pathlib import Path

CI = Path(__file__).resolve().parent.parent
TOP = CI.parent
ENVIRONMENTS = TOP / "environments"
PATCHES = TOP / "patches"
RECIPES = TOP / "spack-repo" / "spack_repo" / "deepep"
SCHEMAS = CI / "schemas"

#: Folders of environments/ that hold shared configuration, not an environment
NOT_ENVIRONMENTS = {"common"}


def cache() -> Path:
    """The user's cache of this project; ci/setup.sh sets DEEPEP_CACHE."""
    return Path(os.environ["DEEPEP_CACHE"])


def environment_names() -> list[str]:
    """Names of all environments, sorted."""
    return sorted(
        entry.name
        for entry in ENVIRONMENTS.iterdir()
        if entry.is_dir() and entry.name not in NOT_ENVIRONMENTS
    )
