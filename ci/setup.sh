# Sourced by the commands in ci/. Makes the virtual environment of requirements.txt on first use
# and sets: ci (this folder), python (the environment's interpreter), DEEPEP_CACHE (exported).
# With plain_python set, python is the machine's own and nothing is made.
set -euo pipefail

ci=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export DEEPEP_CACHE=${DEEPEP_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/deepep-spack}
case $DEEPEP_CACHE in /*) ;; *) DEEPEP_CACHE=$PWD/$DEEPEP_CACHE ;; esac
unset PYTHONHOME PYTHONPATH
export PYTHONPATH=$ci PYTHONDONTWRITEBYTECODE=1

stop() { printf '%s: %s\n' "ci/$(basename -- "$0")" "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${DEEPEP_PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
        >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

need_python() {
  find_python || stop "needs Python 3.10 or later with venv (Debian: apt install python3-venv;" \
    "RHEL: dnf install python3.12); or name one: DEEPEP_PYTHON=/path/to/python3"
}

pip_install() {
  set -- install --quiet --no-deps --only-binary :all: --require-hashes --disable-pip-version-check \
    -r "$ci/requirements.txt"
  if [ -f "$wheels/../MANIFEST.json" ]; then
    # Nothing of a configured index, which may not be there: this tree brings its wheels
    PIP_CONFIG_FILE=/dev/null "$new/bin/python" -m pip --isolated "$@" --no-index --find-links "$wheels"
  else
    "$new/bin/python" -m pip "$@"
  fi
}

make_venv() {
  local base new log wheels=$ci/../airgap/wheels
  base=$(need_python) || exit
  new=$venv.new.$$
  log=$DEEPEP_CACHE/setup.log
  printf 'ci: first use, setting up %s (about 15 s) ...\n' "$venv" >&2
  if ! { "$base" -m venv "$new" && pip_install; } >"$log" 2>&1; then
    rm -rf "$new"
    tail -n 5 "$log" >&2
    [ ! -f "$wheels/../MANIFEST.json" ] || stop "cannot install ci/requirements.txt (log: $log): airgap/wheels is for the" \
      "Pythons and the machine that airgap/MANIFEST.json names; name one: DEEPEP_PYTHON=/path/to/python3.12"
    stop "cannot install ci/requirements.txt (log: $log): pip needs a package index, or a folder of" \
      "wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path"
  fi
  mv "$new" "$venv"
}

if [ -n "${plain_python-}" ]; then
  python=$(need_python)
  return
fi

venv=$DEEPEP_CACHE/venv-$(sha256sum "$ci/requirements.txt" | cut -c1-12)
python=$venv/bin/python
if [ ! -x "$python" ]; then
  mkdir -p "$DEEPEP_CACHE" || stop "cannot write to $DEEPEP_CACHE: set DEEPEP_CACHE to a folder of yours"
  # One process sets up, another that starts meanwhile waits for it
  exec 9>"$DEEPEP_CACHE/setup.lock"
  flock 9
  if [ ! -x "$python" ]; then
    rm -rf "$venv"
    make_venv
  fi
  exec 9>&-
fi
