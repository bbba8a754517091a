"""The index of patches/ and the digests of the files."""

import hashlib
from pathlib import Path
from typing import Any

from .documents import shown, validated
from .paths import PATCHES


def index(folder: Path = PATCHES) -> dict[str, dict[str, Any]]:
    """patches/index.json: {file name: {sha256, upstream, applies_to, why, remove_when}}."""
    return validated(folder / "index.json", "patches")["patches"]


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def problems(folder: Path = PATCHES) -> list[str]:
    """A sentence for each patch whose file and index entry do not match."""
    entries = index(folder)
    found = []
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{shown(path)} is missing, but in {shown(folder / 'index.json')}")
        elif sha256(path) != entry["sha256"]:
            found.append(
                f"{shown(path)} has sha256 {sha256(path)[:12]}..., its index entry says "
                f"{entry['sha256'][:12]}...: if the change is meant, write the new one into "
                f"{shown(folder / 'index.json')}, and run ci/lock"
            )
    for path in sorted(folder.glob("*.patch")):
        if path.name not in entries:
            found.append(f"{shown(path)} has no entry in {shown(folder / 'index.json')}")
    return found


def names_by_digest(folder: Path = PATCHES) -> dict[str, str]:
    """{sha256: file name} of the index."""
    return {entry["sha256"]: name for name, entry in index(folder).items()}
