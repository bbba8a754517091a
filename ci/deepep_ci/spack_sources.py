"""Run by `spack -e ENV python`: prints what the environment's lock has to fetch, as JSON.

One object a line after a marker: {package, hash, path (in a Spack mirror), url, sha256 or commit,
pypi (whether PyPI serves it)}.
"""

import json

from spack_repo.builtin.build_systems.python import PythonPackage

import spack.environment

MARKER = "deepep-source:"


class Anything(PythonPackage):
    """Knows, as every PyPI package in Spack, where PyPI keeps its files."""

    pypi = "anything/anything-0.tar.gz"


def main() -> None:
    pypi = Anything.url.split("/source/")[0]
    environment = spack.environment.active_environment()
    seen = set()
    for _, root in environment.concretized_specs():
        for spec in root.traverse():
            if spec.external or spec.dag_hash() in seen or not spec.package.has_code:
                continue
            seen.add(spec.dag_hash())
            for stage in spec.package.stage:
                fetcher = getattr(stage, "default_fetcher", None)
                if fetcher is None or not stage.mirror_layout:
                    continue
                url = getattr(fetcher, "url", "") or ""
                entry = {
                    "package": f"{spec.name}@{spec.version}",
                    "hash": spec.dag_hash(),
                    "path": stage.mirror_layout.path,
                    "url": url,
                    "sha256": getattr(fetcher, "digest", None),
                    "commit": getattr(fetcher, "commit", None),
                    "pypi": url.startswith(pypi),
                }
                print(MARKER + json.dumps(entry))


main()
