"""TRL's own trainer tests through jaxtune.compat: none fails but those that trl_suite.csv names, with the reason."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest
import trl_suite

PACKAGE = Path(sys.prefix) / "wheels" / "trl-0.23.1.tar.gz"  # scripts/setup_env.sh
# A test of each thing that only these tests use together; some train, the others end in the trainer's making.
QUICK = " or ".join(
    ("aux_loss", "multiple_eval_dataset", "pretokenized", "tag_added", "peft_model_and_gradient", "processing_class")
    + ("init_minimal", "different_reward_model", "dft_loss", "prompt_tuning", "set_chat_template", "eval_packing")
)
# DPO's, KTO's and the reward trainer's tests of that version are of methods that TRL no longer has.
FILES = ("test_sft_trainer.py", "test_grpo_trainer.py", "test_rloo_trainer.py")


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("not vlm", marks=pytest.mark.full)], ids=["some", "all"])
def test_none_fails_without_a_reason(tmp_path, chosen):
    with tarfile.open(PACKAGE) as package:
        package.extractall(tmp_path / "package", filter="data")
    work = tmp_path / "work"
    work.mkdir()
    files = trl_suite.prepare(tmp_path / "package" / "trl-0.23.1" / "tests", work)
    found = trl_suite.outcomes([file for file in files if file.name in FILES], "-k", chosen)
    assert sum(state == "passed" for state, _ in found.values()) >= (12 if chosen == QUICK else 70)
    failed = {test: message for test, (state, message) in found.items() if state == "failed"}
    assert not {test: message for test, message in failed.items() if trl_suite.refused(test) is None}
