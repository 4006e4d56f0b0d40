"""Names to scopes, phases and categories: names as JAX, XLA, cuDNN, cuBLAS, Triton and ATen write them."""

from __future__ import annotations

import pytest

from jaxtune.profile.scopes import categorise, scope_of, short_name
from jaxtune.profile.trace import COLLECTIVE, COPY, KERNEL, TO_DEVICE, TO_HOST


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("jit(accumulate)/jvp(jit(layer_forward))/layer/project/dot_general", "layer/project", "forward"),
        (
            "jit(accumulate)/transpose(jvp(jit(layer_backward)))/layer/backward/jvp(contract)/mul",
            "layer/contract",
            "backward",
        ),
        (
            "jit(accumulate)/transpose(jvp(jit(layer_backward)))/layer/recompute/expand/dot_general",
            "layer/expand",
            "recompute",
        ),
        (
            "jit(accumulate)/transpose(jvp(jit(layer_backward)))/layer/backward/transpose(layer)/recompute/jvp(expand)/mul",
            "layer/expand",
            "backward",
        ),
        ("jit(f)/jvp(loss)/while/body/eval_jaxpr/btd,vd->btv/dot_general", "loss", "forward"),
        ("jit(step)/transpose(jvp(checkpoint))/rematted_computation/mlp/tanh", "mlp", "recompute"),
        ("jit(step)/transpose(jvp(mlp))/dot_general", "mlp", "backward"),
        ("jit(step)/mul", "", "forward"),
        ("jit(f)/layer/jvp(layer)/up/mul", "layer/up", "forward"),
        ("jit(f)/layer/contract/jvp(layer)/contract/down_proj/mul", "layer/contract/down_proj", "forward"),
        ("jit(f)/a/b/c/transpose(a)/b/c/mul", "a/b/c", "backward"),
        ("jit(f)/a/b/a/c/mul", "a/b/a/c", "forward"),
        ("", "", ""),
    ],
)
def test_scope_and_phase(op_name, scope, phase):
    assert scope_of(op_name) == (scope, phase)


@pytest.mark.parametrize(
    ("kind", "kernel", "scope", "category"),
    [
        (KERNEL, "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "layer/expand", "GEMM"),
        (KERNEL, "nvjet_sm90_tst_128x232", "loss", "GEMM"),
        (KERNEL, "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128>(Params)", "", "GEMM"),
        (KERNEL, "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", "", "GEMM"),
        (KERNEL, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "layer/attend", "attention"),
        (KERNEL, "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "", "attention"),
        (KERNEL, "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>(P)", "", "attention"),
        (KERNEL, "loop_select_fusion_32", "layer/attend", "attention"),
        (KERNEL, "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 1>(float*)", "", "dequantise"),
        (KERNEL, "loop_multiply_fusion", "layer/moe/router", "MoE"),
        (KERNEL, "ragged_dot_kernel", "layer/experts", "MoE"),
        (KERNEL, "loop_multiply_fusion", "layer/contract/experts", "MoE"),
        (KERNEL, "grouped_matmul_mosaic_gpu_kernel", "layer/expand/experts/grouped_matmul", "MoE"),
        (KERNEL, "grouped_matmul_mosaic_gpu_kernel", "", "MoE"),
        (KERNEL, "expert_sums_mosaic_gpu_kernel", "", "MoE"),
        (KERNEL, "expert_weight_gradient_mosaic_gpu_kernel", "", "MoE"),
        (KERNEL, "small_matmul_mosaic_gpu_kernel", "layer/expand/small_matmul", "GEMM"),
        (KERNEL, "attention_query_mosaic_gpu_kernel", "", "attention"),
        (KERNEL, "adam8_mosaic_gpu_kernel", "", "optimizer"),
        (KERNEL, "loop_add_fusion_3", "optimizer", "optimizer"),
        (KERNEL, "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>(T)", "", "optimizer"),
        (KERNEL, "input_reduce_fusion_1", "loss", "loss"),
        (KERNEL, "_cross_entropy_forward", "", "loss"),
        (KERNEL, "_rms_layernorm_forward", "", "elementwise and norms"),
        (KERNEL, "loop_add_multiply_fusion_33", "layer/contract", "elementwise and norms"),
        (KERNEL, "memset_or_so", "", "elementwise and norms"),
        (COPY, "MemcpyD2D", "", "device copies"),
        (KERNEL, "loop_transpose_fusion", "", "device copies"),
        (TO_DEVICE, "MemcpyH2D", "layer/expand", "copies to device"),
        (TO_HOST, "MemcpyD2H", "", "copies to host"),
        (COLLECTIVE, "whatever", "", "collectives"),
        (KERNEL, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "", "collectives"),
    ],
)
def test_category(kind, kernel, scope, category):
    assert categorise(kind, kernel, scope) == category


def test_what_the_hlo_says_wins_over_the_name():
    assert categorise(KERNEL, "loop_fusion_7", "mlp", is_gemm=True) == "GEMM"
    assert categorise(KERNEL, "gemm_epilogue", "mlp", is_gemm=False) == "elementwise and norms"
    assert categorise(KERNEL, "kernel_of_ours", "", target="__cudnn$fmhaSoftmax") == "attention"


def test_readable_cuts_cpp():
    assert short_name("void at::native::vectorized_elementwise_kernel<4, F<int>>(int, F)") == (
        "at::native::vectorized_elementwise_kernel"
    )
    assert short_name("loop_add_fusion_3") == "loop_add_fusion_3"
