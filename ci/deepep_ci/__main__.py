"""Entry point of every command in ci/: python -m deepep_ci COMMAND ARGS..."""

import os
import sys

from .errors import DocumentError, SetupError


def main(argv: list[str]) -> int:
    """Runs one command. Returns its exit code: 0 holds, 1 a check failed, 2 set-up or usage."""
    command, arguments = argv[0], argv[1:]
    try:
        # What is unpacked may hold the site file that is named
        if (command, arguments[:1]) != ("airgap", ["unpack"]):
            _check_site_file()
        if command == "check":
            from .check import main as run
        elif command == "lock":
            from .lock import main as run
        elif command == "sources":
            from .sources import main as run
        elif command == "airgap":
            from .airgap import main as run
        else:
            from .spack import main as run
        code = run(arguments)
        sys.stdout.flush()
        return code
    except (SetupError, DocumentError) as error:
        print(f"ci/{command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing to say to it, and nothing at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"ci/{command}: interrupted; nothing was changed", file=sys.stderr)
        return 130


def _check_site_file() -> None:
    """A site file that is named but missing is a mistake, whatever else can or cannot be had."""
    site = os.environ.get("DEEPEP_SITE_YAML")
    if site and not os.path.isfile(site):
        raise SetupError(f"DEEPEP_SITE_YAML={site}: no such file")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
