"""What is measured, by name: steps (arguments of train/step.py), and parts that have a script of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """title: in a record of two commits. arguments: of step.py; {folder} in them is an empty folder of the run's own.

    steps: of which all but the first and the last are timed, after three that are not.
    """

    title: str
    arguments: str
    steps: int = 8


def _of_experts(title: str, arguments: str) -> dict[str, Step]:
    """A model of experts in a step of 8 x 2,048 tokens; packed, in 4,096 and 65,536."""
    shapes = {
        "": ("8 x 2,048", "--rows 8"),
        "_packed_4k": ("packed, 2 x 2,048", "--rows 2 --documents packed"),
        "_packed_65k": ("packed, 32 x 2,048", "--rows 32 --documents packed"),
    }
    name, budget = title.split(": ")
    return {
        end: Step(f"{name}, {words}, {budget}", f"{arguments} {shape} --plan auto")
        for end, (words, shape) in shapes.items()
    }


# Models of experts are held under the peak memory that Unsloth takes for them; the planner chooses all else.
_EXPERTS = {
    "gpt_oss": _of_experts("gpt-oss-20b bf16: planned for 50.9 GB", "--shape gpt-oss-20b --budget-gb 50.9"),
    "gpt_oss_nf4": _of_experts(
        "gpt-oss-20b nf4: planned for 24.2 GB", "--shape gpt-oss-20b --budget-gb 24.2 --load-in nf4"
    ),
    "qwen3_moe": _of_experts(
        "qwen3-30b-a3b bf16: planned for 75.1 GB", "--shape qwen3-30b-a3b --budget-gb 75.1 --optim adamw_8bit"
    ),
    "qwen3_moe_nf4": _of_experts(
        "qwen3-30b-a3b nf4: planned for 30.7 GB",
        "--shape qwen3-30b-a3b --budget-gb 30.7 --optim adamw_8bit --load-in nf4",
    ),
}
STEPS = {
    "8b": Step("llama-3.1-8b bf16, 8 x 2,048, everything kept", "--shape llama-3.1-8b"),
    "8b_nf4": Step("llama-3.1-8b nf4, 8 x 2,048, everything kept", "--shape llama-3.1-8b --load-in nf4"),
    "8b_24gb": Step(
        "llama-3.1-8b nf4, 8 x 2,048, planned for 24 GB",
        "--shape llama-3.1-8b --load-in nf4 --plan auto --budget-gb 24",
    ),
    "8b_packed": Step("llama-3.1-8b bf16, packed, 8 x 2,048", "--shape llama-3.1-8b --documents packed"),
    "8b_long": Step("llama-3.1-8b bf16, 2 x 8,192, everything kept", "--shape llama-3.1-8b --rows 2 --length 8192"),
    # One chosen and one rejected document of 1,024 tokens a row, beside SFT over the same rows.
    **{
        f"8b_{objective}": Step(
            f"llama-3.1-8b bf16, {objective}, 8 x 2 x 1,024, everything kept",
            f"--shape llama-3.1-8b --documents pairs --objective {objective}",
        )
        for objective in ("sft", "dpo", "dpo_precomputed")
    },
    "8b_nf4_parts": Step(
        "llama-3.1-8b nf4, 8 x 2,048, profiled", "--shape llama-3.1-8b --load-in nf4 --profile {folder}", steps=4
    ),
    "8b_fp8": Step(
        "llama-3.1-8b fp8 by rows, products in fp8, 8 x 2,048, everything kept",
        "--shape llama-3.1-8b --load-in fp8 --compute fp8",
    ),
    "8b_fp8_blocks": Step(
        "llama-3.1-8b fp8 of 128 x 128, products in fp8, 8 x 2,048, everything kept",
        "--shape llama-3.1-8b --load-in fp8 --compute fp8 --scales blocks",
    ),
    "8b_fp8_residuals": Step(
        "llama-3.1-8b fp8 by rows, products in fp8, 8 x 2,048, everything kept, gate and up in fp8",
        "--shape llama-3.1-8b --load-in fp8 --compute fp8 --plan fp8",
    ),
    "32b_nf4": Step(
        "qwen3-32b nf4, 4 x 2,048, everything recomputed",
        "--shape qwen3-32b --load-in nf4 --rows 4 --micro-batches 4 --plan recompute",
        steps=5,
    ),
    # The planner chooses, as a model's 16-bit residuals take more than there is.
    "qwen35_9b": Step("qwen3.5-9b bf16, 8 x 2,048, planned", "--shape qwen3.5-9b --plan auto"),
    "qwen35_9b_packed": Step(
        "qwen3.5-9b bf16, packed, 8 x 2,048, planned", "--shape qwen3.5-9b --plan auto --documents packed"
    ),
    "qwen35_9b_nf4": Step(
        "qwen3.5-9b nf4, 8 x 2,048, planned for 16 GB",
        "--shape qwen3.5-9b --load-in nf4 --plan auto --budget-gb 16",
    ),
    "qwen35_27b_nf4": Step(
        "qwen3.5-27b nf4, 8 x 2,048, planned for 32 GB",
        "--shape qwen3.5-27b --load-in nf4 --plan auto --budget-gb 32",
        steps=5,
    ),
    "qwen35_35b": Step(
        "qwen3.5-35b-a3b bf16, 8 x 2,048, planned for 100 GB",
        "--shape qwen3.5-35b-a3b --plan auto --budget-gb 100 --optim adamw_8bit",
    ),
    "qwen35_35b_nf4": Step(
        "qwen3.5-35b-a3b nf4, 8 x 2,048, planned for 36 GB",
        "--shape qwen3.5-35b-a3b --load-in nf4 --plan auto --budget-gb 36 --optim adamw_8bit",
    ),
    "gpt_oss_kept": Step(
        "gpt-oss-20b bf16, 8 x 2,048, everything kept", "--shape gpt-oss-20b --plan keep --micro-batches 2", steps=5
    ),
    # Their peaks are held against bf16's. Of 30 GB of codes the allocator may lose more than the planner counts.
    "gpt_oss_fp8": Step(
        "gpt-oss-20b fp8 by rows, products in fp8, 8 x 2,048, planned for 50.9 GB",
        "--shape gpt-oss-20b --budget-gb 50.9 --load-in fp8 --compute fp8 --plan auto",
    ),
    "qwen3_moe_fp8": Step(
        "qwen3-30b-a3b fp8 by rows, products in fp8, 8 x 2,048, planned for 73.5 GB",
        "--shape qwen3-30b-a3b --budget-gb 73.5 --optim adamw_8bit --load-in fp8 --compute fp8 --plan auto",
    ),
    "qwen3_moe_fp8_blocks": Step(
        "qwen3-30b-a3b fp8 of 128 x 128, products in fp8, 8 x 2,048, planned for 73.5 GB",
        "--shape qwen3-30b-a3b --budget-gb 73.5 --optim adamw_8bit --load-in fp8 --compute fp8 --scales blocks "
        "--plan auto",
    ),
    **{name + end: step for name, steps in _EXPERTS.items() for end, step in steps.items()},
}
# What a change that may cost speed is held against.
COMPARED = ("8b", "8b_nf4", "8b_24gb", "8b_packed", "gpt_oss", "qwen3_moe")


@dataclass(frozen=True)
class Part:
    """A script: its arguments, in which {folder} is where records go, and the seconds that it may take."""

    arguments: str
    seconds: float


_ABLATION = "benchmarks/train/ablation.py --output {folder}/ablation.json --model "
_MEMORY = "benchmarks/train/memory.py --output {folder}/memory.json --cases "
PARTS = {
    "startup": Part("benchmarks/train/startup.py --output {folder}/startup_8b.json", 240),
    **{
        f"ablation_{model}": Part(_ABLATION + model, 300)
        for model in ("llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "gpt-oss-20b")
    },
    "attention": Part("benchmarks/kernels/attention.py --output {folder}/attention.json", 220),
    "quant_matmul": Part("benchmarks/kernels/quant_matmul.py --output {folder}/quant_matmul.json", 150),
    "moe": Part("benchmarks/kernels/moe.py --output {folder}/moe.json", 600),
    "fp8": Part("benchmarks/kernels/fp8.py --output {folder}/fp8.json", 300),
    "mesh": Part("benchmarks/train/mesh.py --output {folder}/mesh_2.json", 580),  # needs two GPUs
    # Each adds its cases to one file.
    "memory": Part(
        _MEMORY + "kept,recompute,inputs_offloaded,inputs_serial,24gb,24gb_one,16gb,16gb_one,10.8gb", 600
    ),
    "memory_transfers": Part(_MEMORY + "link_bound,compile,document_recompute,document,3b", 600),
    "memory_sizes": Part(
        _MEMORY + "14b_recompute,14b_offloaded,14b_serial,32b_recompute,32b_offloaded,32b_serial,1b_full", 600
    ),
    "memory_full": Part(_MEMORY + "full_8b,full_8b_kept,full_8b_states_on_host", 500),
}  # fmt: skip
