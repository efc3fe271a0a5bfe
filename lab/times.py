"""Interleaved times of several builds of the library: times.py OUT LIB... (the first is the base)."""
import json, random, statistics, sys
import torch
from calls import Calls, libraries

out, libs = sys.argv[1], libraries(sys.argv[2:])
names = list(libs)
base = names[0]
CELLS = []  # dim, batch, seq, heads, heads_kv, causal, window, kernel
for dim, heads in ((64, 32), (128, 16), (256, 8)):
    for s in (512, 1024, 2048):
        for causal in ("none", "bottom_right"):
            CELLS.append((dim, 16384 // s, s, heads, heads, causal, None, b"sm90"))
for s in (8192, 16384):
    CELLS.append((128, 16384 // s, s, 16, 16, "none", (1024, 0), b"sm90"))
BOTH = ("none", "bottom_right")
CELLS += [(128, 4, 4096, 16, 16, x, None, b"sm90") for x in BOTH]
CELLS += [(128, 128, 128, 16, 16, x, None, b"sm90") for x in BOTH]
CELLS += [(128, 32, 512, 32, 8, "bottom_right", None, b"sm90"), (128, 1, 512, 16, 16, "bottom_right", None, b"sm90"),
          (128, 32, 512, 16, 16, "bottom_right", None, b"sm89"), (64, 8, 2048, 32, 32, "none", None, b"sm89")]
results = []
print("us".ljust(46), *[n.rjust(9) for n in names], " times as fast as the first", flush=True)
for cell in CELLS:
    dim, b, s, h, hkv, causal, window, kernel = cell
    calls = Calls(libs, *cell)
    for n in names:
        calls.run(n); calls.run(n)
    torch.cuda.synchronize()
    first = {n: {x: y.clone() for x, y in calls.grads[n].items()} for n in names}
    us = {n: [] for n in names}
    for i in range(14):
        order = list(names); random.Random(i).shuffle(order)
        for n in order:
            a, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls.run(n); a.record(); calls.run(n); calls.run(n); e.record()  # warm, then two
            us[n].append((a, e))
    torch.cuda.synchronize()
    med = {n: statistics.median(a.elapsed_time(e) * 500 for a, e in x) for n, x in us.items()}
    bits = {n: all(torch.equal(first[n][x], calls.grads[n][x]) for x in first[n]) for n in names}
    far = lambda x, y: float((x.float() - y.float()).abs().max() / y.float().abs().max())
    diff = {n: max(far(calls.grads[n][x], calls.grads[base][x]) for x in ("dq", "dk", "dv")) for n in names}
    results.append(dict(kernel=kernel.decode(), dim=dim, batch=b, seq=s, heads=f"{h}/{hkv}", causal=causal, window=window,
                        us=med, same_bits_again=bits, difference_from_first=diff))
    print(f"{kernel.decode()} d{dim} b{b} s{s} h{h}/{hkv} {causal} {window or ''}".ljust(46), *[f"{med[n]:9.1f}" for n in names],
          *[f" {med[base] / med[n]:.3f}" for n in names[1:]], "" if all(bits.values()) else f" BITS {bits}",
          f" diff {max(diff.values()):.1e}", flush=True)
    json.dump({"device": torch.cuda.get_device_name(), "cells": results}, open(out, "w"), indent=1)
    del calls, first
