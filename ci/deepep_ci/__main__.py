"""Entry point of every command in ci/: python -m deepep_ci COMMAND ARGS..."""

import sys

from .errors import SetupError


def main(argv: list[str]) -> int:
    """Runs one command. Returns its exit code: 0 holds, 1 a check failed, 2 set-up or usage."""
    command, arguments = argv[0], argv[1:]
    try:
        if command == "check":
            from .check import main as run
        elif command == "lock":
            from .lock import main as run
        elif command == "sources":
            from .sources import main as run
        else:
            from .spack import main as run
        return run(arguments)
    except SetupError as error:
        print(f"ci/{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ci/{command}: interrupted; nothing was changed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
