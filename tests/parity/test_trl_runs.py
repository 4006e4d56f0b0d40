"""Short runs of TRL's trainers beside jaxtune.compat's, with the same arguments: what both log."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
import trl
import trl_stand_ins
from trl_stand_ins import Hub, model_folder

from jaxtune import compat
from jaxtune.compat.reward_models import RewardModel

ZEN = "trl-internal-testing/zen"
TOLERANCE = 1e-5
_SPEEDS = ("runtime", "per_second", "learning_rate", "step", "total_flos", "num_tokens", "epoch")


def logged(name: str, module, folder, config: str, model: str, evaluated: bool = False, ref: str | None = None, **args):
    """[line of the log] of two steps of the trainer `name` of `module`."""
    data = Hub.load_dataset(ZEN, config)
    args |= {"eval_strategy": "steps", "eval_steps": 2} if evaluated else {}
    settings = getattr(module, f"{name}Config")(
        output_dir=str(folder),
        report_to="none",
        max_steps=2,
        logging_steps=1,
        bf16=False,
        save_strategy="no",
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        **args,
    )
    more = {}
    if ref is not None:
        auto = compat if module is compat else transformers
        more["ref_model"] = auto.AutoModelForCausalLM.from_pretrained(model_folder(ref), dtype="float32")
    if evaluated:
        more["eval_dataset"] = {"one": data["test"], "two": data["train"].select(range(3))}
    trainer = getattr(module, f"{name}Trainer")(
        model=model_folder(model), args=settings, train_dataset=data["train"], **more
    )
    trainer.train()
    return trainer.state.log_history


RUNS = {
    "experts": ("SFT", "standard_language_modeling", "tiny-Qwen3MoeForCausalLM", {}),
    "sets": ("SFT", "standard_prompt_completion", "tiny-Qwen2ForCausalLM-2.5", dict(evaluated=True)),
    "a reference": (
        "DPO",
        "standard_preference",
        "tiny-Qwen2ForCausalLM-2.5",
        dict(ref="trl-internal-testing/other-Qwen2ForCausalLM", evaluated=True),
    ),
    "experts in pairs": ("DPO", "conversational_preference", "tiny-Qwen3MoeForCausalLM", {}),
    "pairs as labelled rows": ("KTO", "standard_implicit_prompt_preference", "tiny-Qwen2ForCausalLM-2.5", {}),
    "apo": ("KTO", "standard_unpaired_preference", "tiny-Qwen2ForCausalLM-2.5", dict(loss_type="apo_zero_unpaired")),
}


@pytest.mark.parametrize("case", RUNS)
def test_both_log_the_same(tmp_path, case):
    name, config, model, options = RUNS[case]
    model = f"trl-internal-testing/{model}"
    theirs = logged(name, trl, tmp_path / "theirs", config, model, use_cpu=True, **options)
    ours = logged(name, compat, tmp_path / "ours", config, model, **options)
    assert len(ours) == len(theirs)
    shared = set()
    for line, wanted in zip(ours, theirs, strict=True):
        names = [key for key in line.keys() & wanted.keys() if not key.endswith(_SPEEDS)]
        shared |= set(names)
        for key in names:
            np.testing.assert_allclose(line[key], wanted[key], rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)
    assert shared >= {"loss", "grad_norm", "train_loss"}
    assert ("aux_loss" in shared) == ("Moe" in model)
    assert not options.get("evaluated") or shared >= {"eval_one_loss", "eval_two_loss"}


def test_a_reward_models_scores(tmp_path):
    """Of texts of several lengths, and of conversations by the reward model's template."""
    folder = model_folder("trl-internal-testing/tiny-LlamaForSequenceClassification-3.2")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = RewardModel(compat.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32"))
    rows = [trl_stand_ins._turns("preference", index) for index in range(9)]
    for prompts, answers in (
        ([f"One is {'better ' * index}" for index in range(11)], ["than two."] * 11),
        ([row["prompt"] for row in rows], [row["chosen"] for row in rows]),
    ):
        texts = [
            prompt + answer
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        batch.pop("token_type_ids", None)
        with torch.no_grad():
            wanted = theirs(**batch).logits[:, 0].numpy()
        np.testing.assert_allclose(ours(prompts, answers), wanted, rtol=TOLERANCE, atol=TOLERANCE)
