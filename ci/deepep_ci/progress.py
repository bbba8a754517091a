"""Tells on the terminal what takes long; silent for what is quick."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds after which a step is worth a line
QUIET_FOR = 2.0


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says on stderr what is under way once it takes longer than QUIET_FOR, and when it ended."""
    begin = time.monotonic()
    said = threading.Event()

    def say() -> None:
        said.set()
        print(f"ci: {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(QUIET_FOR, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            print(f"ci: {what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
