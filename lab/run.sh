#!/bin/bash
# NaN containment of sm90's attention backward with clusters: right (60 s), times of main's build against nan2's (60 s), sanitizers (30 s). Fill the folder by prepare.sh first.
cd "$(dirname "$0")"; out=${OUT:-$BUILDS/nan_out}; mkdir -p "$out"; w=$(mktemp -d)
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
python3 - "$w" <<'P'
import sys, glob, lzma, shutil, zipfile
w = sys.argv[1]
for f in glob.glob("whl/*.whl") + glob.glob("wheel/*.whl"): zipfile.ZipFile(f).extractall(w + "/site")
open(w + "/base.so", "wb").write(lzma.open("base.so.xz").read())
shutil.copy(w + "/base.so", w + "/again.so"); shutil.copy(glob.glob(w + "/site/flashmoe_science/lib/libflashmoe.so.1")[0], w + "/nan.so")
P
export PYTHONPATH=$w/site
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm --format=csv,noheader
tests() { timeout $1 python3 -m pytest -q --maxfail=8 -n 8 -p no:cacheprovider tests/gpu/test_attention_backward.py -k "$2" > $w/$3.log 2>&1; echo "$3: rc $?"; grep -E "^(E  |FAILED|ERROR)|passed|failed" $w/$3.log | cut -c1-260 | tail -25; cp $w/$3.log $out/nan2_$3.log; }
tests 90 "(stays or nan_everywhere) and sm90" contain
timeout 90 python3 times.py "$out/nan2.json" "$w" 2>&1 | tail -45; echo "times rc ${PIPESTATUS[0]}"
for tool in memcheck synccheck initcheck; do timeout 40 compute-sanitizer --tool $tool --error-exitcode 9 python3 tests/gpu/sanitize_attention_backward.py sm90 > $out/nan2_$tool.log 2>&1; echo "$tool rc $?"; tail -2 $out/nan2_$tool.log; done
tests 120 "(added_to or no_pair or windows or (random_calls and not ada) or many_tiles or plan_is_the_launch or follow) and sm90 or harms_nobody or stays_there_by_kernels_for_ada or (touched and sm89)" rest
true
