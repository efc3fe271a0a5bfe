#!/bin/bash
# pack.sh main NAME...   with the builds $BUILDS/NAME_site that $LAB/cuwheel has made: their libraries, as libs.tar.xz, and the
# Python package, tests and wheels that run.sh needs. First:   cuwheel fast2, and main's build as another worktree
#   git -C $MAIN worktree add $TREES/base main; $LAB/cuwheel base; $LAB/cuwheel fast2
#   ./pack.sh base fast2            (the first is what times are over; quick.py and tests take fast2)
# Other numbers of prologue blocks (host code alone, a minute each): a worktree of w-fast2 with kMostWatchedBlocks of
# cuda/attention/backward/launches.cpp's clamp replaced by 16 or 24, built by cuwheel, e.g.
#   git -C $MAIN worktree add $TREES/n16 w-fast2; sed -i 's/? kMostWatchedBlocks :/? 16 :/' $TREES/n16/cuda/attention/backward/launches.cpp
# The new prologue in front of main's kernel ("front", recompiles every backward kernel): a worktree of w-fast2, kernel.cuh
# with main's wait_for_dependencies/launch_dependents behind the cluster's barrier, no watch_prologue and no wait_for_rows,
# and `false` for `true` in sm90_backward/instance.cu.in.
set -e; here=$(cd "$(dirname "$0")" && pwd); w=$(mktemp -d); mkdir "$w/lib"
for n in "$@"; do cp "$BUILDS/${n}_site/flashmoe_science/lib/libflashmoe.so.1" "$w/lib/$n.so"; done
tar -C "$w/lib" -cf - . | xz -3 -T2 > "$here/libs.tar.xz"
mkdir -p "$here/wheel"; rm -f "$here"/wheel/*; cp $BUILDS/fast2_wheel/flashmoe*.whl "$here/wheel/"
rm -rf "$here/tests" "$here/cmake"; mkdir -p "$here/benchmarks"; cp $TREES/fast2/benchmarks/*.py "$here/benchmarks/"; for x in tests cmake pyproject.toml; do cp -r "$TREES/fast2/$x" "$here/"; done
mkdir -p "$here/whl"; cp -n $LAB/wide/gpu/whl/* "$here/whl/"
echo "$*" > "$here/names"; du -sh "$here"
