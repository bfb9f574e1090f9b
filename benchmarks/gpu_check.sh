#!/usr/bin/env bash
# One command for a machine with a GPU: the cuda tests, traces in float16 and bfloat16 with forced overflows, the
# bit-identity test, the sync count and the overhead benchmark. Writes one JSON.
#
# usage: benchmarks/gpu_check.sh [OUTPUT.json]
# Needs torch with CUDA, pandas, pyarrow, typer, rich, jinja2, pytest, and plotly for the HTML report.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${1:-benchmarks/gpu/latest.json}"
mkdir -p "$(dirname "$out")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" COLUMNS=100
python="${PYTHON:-python3}"

# -c /dev/null: the project's own pytest settings ask for plugins that such a machine may lack.
"$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q tests/cuda --junit-xml "$work/tests.xml"
tests=$?

for dtype in float16 bfloat16; do
  "$python" -m stepscope trace --hidden-size 256 --layers 4 --device cuda --dtype "$dtype" --steps 20 \
    --init-scale 1e12 --seed 1 --out "$work/$dtype" --fail-on never >"$work/$dtype.txt" 2>&1
  echo $? >"$work/$dtype.rc"
done

"$python" benchmarks/overhead.py --device cuda --rounds 6 --windows 20 --json "$work/overhead.json"

"$python" - "$work" "$out" "$tests" <<'PY'
import json, pathlib, sys, xml.etree.ElementTree as tree
work, out, code = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
import torch
from stepscope.store.trace import Trace
result = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__, "pytest_exit": code}
if (work / "tests.xml").exists():
    suite = next(tree.parse(work / "tests.xml").getroot().iter("testsuite"))
    result["tests"] = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    result["failed"] = [c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None or c.find("error") is not None]
for dtype in ("float16", "bfloat16"):
    entry = {"exit": int((work / f"{dtype}.rc").read_text())}
    try:
        trace = Trace.load(work / dtype)
        ends = trace.steps[trace.steps["sync_gradients"]]
        entry |= {"windows": len(ends), "skipped": int(ends["step_skipped"].sum()), "probes_off": trace.meta["probes_off"],
                  "weights": [round(w, 6) for w in ends["loss_weight_sum"].tolist()], "report_bytes": (work / dtype / "report.html").stat().st_size}
    except Exception as error:
        entry["error"] = f"{type(error).__name__}: {error}"
        entry["output"] = (work / f"{dtype}.txt").read_text()[-2000:]
    result[dtype] = entry
if (work / "overhead.json").exists():
    result["overhead"] = json.loads((work / "overhead.json").read_text())
out.write_text(json.dumps(result, indent=1) + "\n")
print(json.dumps(result, indent=1))
PY
exit "$tests"
