"""XLA's options for the programs of generation: those of the sampler (`sampler_options`, and `prompt_options` for the
programs that compute prompts), and those of the forward pass by which answers are scored (AS_TRAINED). 16-bit numbers
are rounded wherever a program makes them, as in a training step (train/program/xla_options.py); XLA would otherwise
leave out roundings within a fusion, others in a decoding step than in training. Then log-probabilities of sampled
tokens differ more from those of training."""

from __future__ import annotations

from jaxtune.models.placement.transfers import NO_REMATERIALIZATION

_ROUNDING: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}
# With these, every process computes the same bits on a GPU.
_SAME_CHOICES: dict[str, bool | int | str] = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
# Of training_logprobs: as a training step with `deterministic`, whose products are all computed by cuBLASLt.
AS_TRAINED = {"xla_gpu_enable_triton_gemm": False, **_ROUNDING, **_SAME_CHOICES}


def sampler_options(same_choices: bool, many_rows: bool) -> dict[str, bool | int | str]:
    """XLA options, {name: value}, with which slots.programs compiles the sampler's programs, except those that
    compute prompts.

    Args:
      same_choices: True (a sampler with `deterministic`, on a GPU): every process must compute the same bits, so
        operations are deterministic, and the first algorithms of the vendor libraries (such as cuBLAS) are taken.
        False: those are taken that are fastest when timed, which can differ between processes.
      many_rows: whether more rows decode in one batch than the kernels of few_rows multiply (MOST_ROWS). XLA then
        multiplies them, and must not merge the products of query, key and value into one: that one has no kernel of the
        vendor's, and separate ones make a decoding step of Llama-3.1-8B with 256 rows 4.5 % faster on an H200. Nor may
        it take Triton's products where they are faster alone: without them such a step was 1.3 % faster (one run).
    """
    options = {**NO_REMATERIALIZATION, **_ROUNDING}
    if same_choices:
        options |= _SAME_CHOICES
    if many_rows:
        options |= {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}
    return options


def prompt_options(same_choices: bool) -> dict[str, bool | int | str]:
    """XLA options, {name: value}, with which slots.programs compiles the programs that compute the states of prompts.

    As in a training step every product is computed by cuBLASLt, which adds the residual stream in its epilogue; with
    Triton's products XLA has kernels of their own for that, and for the norms' products with their weights. The
    products of query, key and value are not merged, because XLA would put their weights side by side for each chunk of
    a prompt. So 128 prompts of 200 tokens take Llama-3.1-8B 6 % less time on an H200.

    same_choices: as for sampler_options.
    """
    own: dict[str, bool | int | str] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return {**sampler_options(same_choices, many_rows=False), **own}
