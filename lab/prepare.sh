#!/bin/bash
# prepare.sh: fills this folder: the wheel of $TREES/nan2, main's library, tests, and what tests import (whl/: numpy, pytest, xdist and so on, as in $LAB/nan/gpu/whl).
set -e; cd "$(dirname "$0")"
$LAB/cuwheel nan2
mkdir -p wheel whl; rm -rf wheel/* tests cmake; cp $BUILDS/nan2_wheel/*.whl wheel/; cp $LAB/nan/gpu/whl/* whl/
cp -r $TREES/nan2/tests $TREES/nan2/cmake $TREES/nan2/pyproject.toml .
xz -T2 -3 -c ${BASE:-$BUILDS/int_site/flashmoe_science/lib/libflashmoe.so.1} > base.so.xz   # of main before nan2
