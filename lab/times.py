"""Interleaved times of main's build (base, and once more as a control) and of nan: times.py OUT DIR."""
import ctypes as c, json, random, statistics, sys, time
sys.path.insert(0, "tests")
import torch, capi
import flashmoe_science as fm
from gpu import memory
out, where = sys.argv[1:3]
names = ["base", "nan", "again"]
libs = {n: capi._declare(c.CDLL(f"{where}/{n}.so")) for n in names}
CELLS = [(d, dv, 8192 * (2 if s < 8192 else 1) // s, s, 16 if d <= 128 else 8, causal)
         for d, dv in ((128, 128), (64, 64), (256, 256), (192, 128)) for s in (512, 2048, 8192) for causal in ("none", "bottom_right")]
results, slow = [], []
def make(d, dv, b, s, h, causal, change=None):
    g = torch.Generator(device="cuda").manual_seed(1)
    rn = lambda dd: torch.randn(b, s, h, dd, device="cuda", generator=g, dtype=torch.float32).bfloat16()
    q, k, v, dout = rn(d), rn(d), rn(dv), rn(dv)
    if change: change(q, k, v, dout)
    o, lse = fm.flash_attention(q, k, v, causal=causal, return_lse=True)
    calls, grads = {}, {}
    for n in names:
        t = {"q": q, "k": k, "v": v, "dout": dout, "out": o, "lse": lse, "dq": torch.full_like(q, float("nan")),
             "dk": torch.full_like(k, float("nan")), "dv": torch.full_like(v, float("nan"))}
        params = capi.attention_backward_params({x: memory.raw_tensor(y, y.data_ptr(), list(y.shape), list(y.stride())) for x, y in t.items()}, causal=causal, kernel=b"sm90")
        size = c.c_size_t(); capi.check(libs[n].flashmoe_attention_backward_workspace_size(params, size), libs[n])
        calls[n] = (params, torch.empty(size.value, dtype=torch.uint8, device="cuda")); grads[n] = t
    def run(n):
        p, ws = calls[n]
        capi.check(libs[n].flashmoe_attention_backward(p, c.c_void_p(ws.data_ptr()), ws.numel(), c.c_void_p(torch.cuda.current_stream().cuda_stream)), libs[n])
    return run, grads
def times(run, count, of):
    ms = {n: [] for n in of}
    for i in range(count):
        order = list(of); random.Random(i).shuffle(order)
        for n in order:
            a, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); run(n); e.record(); ms[n].append((a, e))
        if i % 16 == 0: torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(e) * 1e3 for a, e in x] for n, x in ms.items()}
print("us: base, nan, base again; nan/base, again/base of medians; bits as base")
for d, dv, b, s, h, causal in CELLS:
    run, grads = make(d, dv, b, s, h, causal)
    for n in names: run(n); run(n)
    all_us = times(run, 48, names)
    med = {n: statistics.median(x) for n, x in all_us.items()}
    same = all(torch.equal(grads["nan"][x], grads["base"][x]) for x in ("dq", "dk", "dv"))
    results.append(dict(cell=(d, dv, b, s, h, causal), us=all_us, same_bits=same))
    print(f"{d}/{dv} b{b} s{s} h{h} {causal}".ljust(34), *[f"{med[n]:9.1f}" for n in names], f"  {med['nan'] / med['base']:.4f} {med['again'] / med['base']:.4f} {same}", flush=True)
    json.dump(dict(finite=results, slow=slow), open(out, "w"))
    del run, grads
NAN, INF = float("nan"), float("inf")
def rows(t):
    return torch.randperm(t.shape[1], device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))[: t.shape[1] // 100]
SLOW = {"one NaN in K": lambda q, k, v, o: k[0, 1000, 0, 3].fill_(NAN), "one NaN in dO": lambda q, k, v, o: o[0, 1000, 0, 3].fill_(NAN),
        "Inf in 1 % of rows of dO": lambda q, k, v, o: o.__setitem__((slice(None), rows(o), slice(None), 3), INF),
        "NaN in 1 % of keys of K": lambda q, k, v, o: k.__setitem__((slice(None), rows(k), slice(None), 3), NAN),
        "all of Q NaN": lambda q, k, v, o: q.fill_(NAN)}
print("us with what is not finite, d 128, causal, batch 1, 16 heads")
for s in (2048, 8192):
    for what, change in SLOW.items():
        run, grads = make(128, 128, 1, s, 16, "bottom_right", change)
        run("base"); x = times(run, 2, ["base"]) | times(run, 1, ["nan"])
        bad = {g: [float((~grads[n][g].isfinite()).float().mean()) for n in ("base", "nan")] for g in ("dq", "dk", "dv")}
        slow.append(dict(s=s, what=what, us=x, share_not_finite=bad))
        print(f"s{s} {what}".ljust(34), f"base {min(x['base']):9.1f} nan {x['nan'][0]:11.1f}  not finite, base -> nan: " + ", ".join(f"{g} {p:.4f} -> {r:.4f}" for g, (p, r) in bad.items()), flush=True)
        json.dump(dict(finite=results, slow=slow), open(out, "w"))
        if x["nan"][0] > 3e6: break
