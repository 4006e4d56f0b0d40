"""SASS counts of tiles: python scratch/count.py"""
import re, subprocess, sys, tempfile
from pathlib import Path
import jax, jax.numpy as jnp
from jaxtune.pallas import dispatch
from jaxtune.pallas.gated.thin_triton import Tile
from jaxtune.pallas.quant_matmul import fp8_gradients as g
from tests.gpu.aot.triton_compiler import recorded_calls, _POINTERS
import triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget

def comp(call):
    kernel, types, settings = call
    pointers = {jnp.dtype(d): n for d, n in _POINTERS.items()}
    constants = {k: v for k, v in settings.items() if k not in ("warps","stages","contract","aliases","shared_bytes")}
    arrays = [n for n in kernel.arg_names if n not in constants]
    sig = {n: pointers[a.dtype] for n, a in zip(arrays, types, strict=True)}
    src = ASTSource(kernel, signature={n: sig.get(n, "constexpr") for n in kernel.arg_names}, constexprs=constants,
        attrs={(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in arrays})
    triton.knobs.cache.dir = "/tmp/tcache_do"
    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": settings["warps"], "num_stages": settings["stages"]})

def count(tile, form, widths=(4096,), rank=16, keep=None):
    jax.clear_caches()
    def run(arrays, inners, bs):
        return g.rounded_pair(arrays, inners, bs, tile, form)
    S = jax.ShapeDtypeStruct
    given = [[S((16384, w), jnp.bfloat16) for w in widths], S((16384, rank*len(widths)), jnp.bfloat16), [S((w, rank), jnp.float32) for w in widths]]
    with dispatch.compile_for((9, 0)), recorded_calls() as calls:
        jax.eval_shape(run, *given)
    k = comp(calls[0])
    with tempfile.TemporaryDirectory() as f:
        p = Path(f) / "k.cubin"; p.write_bytes(k.asm["cubin"])
        nv = Path(triton.__file__).parent / "backends/nvidia/bin"
        sass = subprocess.run([str(nv / "nvdisasm"), "-c", str(p)], capture_output=True, text=True).stdout if (nv/"nvdisasm").exists() else ""
        usage = subprocess.run([str(nv / "cuobjdump"), "-res-usage", str(p)], capture_output=True, text=True)
    m = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    lines = [l for l in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", l) or re.match(r"\s*\.L_", l)]
    # the loop: the longest span between a label and a backward branch to it
    labels, best, n, ops = {}, (0, []), 0, []
    for l in lines:
        lab = re.match(r"\s*(\.L_\w+):", l)
        if lab: labels[lab[1]] = len(ops); continue
        ins = re.search(r"\*/\s+(@!?U?P\w+ )?([A-Z0-9_.]+)(.*)", l)
        if not ins: continue
        ops.append(ins[2])
        br = re.search(r"`\((\.L_\w+)\)", l)
        if ins[2].startswith("BRA") and br and br[1] in labels:
            span = ops[labels[br[1]]:]
            if len(span) > best[0]: best = (len(span), span)
    from collections import Counter
    c = Counter(o.split(".")[0] for o in best[1])
    per = best[0] * 32 * tile.warps / (tile.rows * tile.columns)
    print(tuple(tile), "form", form, widths, "rank", rank, "regs", m and m.groups(), "smem", k.metadata.shared, "loop", best[0], "per number %.2f" % per, dict(c.most_common(12)), flush=True)
    if keep: Path(keep).write_text(k.asm["ttgir"]); Path(keep + ".sass").write_text(sass)

if __name__ == "__main__":
    for form in (0, 1):
        for t in [(16,128,4,3,12),(32,128,4,3,8),(16,256,4,3,6),(32,256,4,3,3),(32,256,8,3,3),(64,256,8,3,2),(64,128,4,3,4)]:
            if form and t[0] < 64 and 0: continue
            try: count(Tile(*t), form, keep=f"/tmp/k_{form}_{t[0]}_{t[1]}_{t[2]}")
            except Exception as e: print(t, form, "failed", type(e), str(e)[-300:])
