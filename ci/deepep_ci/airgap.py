"""ci/airgap pack ENV FILE, unpack FILE DIR: an environment for a machine with no network."""

import argparse
from pathlib import Path

from . import airgap_unpack

DESCRIPTION = """\
Carry one environment to a machine with no network, in one file: this repository, Spack,
spack-packages, the wheels of ci/requirements.txt, and every source that the lock needs."""

EPILOG = """\
pack needs the network once, writes FILE and FILE.sha256, and fails if anything is missing.
unpack verifies every byte of FILE before it writes anything, and needs Python alone.

On the other machine, with FILE and FILE.sha256 and nothing else:
  sha256sum -c FILE.sha256
  tar -xOf FILE unpack.py | python3 - FILE DIR
  cd DIR
  ci/check --spack require ENV
  ci/spack -e environments/ENV install

exit code: 0 done, 1 a source is missing or the archive is refused, 2 set-up or usage"""


def main(arguments: list[str]) -> int:
    """Exit code: 0 done, 1 a source is missing or the archive is refused, 2 set-up or usage."""
    parser = argparse.ArgumentParser(
        prog="ci/airgap",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="pack | unpack", required=True)
    command = commands.add_parser("pack", help="fetch everything ENV needs into FILE")
    command.add_argument("environment", metavar="ENV")
    command.add_argument("file", metavar="FILE", type=Path)
    command = commands.add_parser("unpack", help="verify FILE and make the folder DIR of it")
    command.add_argument("file", metavar="FILE", type=Path)
    command.add_argument(
        "folder", metavar="DIR", type=Path, help="a new folder, or one that is empty"
    )
    options = parser.parse_args(arguments)
    if options.command == "unpack":
        return airgap_unpack.run(options.file, options.folder)
    # Only pack needs what the virtual environment holds
    from .airgap_pack import pack

    return pack(options.environment, options.file)
