"""A backward call by each of several libraries, on the same inputs."""
import ctypes as c, sys
from pathlib import Path
sys.path.insert(0, "tests")
import torch, capi
import flashmoe_science as fm
from gpu import memory


def libraries(paths):
    return {Path(p).stem: capi._declare(c.CDLL(p)) for p in paths}


class Calls:
    def __init__(self, libs, dim, batch, seq, heads, heads_kv, causal, window, kernel):
        self.libs = libs
        g = torch.Generator(device="cuda").manual_seed(1)
        rn = lambda h: torch.randn(batch, seq, h, dim, device="cuda", generator=g, dtype=torch.float32).bfloat16()
        q, k, v, dout = rn(heads), rn(heads_kv), rn(heads_kv), rn(heads)
        out, lse = fm.flash_attention(q, k, v, causal=causal != "none" and causal, window=window, return_lse=True)
        self.grads, self.calls = {}, {}
        for name, lib in libs.items():
            t = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
            t |= {"d" + x: torch.full_like(t[x], float("nan")) for x in "qkv"}
            self.grads[name] = {x: t[x] for x in ("dq", "dk", "dv")}
            raw = {x: memory.raw_tensor(y, y.data_ptr(), list(y.shape), list(y.stride())) for x, y in t.items()}
            params = capi.attention_backward_params(raw, causal=causal, window=window, kernel=kernel)
            size = c.c_size_t()
            capi.check(lib.flashmoe_attention_backward_workspace_size(params, size), lib)
            self.calls[name] = (params, torch.full((size.value,), 0xFF, dtype=torch.uint8, device="cuda"), t)

    def run(self, name):
        params, ws, _ = self.calls[name]
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        lib = self.libs[name]
        capi.check(lib.flashmoe_attention_backward(params, c.c_void_p(ws.data_ptr()), ws.numel(), stream), lib)
