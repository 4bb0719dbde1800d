#!/usr/bin/env bash
# Make .venv with headway, at the versions of constraints.txt. Needs python3 (3.11 or newer) and, on Debian, python3-venv,
# which it installs where it may.
set -euo pipefail
python=${1:-python3}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "headway needs Python 3.11 or newer; $python is $("$python" --version): try make PYTHON=python3.12" >&2
  exit 2
}
if ! "$python" -c 'import ensurepip' 2> /dev/null; then
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  echo "make-venv: installing python3-venv"
  { "${as_root[@]}" apt-get -qq update && "${as_root[@]}" apt-get -qq install -y python3-venv; } > /dev/null || {
    echo "$python cannot make virtual environments: install the package python3-venv, then run make again" >&2
    exit 2
  }
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt)
echo "make-venv: installing torch and headway into .venv (a minute or two)"
"${pip[@]}" torch  # first: what follows must not bring another one
"${pip[@]}" --editable '.[dev]'
# what pip would do on one core; some packages bring files that are not meant to be compiled
.venv/bin/python -m compileall -q -j 0 .venv/lib/python3*/site-packages > /dev/null 2>&1 || true
