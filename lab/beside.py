"""When the prologue and the kernel begin and end, by the profiler: beside.py OUT LIB..."""
import json, statistics, sys, tempfile
import torch
from calls import Calls, libraries
from torch.profiler import ProfilerActivity, profile

out, libs = sys.argv[1], libraries(sys.argv[2:])
rows = []
for dim, heads, s, causal in ((128, 16, 512, "none"), (128, 16, 512, "bottom_right"), (64, 32, 512, "none"), (256, 8, 512, "none"), (128, 16, 4096, "none")):
    b = 16384 // s
    calls = Calls(libs, dim, b, s, heads, heads, causal, None, b"sm90")
    for name in libs:
        calls.run(name); torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
            for _ in range(12):
                calls.run(name); torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as f:
            p.export_chrome_trace(f.name)
            events = [e for e in json.load(open(f.name))["traceEvents"] if e.get("cat") == "kernel" and "attention_backward" in e["name"]]
        pro, main = (sorted((e for e in events if ("attention_backward_prologue" in e["name"]) == x), key=lambda e: e["ts"]) for x in (True, False))
        med = lambda x: round(statistics.median(x), 1)
        prologue, blocks = med([e["dur"] for e in pro]), pro[0]["args"]["grid"][0]
        row = dict(build=name, dim=dim, seq=s, causal=causal, prologue_us=prologue, prologue_blocks=blocks,
                   kernel_begins_us=med([m["ts"] - e["ts"] for e, m in zip(pro, main)]),
                   kernel_ends_us=med([m["ts"] + m["dur"] - e["ts"] for e, m in zip(pro, main)]),
                   gb_per_s_of_a_multiprocessor=round(2 * b * s * heads * dim * 2 / prologue / 1e3 / min(blocks, 132), 1))
        rows.append(row)
        print(json.dumps(row), flush=True)
        json.dump(rows, open(out, "w"), indent=1)
    del calls
