#!/usr/bin/env bash
# Runs the field cases against this tree: tests/run_field_cases.sh FOLDER [--only D01,D02] [--keep]
# FOLDER holds run_cases.py and open/. The model is the embedded demo's; its place enters case_map.json by environment.
set -euo pipefail
if [ $# -eq 0 ]; then
  sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cases=$1
shift
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 DSPLIT_CASE_MODEL="$root/dsplit/demo/model"
exec python "$cases/run_cases.py" "$cases/open" --map "$root/tests/case_map.json" "$@"
