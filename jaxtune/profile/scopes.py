"""What names in a trace mean: the scope and phase of an op_name (`scope_of`), the category of a kernel (`categorise`,
one of CATEGORIES), and a kernel's name for a table (`readable`). `is_gemm_kernel`, `is_attention_kernel` and
`is_collective` recognise kernels by their names. xplane.py reads scopes and collectives, launches.py asks for products
and attention, both readers of traces categorise, and the reports shorten names."""

from __future__ import annotations

import functools
import re

from jaxtune.profile.trace import COLLECTIVE, COPY, MEMSET, TO_DEVICE, TO_HOST

# All categories, in the order of the tables.
CATEGORIES = (
    "GEMM",
    "attention",
    "dequantise",
    "MoE",
    "elementwise and norms",
    "loss",
    "optimizer",
    "device copies",
    "copies to device",
    "copies to host",
    "collectives",
    "other",
    "idle",
)

_WRAPPER = re.compile(r"^([a-z_]+)\((.*)\)$")
_CONTROL = ("while", "body", "cond", "scan", "branch_0_fun", "branch_1_fun", "pjit", "core_call", "shard_map")
_TRANSFORMS = (
    "closed_call",
    "eval_jaxpr",
    "checkpoint",
    "remat",
    "rematted_computation",
    "custom_vjp_call",
    "custom_jvp_call",
)
_PHASES = ("forward", "backward", "recompute")
_SILENT = frozenset((*_CONTROL, *_TRANSFORMS, *_PHASES))


@functools.lru_cache(maxsize=65536)
def scope_of(op_name: str) -> tuple[str, str]:
    """Reads (scope, phase) from an HLO instruction's op_name; ("", "") from an empty one. The reader of XPlane files
    (xplane.py) calls it for each kernel and each buffer. chrome.py finds scopes in another way, from the ranges around
    a call.

    JAX writes "jit(step)/transpose(jvp(layer))/mlp/dot_general": transformations wrap the scope around them, and the
    last part is the primitive; this has the scope "layer/mlp". Names of jitted functions, loops, transformations and
    phases, and formulas of einsum, are left out. A scope or path of scopes that directly repeats is written once,
    because a transformation has entered it again. Of several op_names, joined by semicolons, the first is read. The
    phase is "recompute" in the second run of jax.checkpoint or in a scope with the name "recompute", unless that is
    inside a scope with the name "backward"; else "backward" under a transpose or in a scope with that name; else
    "forward".
    """
    if not op_name:
        return "", ""
    parts = _split(op_name.split(";")[0])
    phase, out = "forward", []
    for index, part in enumerate(parts[:-1]):
        name, transposed = _unwrap(part)
        if transposed or part == "backward":
            phase = "backward" if phase != "recompute" else phase
        if part in ("recompute", "rematted_computation") and "backward" not in parts[:index]:
            phase = "recompute"
        if name and name not in _SILENT and "->" not in name:  # an einsum's formula is not a scope
            out.append(name)
            # Scopes entered again by a transformation of what is in them, one or several at once.
            for size in range(1, len(out) // 2 + 1):
                if out[-size:] == out[-2 * size : -size]:
                    del out[-size:]
                    break
    return "/".join(out), phase


def _split(path: str) -> list[str]:
    """The names between the slashes of `path`, an HLO instruction's op_name, in order (`scope_of` reads them); slashes
    within parentheses and brackets do not separate names."""
    parts, depth, current = [], 0, ""
    for char in path:
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def _unwrap(part: str) -> tuple[str, bool]:
    """Takes the transformations off one part of an op_name, such as "transpose(jvp(layer))", for `scope_of`.

    Returns:
      (the scope inside them, or "" for the name of a function under jit or pmap; whether one of them is a transpose, as
        in the backward).
    """
    transposed = False
    while match := _WRAPPER.match(part):
        wrapper, part = match.groups()
        transposed |= wrapper == "transpose"
        if wrapper in ("jit", "pjit", "xla_pmap", "pmap"):
            return "", transposed
    return part, transposed


_GEMM_KERNEL = re.compile(
    r"nvjet|cutlass.*(gemm|mma)|gemm|cublas|wgmma_.*gemm|_s\d+gemm|sgemm|hgemm|xmma|ampere_.*16816|sm\d+_xmma"
    r"|splitKreduce|matmul(?!.*norm)|gemv|dot_kernel",
    re.IGNORECASE,
)
_ATTENTION_KERNEL = re.compile(
    r"flash|fmha|sdpa|attention|cudnn::fusion::(compute_dot_do_o|convert_dq|fmha)|cudnn_generated.*sdpa|mha_|attn",
    re.IGNORECASE,
)
_ATTENTION_SCOPE = re.compile(
    r"(^|/)(attend|dot_product_attention\w*|flash_attention\w*|sdpa|scaled_dot_product\w*)(/|$)"
)
_DEQUANTISE = re.compile(r"dequant|kdequantize|nf4|unpack_4bit|decode_blockwise", re.IGNORECASE)
_MOE = re.compile(
    r"(^|[/_.])(moe|router|routing|ragged_dot|grouped_matmul|experts?|permute_tokens)([/_.]|$)", re.IGNORECASE
)
_COLLECTIVE = re.compile(
    r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all|collective[-_]?permute", re.IGNORECASE
)
_LOSS = re.compile(r"loss|cross_?entropy|log_?softmax|nll", re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"(^|[/_.])(optimizer|optim|adamw?|adafactor|lion|muon|clip_grad\w*|apply_updates)([/_.]|$)", re.IGNORECASE
)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply|FusedAdam|adam|LpNormFunctor|kOptimizer", re.I)
_DEVICE_COPY = re.compile(
    r"^(copy|transpose|loop_copy|wrapped_copy|wrapped_transpose|input_transpose|wrapped_bitcast|"
    r"loop_transpose|loop_slice|loop_dynamic_update_slice|loop_dynamic_slice|"
    r"loop_pad|loop_broadcast|wrapped_broadcast)",
    re.I,
)


def is_collective(name: str) -> bool:
    """Whether the name of a kernel, or the opcode of an instruction, is that of a collective, such as NCCL's
    all-reduce. The reader of XPlane files (xplane.py) gives such events the kind "collective". That of Chrome traces
    does not ask it; `categorise` searches for the same pattern itself."""
    return bool(_COLLECTIVE.search(name))


def categorise(kind: str, kernel: str, scope: str, *, is_gemm: bool | None = None, target: str = "") -> str:
    """The category of an event, one of CATEGORIES, such as "GEMM", "attention" or "loss". Both readers of traces call
    it. The report sums times by category, and `losses` decides by it what could be saved.

    The first that fits is taken: copies over the host link and collectives, attention, dequantising, experts, products,
    the loss, the optimizer, copies within the device (also fusions that transpose, slice or broadcast) and memsets; all
    others are "elementwise and norms". So a product is "GEMM" in the loss as in a layer, and frameworks that divide
    their work differently can be compared. A product in a scope of attention, dequantising or experts, however, has
    that category.

    Args:
      kind: the event's kind, one of those in trace.py, such as "kernel" or "to_host".
      kernel: its kernel's name.
      scope: its named scope; "" if it has none.
      is_gemm: whether it is a matrix product, as its instruction or operator tells: True or False; None: the kernel's
        name decides.
      target: the custom call's target, where there is one; else "".
    """
    if kind == TO_HOST:
        return "copies to host"
    if kind == TO_DEVICE:
        return "copies to device"
    if kind == COLLECTIVE or _COLLECTIVE.search(kernel):
        return "collectives"
    if "fmha" in target or _ATTENTION_SCOPE.search(scope) or _ATTENTION_KERNEL.search(kernel):
        return "attention"
    if _DEQUANTISE.search(kernel) or _DEQUANTISE.search(scope):
        return "dequantise"
    if _MOE.search(scope) or _MOE.search(kernel):
        return "MoE"
    if is_gemm or (is_gemm is None and _GEMM_KERNEL.search(kernel)):
        return "GEMM"
    if _LOSS.search(scope) or _LOSS.search(kernel):
        return "loss"
    if _OPTIMIZER.search(scope) or _OPTIMIZER_KERNEL.search(kernel):
        return "optimizer"
    if kind in (COPY, MEMSET) or _DEVICE_COPY.search(kernel):
        return "device copies"
    return "elementwise and norms"


def is_gemm_kernel(name: str) -> bool:
    """Whether a kernel's name is that of a matrix product of a library (cuBLAS, CUTLASS and the like) or of XLA. Where
    the trace names no instruction for such a kernel, `join` (launches.py) looks for its instruction among products.
    Nothing else calls it: `categorise` searches for the same pattern itself."""
    return bool(_GEMM_KERNEL.search(name))


def is_attention_kernel(name: str) -> bool:
    """Whether a kernel's name is that of an attention kernel, such as one of cuDNN or FlashAttention. Where the trace
    names no instruction for such a kernel, `join` (launches.py) looks for its instruction among attention calls. It
    recognises helper kernels of attention by it too. `categorise` searches for the same pattern itself."""
    return bool(_ATTENTION_KERNEL.search(name))


def readable(kernel: str) -> str:
    """Shortens a kernel's name for a table: everything in angle brackets or parentheses, such as C++ template arguments
    and the argument list, and "void " at the start are cut off. A name of which at most 8 characters would be left
    keeps its first 100 characters after "void " instead; the name of a copy or memset is kept. Calls with equal
    shortened names share a row in the table of kernels if category, scope, phase and shape are equal too. The timeline
    and the list of waits shorten names so too."""
    if kernel.startswith("Mem"):  # "Memcpy HtoD (Pinned -> Device)"
        return kernel
    name = kernel.removeprefix("void ")
    depth, out = 0, ""
    for char in name:
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth -= 1
        elif depth == 0:
            out += char
    out = out.strip()
    return out if len(out) > 8 or out == name else name[:100]
