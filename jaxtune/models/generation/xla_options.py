"""XLA's options for programs of generation. 16-bit numbers are rounded wherever a program makes them, as in a training
step: XLA would leave out other roundings in decoding than in training, and log-probabilities would differ more.
"""

from __future__ import annotations

from jaxtune.models.placement.transfers import NO_REMATERIALIZATION

_ROUNDING: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}
# With these, every process computes the same bits on a GPU.
_SAME_CHOICES: dict[str, bool | int | str] = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
# Of training_logprobs: as a training step with `deterministic`, whose products are all computed by cuBLASLt.
AS_TRAINED = {"xla_gpu_enable_triton_gemm": False, **_ROUNDING, **_SAME_CHOICES}


def sampler_options(same_choices: bool, many_rows: bool) -> dict[str, bool | int | str]:
    """XLA options of the sampler's programs, other than those of prompts.

    same_choices: every process must compute the same bits, with the vendor libraries' first algorithms. Otherwise the
    fastest when timed, which can differ between processes.
    many_rows: more rows than few_rows' kernels multiply (MOST_ROWS). XLA then multiplies, and must neither merge the
    products of query, key and value, for which the vendor has no kernel (separate ones: 4.5 % faster steps of
    Llama-3.1-8B with 256 rows on an H200), nor use Triton's (1.3 %).
    """
    options = {**NO_REMATERIALIZATION, **_ROUNDING}
    if same_choices:
        options |= _SAME_CHOICES
    if many_rows:
        options |= {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}
    return options


def prompt_options(same_choices: bool) -> dict[str, bool | int | str]:
    """XLA options of programs that compute prompts. cuBLASLt computes all products and adds the residual stream in its
    epilogue; Triton's needs extra kernels. Query, key and value stay apart, because XLA would copy their weights for
    each chunk (6 % less time for 128 prompts of 200 tokens, Llama-3.1-8B, H200).
    """
    overrides: dict[str, bool | int | str] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return {**sampler_options(same_choices, many_rows=False), **overrides}
