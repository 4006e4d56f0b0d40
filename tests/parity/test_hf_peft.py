"""What benchmarks/train/hf_peft.py runs of transformers, PEFT and bitsandbytes, on tiny models of the same families."""

import time

from benchmarks.shapes import SHAPES
from benchmarks.train.hf_peft import THEIRS, in_processes

TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=32, vocab_size=512,
)  # fmt: skip


def test_their_cases_train_and_one_that_fails_says_why():
    shapes = {
        "hf_8b_nf4": SHAPES["llama-3.1-8b"] | TINY,
        "hf_8b": SHAPES["llama-3.1-8b"] | TINY | {"rms_norm_eps": "no number"},
        "hf_gpt_oss": SHAPES["gpt-oss-20b"] | TINY | {"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    todo = [(THEIRS[name], shape, 2, 32, 1) for name, shape in shapes.items()]
    four_bit, failed, experts = in_processes(todo, time.monotonic() + 3600)
    assert "rms_norm_eps" in failed["failed"]
    for found in (four_bit, experts):
        assert "failed" not in found and len(found["losses"]) == 3 and found["rows_at_once"] == 2
    linears = 2 * (4 * (64 + 64) + 3 * (64 + 128))
    assert four_bit["trained_parameters"] == 16 * linears
    assert experts["trained_parameters"] > 16 * 2 * 4 * (64 + 64)  # attention's, and the experts' beside them
