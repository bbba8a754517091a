"""The error that a command turns into a sentence and exit code 2."""


class UsageError(Exception):
    """The check cannot be made: wrong usage, or something it needs is missing. Says what to do."""
