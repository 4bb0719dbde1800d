#!/usr/bin/env bash
# All that only a GPU can tell, each part with a time limit and a log of its own; what fails does not stop the rest:
#   scripts/gpu-check.sh OUT [MINUTES]
# PYTHON names the interpreter (python3); headway is found by its installation or by PYTHONPATH. MINUTES, 25 if not said, are
# for all parts together: those that come too late are left out, and said so. Exits with the number of parts that failed.
set -uo pipefail
out=$(mkdir -p "${1:?usage: scripts/gpu-check.sh OUT [MINUTES]}" && cd "$1" && pwd)
minutes=${2:-25} # whole ones
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
# a plain source tree has no entry point that tells pytest of headway's fixtures
told=$("$python" -c 'from importlib.metadata import distribution; distribution("headway")' 2>/dev/null || echo "-p headway.testing.plugin")
test=("$python" -m pytest -q -rPs $told)
summary=$out/summary.txt
failed=0

part() { # name, seconds, command ...
  local name=$1 limit=$2 began=$SECONDS left=$((60 * minutes - SECONDS)) code
  shift 2
  if [ "$left" -lt 20 ]; then
    echo "$name: left out, no time" | tee -a "$summary"
    return
  fi
  timeout --kill-after=10 "$((limit < left ? limit : left))" "$@" >"$out/$name.log" 2>&1
  code=$?
  # pytest ends with 5 where it finds nothing to run
  case $code in
    0) echo "$name: passed in $((SECONDS - began)) s" ;;
    5) echo "$name: nothing to run" ;;
    124 | 137) echo "$name: FAILED, stopped after $((SECONDS - began)) s" && failed=$((failed + 1)) ;;
    *) echo "$name: FAILED with $code after $((SECONDS - began)) s" && failed=$((failed + 1)) ;;
  esac >"$out/$name.verdict"
  {
    cat "$out/$name.verdict"
    grep -E '^(FAILED|ERROR)|passed|failed|skipped|SKIPPED|us/step|[+-][0-9.]+ ?%| us \(' "$out/$name.log" | tail -n 12 | sed 's/^/    /'
  } | tee -a "$summary"
  rm "$out/$name.verdict"
}

: >"$summary"
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")' 2>&1 | tail -n 1 | tee -a "$summary"
git log -1 --format='%h %s' 2>/dev/null | tee -a "$summary"

part loop 200 "$python" benchmarks/loop.py
part plan-live 180 "${test[@]}" tests/plan/test_gpu_live.py
part plan 420 "${test[@]}" tests/plan/test_gpu_measure.py
part train 240 "${test[@]}" tests/train/test_gpu.py
part resume 240 "${test[@]}" tests/train/test_resume.py -k gpu
part dist 300 "${test[@]}" tests/gpu
part loop-ablate 300 "$python" benchmarks/loop.py --ablate
echo "logs: $out; parts that failed: $failed"
exit "$failed"
