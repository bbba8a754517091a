"""Commands that may hang or crash: run in a process of their own, with a deadline."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROBE = Path(__file__).with_name("probe.py")

#: Seconds that a killed process has to go; one in a stuck system call does not, and is left
GOING = 3


#: Those that run now, of all threads
_running = set()


def end_all():
    """Kills what still runs, so that an interrupted doctor does not wait for it."""
    for child in list(_running):
        _kill_group(child)


def run(command, deadline, env=None):
    """Runs a command for at most deadline seconds.

    Returns {"state": "ok", "text": its output}, or what happened instead: "failed" with "error"
    and "code", "crashed" with "signal", "hung" with "seconds"; then "at" is the line of Python it
    was in, if it tells.
    """
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            universal_newlines=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return {
            "state": "failed",
            "error": "{} does not run: {}".format(command[0], error.strerror),
            "code": 127,
        }
    _running.add(child)
    try:
        out, err = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        out, err = _kill(child)
        return {"state": "hung", "seconds": round(time.monotonic() - begin), "at": where(err)}
    except BaseException:
        _kill(child)
        raise
    finally:
        _running.discard(child)
    if child.returncode == 0:
        return {"state": "ok", "text": out}
    lines = [line for line in (err or out).splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "no word"
    if child.returncode < 0:
        number = -child.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return {"state": "crashed", "signal": name, "at": where(err)}
    return {"state": "failed", "error": said, "code": child.returncode}


def _kill_group(child):
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _kill(child):
    """Kills a process and all it started. Returns what it had written, if it goes."""
    _kill_group(child)
    try:
        return child.communicate(timeout=GOING)
    except subprocess.TimeoutExpired:
        return "", ""


def where(text):
    """Innermost line of Python in what faulthandler wrote, as "file:12, in name", else ""."""
    frames = []
    for line in text.splitlines():
        if "most recent call first" in line:
            # The thread that crashed is the only one, the main thread of a hung process the last
            frames = []
        match = re.match(r'\s+File "(.*)", line (\d+) in (.*)', line)
        if match and not match.group(1).startswith("<frozen"):
            frames.append("{}:{}, in {}".format(*match.groups()))
    return frames[0] if frames else ""


def probe(section, *arguments, python=sys.executable, deadline):
    """A section of probe.py, in a process of its own: what it found with "state" "ok", or what
    happened instead (see run)."""
    command = [str(python), str(PROBE), str(deadline), section, *map(str, arguments)]
    answer = run(command, deadline)
    if answer["state"] != "ok":
        return answer
    try:
        found = json.loads(answer["text"].splitlines()[-1])
    except (IndexError, ValueError):
        return {"state": "failed", "error": "no answer from {}".format(command[0]), "code": 0}
    return dict(found, state="ok")
