#!/bin/bash
# run.sh [SECONDS of the GPU tests, 0: none]. About 60 s, then the tests. Packed by pack.sh before.
cd "$(dirname "$0")"; out=${OUT:-$BUILDS/fast2_out}; mkdir -p "$out"; w=$(mktemp -d)
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
python3 - "$w" <<'P'
import sys, glob, zipfile, tarfile
w = sys.argv[1]
for f in glob.glob("whl/*.whl") + glob.glob("wheel/*.whl"): zipfile.ZipFile(f).extractall(w + "/site")
tarfile.open("libs.tar.xz").extractall(w + "/lib")
P
export PYTHONPATH=$w/site
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm --format=csv,noheader
export FLASHMOE_LIBRARY=$w/lib/fast2.so
timeout 20 python3 quick.py 2>&1 | tail -30 | cut -c1-400; q=${PIPESTATUS[0]}; echo "quick rc $q"
libs=$(for n in $(cat names); do echo "$w/lib/$n.so"; done)
timeout 30 python3 times.py "$out/fast2.json" $libs 2>&1 | tail -40; echo "times rc ${PIPESTATUS[0]}"
timeout 20 python3 beside.py "$out/fast2_beside.json" $libs 2>&1 | tail -30; echo "beside rc ${PIPESTATUS[0]}"
timeout 20 python3 benchmarks/gpu_plans.py --output "$out/plans_h200.json" 2>&1 | tail -3; echo "plans rc ${PIPESTATUS[0]}"  # for benchmarks/results
t=${1:-240}
[ "$q" = 0 ] && [ "$t" -gt 0 ] && { timeout "$t" python3 -m pytest -q --maxfail=12 -n 14 -p no:cacheprovider tests/gpu/test_attention_backward.py 2>&1 | tail -20 | cut -c1-600; }
true
