#!/usr/bin/env bash
# Make .peers-loop: an environment with the trainers that benchmarks/loop.py measures headway against:
#   .peers-loop/bin/python benchmarks/loop.py
# It is apart from .venv because they bring other versions of what both need. What does not install is left out, and said so.
set -euo pipefail
python=${1:-python3}
cd "$(dirname "$0")/.."

[ -x .peers-loop/bin/python ] || "$python" -m venv .peers-loop
pip=(.peers-loop/bin/python -m pip install --quiet --disable-pip-version-check)
echo "make-loop-peers: installing torch and headway into .peers-loop (some minutes)"
"${pip[@]}" --constraint constraints.txt torch  # first, and the same one: what follows must not bring another
"${pip[@]}" --constraint constraints.txt --editable .

for peer in pytorch-lightning==2.6.6 lightning-fabric==2.6.6 accelerate==1.15.0 dmlcloud==0.5.1; do
  echo "make-loop-peers: $peer"
  "${pip[@]}" torch==2.13.0 "$peer" || echo "make-loop-peers: $peer does not install here, and is left out" >&2
done
