"""What names in a trace mean: scopes, phases and categories."""

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
    """(scope, phase) of an HLO instruction's op_name.

    "jit(step)/transpose(jvp(layer))/mlp/dot_general" has the scope "layer/mlp": transformations wrap scopes, and the
    last part is the primitive. Names of jitted functions, loops, phases and einsum formulas are left out, and a path
    that repeats at once, because a transformation entered it again, is written once. The phase is "recompute" in the
    second run of jax.checkpoint or a scope "recompute" outside of "backward", else "backward" under a transpose or a
    scope "backward".
    """
    if not op_name:
        return "", ""
    names = _split(op_name.split(";")[0])
    phase, out = "forward", []
    for index, segment in enumerate(names[:-1]):
        name, transposed = _unwrap(segment)
        if transposed or segment == "backward":
            phase = "backward" if phase != "recompute" else phase
        if segment in ("recompute", "rematted_computation") and "backward" not in names[:index]:
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
    """The names between slashes, which do not separate within parentheses and brackets."""
    names, depth, current = [], 0, ""
    for char in path:
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            names.append(current)
            current = ""
        else:
            current += char
    return [*names, current]


def _unwrap(segment: str) -> tuple[str, bool]:
    """(the scope inside the transformations, "" for a jitted function; whether one is a transpose)."""
    transposed = False
    while match := _WRAPPER.match(segment):
        wrapper, segment = match.groups()
        transposed |= wrapper == "transpose"
        if wrapper in ("jit", "pjit", "xla_pmap", "pmap"):
            return "", transposed
    return segment, transposed


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
    """Whether a kernel's name or an opcode is a collective's."""
    return bool(_COLLECTIVE.search(name))


def categorise(kind: str, kernel: str, scope: str, *, is_gemm: bool | None = None, target: str = "") -> str:
    """The category of an event, one of CATEGORIES: the first that fits, in the order of the body.

    A product is "GEMM" in the loss as in a layer, so that frameworks that divide their work differently can be
    compared; in attention, dequantising and experts it has that category.
      kind: of trace.py, such as "to_host".
      kernel: its name in the trace.
      scope: the path of jax.named_scopes around the operation.
      is_gemm: as the instruction tells; None: the kernel's name decides.
      target: of a custom call.
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
    """Whether a kernel's name is that of a product, of a library or of XLA."""
    return bool(_GEMM_KERNEL.search(name))


def is_attention_kernel(name: str) -> bool:
    """Whether a kernel's name is that of attention, helpers included."""
    return bool(_ATTENTION_KERNEL.search(name))


def short_name(kernel: str) -> str:
    """A kernel's name for a table, without C++ templates and arguments; if few characters were left, its first 100."""
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
