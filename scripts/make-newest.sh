#!/usr/bin/env bash
# Make .venv-newest: headway with the newest Python at hand and the newest releases of torch and of all else, which is
# what `pip install` gives to users today. Several gigabytes; a minute or two.
set -euo pipefail
cd "$(dirname "$0")/.."

newest=python3
for version in 3.14 3.13 3.12; do
  for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python3; do
    command -v "$candidate" > /dev/null || continue
    "$candidate" -c 'import ensurepip' 2> /dev/null && newest=$candidate && break 2
  done
done
[ -x .venv-newest/bin/python ] || "$newest" -m venv .venv-newest
pip=(.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager)
echo "make-newest: installing the newest torch and headway for $("$newest" --version) into .venv-newest"
"${pip[@]}" --editable '.[dev]'
.venv-newest/bin/python -c 'import torch, sys; print(f"make-newest: torch {torch.__version__}, Python {sys.version.split()[0]}")'
