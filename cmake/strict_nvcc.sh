#!/bin/sh
# Runs a CUDA compiler and fails where ptxas expects a loss of performance: products of wgmma that
# run one after another, a setmaxnreg that is ignored. Either may cost half the speed, yet ptxas
# calls it information, which --warning-as-error lets pass.
#
#   sh strict_nvcc.sh nvcc ARGUMENTS...
said=$("$@" 2>&1)
status=$?
if [ -n "$said" ]; then printf '%s\n' "$said" >&2; fi
if [ "$status" -ne 0 ]; then exit "$status"; fi
case "$said" in
  *"Potential Performance Loss"*)
    echo "strict_nvcc.sh: error: ptxas expects a loss of performance, see above" >&2
    exit 1
    ;;
esac
