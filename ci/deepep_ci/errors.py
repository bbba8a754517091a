"""Errors that a command turns into a sentence and an exit code."""


class SetupError(Exception):
    """The command cannot do its work: wrong usage, a missing tool or place. Exit code 2."""


class DocumentError(Exception):
    """A data file is not what it has to be. The text names file, place, and what was expected."""
