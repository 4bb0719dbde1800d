#!/usr/bin/env bash
# Make .peers: an environment with the loaders that benchmarks/data.py measures headway against. It is apart from .venv
# because they bring other versions of what both need. What does not install is left out, and said so.
set -euo pipefail
python=${1:-python3}
cd "$(dirname "$0")/.."

[ -x .peers/bin/python ] || "$python" -m venv .peers
pip=(.peers/bin/python -m pip install --quiet --disable-pip-version-check)
echo "make-peers: installing torch and headway into .peers (some minutes)"
"${pip[@]}" --constraint constraints.txt torch  # first, and the same one: what follows must not bring another
"${pip[@]}" --constraint constraints.txt --editable '.[images]' pytest pytest-timeout
"${pip[@]}" torch==2.13.0 'setuptools<81' six  # what DALI and Streaming need, and do not ask for

for peer in webdataset==1.0.2 mosaicml-streaming==0.13.0 nvidia-dali-cuda120==2.4.0 litdata==0.2.76 spdl==0.8.0; do
  echo "make-peers: $peer"
  "${pip[@]}" torch==2.13.0 "$peer" || echo "make-peers: $peer does not install here, and is left out" >&2
done
