"""Calls of each kernel against float64, outputs and workspace poisoned: quick.py (library of FLASHMOE_LIBRARY)."""
import sys
sys.path.insert(0, "tests")
import torch
from gpu import backward
from gpu.backward import Case

bad = 0
for kernel in ("sm90", "sm89"):
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (200, 136)):
        if kernel == "sm90" and (dim, dim_v) in ((72, 40), (200, 136)) and dim not in backward.dims("sm90"):
            continue
        for o in (dict(seq_q=64, seq_k=128), dict(seq_q=200, seq_k=300), dict(seq_q=1024, seq_k=1024, causal="bottom_right", batch=4, heads_q=8, heads_kv=8),
                  dict(seq_q=513, seq_k=700, heads_q=6, heads_kv=2, batch=2, causal="bottom_right", dlse=True),
                  dict(seq_q=700, seq_k=650, window=(100, 50), heads_q=3, heads_kv=3), dict(seq_q=900, seq_k=300, causal="bottom_right"),
                  dict(seq_q=512, seq_k=512, heads_q=16, heads_kv=16, batch=16), dict(seq_q=300, seq_k=500, softcap=20.0),
                  dict(seq_q=300, seq_k=500, dtype="fp16", fp32=("dq", "dk")), dict(seq_q=300, seq_k=500, accumulate=True)):
            case = Case(kernel=kernel, dim=dim, dim_v=dim_v, values="normal", **o)
            try:
                backward.check_case(case, "cuda"); torch.cuda.synchronize()
            except Exception as e:
                bad += 1
                print("WRONG", case, str(e)[:300], flush=True)
                if "CUDA" in str(e) or "launch" in str(e):
                    sys.exit(2)
    print("checked", kernel, "wrong so far", bad, flush=True)
sys.exit(bad > 0)
