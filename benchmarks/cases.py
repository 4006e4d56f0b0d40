"""What is measured, by name: steps (arguments of train/step.py), parts that have a script of their own, and sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """arguments: of step.py; {folder} in them is an empty folder of the run's own.

    steps: of which all but the first and the last are timed, after three that are not. cold: with an empty cache of
    compiled programs. beside: of an ablation, the step that has what this one is without.
    """

    arguments: str
    steps: int = 10
    cold: bool = False
    beside: str | None = None


_8B, _35, _GEMMA = "--shape llama-3.1-8b", "--shape qwen3.5-", "--shape gemma-4-"
_IN_FP8 = "--load-in fp8 --compute fp8"
# Models of experts are held under the peak memory that Unsloth takes for them; the planner chooses all else.
_EXPERTS = {
    "gpt_oss": "--shape gpt-oss-20b --budget-gb 50.9",
    "gpt_oss_nf4": "--shape gpt-oss-20b --budget-gb 24.2 --load-in nf4",
    "qwen3_moe": "--shape qwen3-30b-a3b --budget-gb 75.1 --optim adamw_8bit",
    "qwen3_moe_nf4": "--shape qwen3-30b-a3b --budget-gb 30.7 --optim adamw_8bit --load-in nf4",
}
_PARTS = "--profile {folder}"  # further steps are traced; the record says where their time goes
_RELOAD = "--plan 'recompute, layer_input=offload'"
_14B = "--shape qwen3-14b --load-in nf4 --rows 4 --documents packed --micro-batches 1"
# 8 x 2,048 tokens; packed, 4,096 and 65,536.
_TOKENS = {"": "--rows 8", "_packed_4k": "--rows 2 --documents packed", "_packed_65k": "--rows 32 --documents packed"}
STEPS = {
    "8b": Step(_8B),
    "8b_nf4": Step(f"{_8B} --load-in nf4"),
    "8b_nvfp4": Step(f"{_8B} --load-in nvfp4"),
    "8b_int8": Step(f"{_8B} --load-in int8"),
    "8b_24gb": Step(f"{_8B} --load-in nf4 --plan auto --budget-gb 24"),
    "8b_packed": Step(f"{_8B} --documents packed"),
    "8b_long": Step(f"{_8B} --rows 2 --length 8192"),
    # One chosen and one rejected document of 1,024 tokens a row, beside SFT over the same rows.
    **{
        f"8b_{objective}": Step(f"{_8B} --documents pairs --objective {objective}")
        for objective in ("sft", "dpo", "dpo_precomputed")
    },
    "8b_nf4_parts": Step(f"{_8B} --load-in nf4 {_PARTS}", steps=4),
    # Precision maps (docs/precision.md), beside 8b_nf4, which has none.
    "8b_nf4_norms": Step(f"{_8B} --load-in nf4 --precision norms=fp32"),
    "8b_nf4_mixed": Step(f"{_8B} --load-in nf4 --precision 'layers.0.*=bf16,layers.31.*=bf16,down_proj=int8'"),
    "8b_nf4_head": Step(f"{_8B} --load-in nf4 --precision lm_head=fp32"),
    "8b_fp8": Step(f"{_8B} {_IN_FP8}"),
    "8b_fp8_blocks": Step(f"{_8B} {_IN_FP8} --scales blocks"),
    "8b_fp8_r64": Step(f"{_8B} {_IN_FP8} --rank 64"),
    "8b_fp8_blocks_r64": Step(f"{_8B} {_IN_FP8} --scales blocks --rank 64"),
    "8b_fp8_residuals": Step(f"{_8B} {_IN_FP8} --plan fp8"),
    "8b_qat": Step(f"{_8B} --qat int4"),
    "8b_qat_int8_int4": Step(f"{_8B} --qat int8-int4"),
    "1b_full": Step("--shape llama-3.2-1b --rank 0"),
    "1b_full_qat": Step("--shape llama-3.2-1b --rank 0 --qat int4"),
    # Within what 12, 16 and 24 GiB cards leave, by the planner's own plan.
    "8b_10.8gb": Step(f"{_8B} --load-in nf4 --plan auto --budget-gb 10.8"),
    "8b_16gb": Step(f"{_8B} --load-in nf4 --plan auto --budget-gb 16"),
    "14b_16gb": Step("--shape qwen3-14b --load-in nf4 --plan auto --budget-gb 16"),
    "32b_25.2gb": Step("--shape qwen3-32b --load-in nf4 --plan auto --budget-gb 25.2"),
    "135m": Step("--shape smollm2-135m --rows 16 --length 512 --micro-batches 1", steps=32),
    "06b": Step("--shape qwen3-0.6b --micro-batches 1", steps=16),
    "06b_full": Step("--shape qwen3-0.6b --micro-batches 1 --rank 0", steps=16),
    "8b_full_8bit": Step(f"{_8B} --rank 0 --optim adamw_8bit --plan auto"),
    "32b_nf4": Step("--shape qwen3-32b --load-in nf4 --rows 4 --micro-batches 4 --plan recompute", steps=5),
    # All experts train, so their weights have gradients. 14 billion parameters in 16 bits, with 8-bit states.
    "qwen15_moe_full": Step("--shape qwen1.5-moe-a2.7b --rank 0 --rows 4 --optim adamw_8bit --plan auto"),
    # The planner chooses, as a model's 16-bit residuals take more than there is.
    "qwen35_9b": Step(f"{_35}9b --plan auto"),
    "qwen35_9b_packed": Step(f"{_35}9b --plan auto --documents packed"),
    "qwen35_9b_nf4": Step(f"{_35}9b --load-in nf4 --plan auto --budget-gb 16"),
    "qwen35_27b_nf4": Step(f"{_35}27b --load-in nf4 --plan auto --budget-gb 32", steps=5),
    "qwen35_35b": Step(f"{_35}35b-a3b --plan auto --budget-gb 100 --optim adamw_8bit"),
    "qwen35_35b_kept": Step(f"{_35}35b-a3b --micro-batches 1 --optim adamw_8bit {_PARTS}"),
    "qwen35_35b_nf4": Step(f"{_35}35b-a3b --load-in nf4 --plan auto --budget-gb 36 --optim adamw_8bit"),
    "gemma4_e4b": Step(f"{_GEMMA}e4b --plan auto --budget-gb 24", steps=5),
    # Fits because the plan has the table of per-layer embeddings in host memory.
    "gemma4_e4b_16gb": Step(f"{_GEMMA}e4b --plan auto --budget-gb 17.18", steps=5),
    "gemma4_12b": Step(f"{_GEMMA}12b --plan auto", steps=5),
    "gemma4_12b_packed": Step(f"{_GEMMA}12b --plan auto --documents packed", steps=5),
    "gemma4_12b_nf4": Step(f"{_GEMMA}12b --load-in nf4 --plan auto --budget-gb 16", steps=5),
    "gemma4_26b": Step(f"{_GEMMA}26b-a4b --plan auto --optim adamw_8bit", steps=5),
    "gemma4_26b_nf4": Step(f"{_GEMMA}26b-a4b --load-in nf4 --plan auto --budget-gb 24 --optim adamw_8bit", steps=5),
    "gemma4_31b_nf4": Step(f"{_GEMMA}31b --load-in nf4 --plan auto --budget-gb 32", steps=5),
    "gpt_oss_kept": Step("--shape gpt-oss-20b --plan keep --micro-batches 2", steps=5),
    "gpt_oss_one": Step(f"--shape gpt-oss-20b --micro-batches 1 {_PARTS}"),
    "gpt_oss_fp8_one": Step(f"--shape gpt-oss-20b --micro-batches 1 {_IN_FP8} {_PARTS}"),
    # The experts stay as gpt-oss is published.
    "gpt_oss_mxfp4": Step(f"--shape gpt-oss-20b --load-in mxfp4 --plan auto --budget-gb 24 {_PARTS}"),
    "gpt_oss_120b": Step(
        f"--shape gpt-oss-120b --load-in mxfp4 --plan auto --budget-gb 115 --optim adamw_8bit {_PARTS}"
    ),
    # As it was measured first (h200_once.json).
    "qwen3_next": Step(
        "--shape qwen3-next-80b-a3b --load-in nf4 --rows 4 --documents packed --rank 8 --plan auto --optim adamw_8bit "
        + _PARTS
    ),
    "qwen3_moe_fp8_kept": Step(f"--shape qwen3-30b-a3b --micro-batches 1 --optim adamw_8bit {_IN_FP8} {_PARTS}"),
    "qwen3_moe_kept": Step("--shape qwen3-30b-a3b --plan keep --optim adamw_8bit"),
    # Their peaks are held against bf16's. Of 30 GB of codes the allocator may lose more than the planner counts.
    "gpt_oss_fp8": Step(f"--shape gpt-oss-20b --budget-gb 50.9 {_IN_FP8} --plan auto"),
    "qwen3_moe_fp8": Step(f"--shape qwen3-30b-a3b --budget-gb 73.5 --optim adamw_8bit {_IN_FP8} --plan auto"),
    "qwen3_moe_fp8_blocks": Step(
        f"--shape qwen3-30b-a3b --budget-gb 73.5 --optim adamw_8bit {_IN_FP8} --scales blocks --plan auto"
    ),
    **{
        name + end: Step(f"{arguments} {tokens} --plan auto")
        for name, arguments in _EXPERTS.items()
        for end, tokens in _TOKENS.items()
    },
    "8b_reload": Step(f"{_8B} --documents packed {_RELOAD}"),
    "8b_reload_serial": Step(f"{_8B} --documents packed {_RELOAD} --serial-transfers", beside="8b_reload"),
    "14b_reload": Step(f"{_14B} {_RELOAD}"),
    "14b_reload_serial": Step(f"{_14B} {_RELOAD} --serial-transfers", beside="14b_reload"),
}


@dataclass(frozen=True)
class Part:
    """A script: its arguments but for --output, the file of results that it makes, the seconds that it may take."""

    arguments: str
    file: str
    seconds: float


_KERNELS = {"attention": 300, "delta_rule": 200, "quant_matmul": 250, "moe": 600}  # seconds
_MEMORY = "benchmarks/train/memory.py"
PARTS = {
    "startup": Part("benchmarks/train/startup.py", "startup_8b.json", 240),
    **{name: Part(f"benchmarks/kernels/{name}.py", f"{name}.json", seconds) for name, seconds in _KERNELS.items()},
    "tuned": Part("benchmarks/train/tuned.py", "tuned.json", 560),
    "mesh": Part("benchmarks/train/mesh.py", "mesh_2.json", 580),  # needs two GPUs
    # Each adds its cases to one file.
    "memory_plans": Part(
        f"{_MEMORY} kept recompute inputs_offloaded 24gb 24gb_one 16gb 16gb_one 10.8gb", "memory.json", 600
    ),
    "memory_rows": Part(f"{_MEMORY} link_bound compile document_recompute document 3b", "memory.json", 600),
    "memory_full": Part(f"{_MEMORY} 1b_full full_8b full_8b_kept full_8b_states_on_host", "memory.json", 600),
}
# A name for several.
SETS = {
    "steps": ["8b", "8b_nf4", "8b_24gb", "8b_packed", "gpt_oss", "qwen3_moe"],  # what costs speed shows in one of them
    "kernels": list(_KERNELS),
    "memory": [name for name in PARTS if name.startswith("memory_")],
    "precision": ["8b_nf4", "8b_nf4_norms", "8b_nf4_mixed", "8b_nf4_head"],
    "qat": ["8b", "8b_qat", "8b_qat_int8_int4", "1b_full", "1b_full_qat"],
    "fp8_ranks": ["8b_fp8", "8b_fp8_r64", "8b_fp8_blocks", "8b_fp8_blocks_r64"],
    "gemma4": [name for name in STEPS if name.startswith("gemma4")],
    # Models of experts as they are kept, and models on the cards for which they are named.
    "roof": [
        *("gpt_oss_one", "gpt_oss_fp8_one", "gpt_oss_mxfp4", "gpt_oss_120b", "qwen35_35b_kept", "qwen3_moe_fp8_kept"),
        *("qwen3_next", "8b_10.8gb", "8b_16gb", "14b_16gb", "32b_25.2gb", "06b", "06b_full", "8b_full_8bit"),
    ],
    "small": ["135m"],
    # What README and docs/measured.md show of steps: a call goes on where the last one of its commit was cut off.
    "release": [
        *("8b", "8b_packed", "8b_long", "8b_fp8", "8b_nf4", "8b_nvfp4", "8b_dpo", "8b_qat", "1b_full", "8b_full_8bit"),
        *("gpt_oss_nf4", "gpt_oss_mxfp4", "qwen3_moe_kept", "qwen3_moe_fp8", "qwen35_9b", "qwen35_35b_nf4"),
        *("gemma4_12b_nf4", "135m", "06b", "8b_10.8gb", "8b_16gb", "32b_25.2gb"),
    ],
    "ablation": [name for name in STEPS if "_reload" in name],
}
