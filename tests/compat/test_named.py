"""Models that a trainer loads by name: positions and dtype are those of TRL; and what a run says at its end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxtune import compat
from jaxtune.compat import (
    AutoModelForCausalLM,
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    LoraConfig,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    TrainerCallback,
)
from tests.test_compat import folder, rows  # noqa: F401

PAIRS = [{"prompt": "Name a colour of the sky. ", "chosen": "blue it is", "rejected": "it is four"}] * 4
ANSWERS = {"It is blue.": True, "four": False, "I am blue.": True, "a bot": False}
LABELLED = [{"prompt": "Name a colour. ", "completion": answer, "label": label} for answer, label in ANSWERS.items()]
PROMPTS = [{"prompt": "Name a colour."}] * 4
TEXTS = [{"text": "I am a bot."}] * 4
ALL = {
    "sft": (SFTTrainer, SFTConfig, TEXTS, {}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {}),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, {}),
    "kto": (KTOTrainer, KTOConfig, LABELLED, {}),
    "reward": (RewardTrainer, RewardConfig, PAIRS, {}),
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS, {"reward_funcs": len}),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS, {"reward_funcs": len}),
    "distillation": (DistillationTrainer, DistillationConfig, rows(4), {"teacher_model": "folder"}),
    "gkd": (GKDTrainer, GKDConfig, rows(4), {"teacher_model": "folder"}),
}
LIMITS = ({}, {"max_length": 64}, {"max_length": 4096}, {"max_seq_length": 2048})
SAMPLED = ("grpo", "rloo", "distillation")


def made(kind, model, tmp_path, peft=False, data=None, **settings):
    trainer, config, dataset, others = ALL[kind]
    others = {name: model if value == "folder" else value for name, value in others.items()}
    args = config(output_dir=str(tmp_path / "run"), report_to="none", save_strategy="no", **settings)
    if peft:
        others["peft_config"] = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    return trainer(model=model, args=args, train_dataset=data or dataset, **others)


@pytest.mark.parametrize("kind", ALL)
def test_limits_of_rows_scale_no_positions(folder, tmp_path, kind, capsys):  # noqa: F811
    longer = ({"max_completion_length": 4096},) if kind in SAMPLED else ()
    for limits in (*LIMITS, *longer):
        trainer = made(kind, folder, tmp_path, peft=kind == "sft" and not limits, **limits)
        config = trainer.model.module.config
        assert {rope.kind for rope in config.rotary} == {"default"} and config.context_length == 256, limits
        assert trainer.model.module.dtype == "float32"
    assert "scaled linearly" not in capsys.readouterr().out


def test_a_row_that_needs_more_positions_is_named(folder, tmp_path):  # noqa: F811
    long = [{"text": "I am a bot. " * 200}]
    with pytest.raises(ValueError, match=r"max_length = 1024.*at most 256 positions.*rope_scaling"):
        made("sft", folder, tmp_path, data=long, max_length=1024).train()
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    trainer = made("sft", folder, tmp_path, data=long, max_length=1024, model_init_kwargs=scaled)
    assert trainer.model.module.config.context_length == 2048 and trainer.config(prepared=False).data.length == 1024


@pytest.mark.parametrize("kind", SAMPLED)
def test_sampled_rows_have_room_for_a_prompt_and_an_answer(folder, tmp_path, kind):  # noqa: F811
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 16.0}}
    trainer = made(kind, folder, tmp_path, max_completion_length=1500, model_init_kwargs=scaled)
    assert trainer.config(prepared=False).data.length == 512 + 1500


def test_the_dtype_of_a_model_without_one(folder, tmp_path):  # noqa: F811
    """TRL's trainers load by name in float32; transformers' classes take the files' dtype."""
    by_name = {None: "float32", "auto": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"}
    for dtype, expected in by_name.items():
        given = {} if dtype is None else {"model_init_kwargs": {"dtype": dtype}}
        assert made("sft", folder, tmp_path, **given).model.module.dtype == expected
    assert made("sft", folder, tmp_path, model_init_kwargs={"torch_dtype": "float16"}).model.module.dtype == "float16"
    four_bit = made("sft", folder, tmp_path, peft=True, model_init_kwargs={"load_in_4bit": True})
    assert four_bit.model.module.dtype == "bfloat16"
    for stored in ("bfloat16", "float16", "float32"):
        path = tmp_path / stored
        AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(path)
        assert json.loads((path / "config.json").read_text()).get("torch_dtype") == stored
        for file in Path(folder).glob("*token*"):
            (path / file.name).write_bytes(file.read_bytes())
        assert AutoModelForCausalLM.from_pretrained(path).module.dtype == stored
        assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").module.dtype == stored


def test_what_a_name_trains_is_whole_and_float32(folder, tmp_path):  # noqa: F811
    class Seen(TrainerCallback):
        logs: list

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append((dict(logs), len(state.log_history)))

        def on_train_end(self, args, state, control, **kwargs):
            self.logs.append("end")

    Seen.logs = []
    trainer = made("sft", folder, tmp_path, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-5)
    trainer.add_callback(Seen())
    output = trainer.train()
    closing = trainer.state.log_history[-1]
    assert closing == {"step": 2, **output.metrics} and closing["train_loss"] == output.training_loss
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second", "epoch"} <= closing.keys()
    assert [line.get("loss") for line in trainer.state.log_history[:-1]] == [
        line["loss"] for line in trainer.state.log_history if "loss" in line
    ]
    assert Seen.logs[-2:] == [(output.metrics, 3), "end"]
    before, after = load_file(f"{folder}/model.safetensors"), load_file(tmp_path / "run/checkpoint-2/model.safetensors")
    assert {str(array.dtype) for array in after.values()} == {"float32"}
    changed = {name for name in after if not np.array_equal(after[name], np.float32(before[name]))}
    assert changed == after.keys()


@pytest.mark.parametrize("kind", ["dpo", "orpo", "reward"])
def test_texts_without_a_common_beginning_train(folder, tmp_path, kind):  # noqa: F811
    """Alone, or among pairs that have a prompt; as they are, whatever chat template the tokenizer has."""
    whole = [{"chosen": "Yes, it is.", "rejected": "Never."}, {"chosen": "Work beats talk.", "rejected": "Work is"}]
    trainer = made(kind, folder, tmp_path, data=whole * 2, max_steps=1)
    ids = [row[column] for row in trainer.train_dataset for column in ("chosen_ids", "rejected_ids")]
    texts = trainer.tokenizer.batch_decode(ids[:4])
    said = [row[side] for row in whole for side in ("chosen", "rejected")]
    assert [text.replace(trainer.tokenizer.eos_token, "") for text in texts] == said
    assert np.isfinite(trainer.train().training_loss)
    mixed = [{"prompt": None, **row} for row in whole] + PAIRS[:2]
    assert len(made(kind, folder, tmp_path, data=mixed).train_dataset) == 4


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("peft", [False, True])
def test_preferences_are_evaluated_before_they_train(folder, tmp_path, kind, peft):  # noqa: F811
    """Until the first step the model is its reference; another set may be evaluated, and again after training."""
    trainer_class, config, data, _ = ALL[kind]
    args = config(
        output_dir=str(tmp_path / "run"), report_to="none", save_strategy="no", max_steps=2, learning_rate=1e-3
    )
    peft_config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]) if peft else None
    trainer = trainer_class(folder, args, data, eval_dataset=data[:2], peft_config=peft_config)
    start = 0.5 if kind == "kto" else float(np.log(2.0))
    others = [dict(row, prompt="Who are you? ") for row in data[:2]]
    for evaluated in (None, others):
        assert trainer.evaluate(evaluated)["eval_loss"] == pytest.approx(start, abs=2e-3)
    trainer.train()
    for evaluated in (None, others):
        assert np.isfinite(trainer.evaluate(evaluated)["eval_loss"])
    moved = trainer.evaluate()["eval_loss"]
    assert abs(moved - start) > 1e-5
    unseen = [dict(row, prompt="The sum of two and two? ") for row in data[:2]]
    if peft:
        trainer.evaluate(unseen)
    else:
        with pytest.raises(ValueError, match="are not stored any more"):
            trainer.evaluate(unseen)


def test_names_of_unsloth_that_change_nothing():
    class Trainer:
        def train(self, *arguments, **others):
            return arguments, others

    assert compat.is_bf16_supported is compat.is_bfloat16_supported
    assert compat.PatchFastRL("GRPO", compat.FastLanguageModel) is None
    assert compat.unsloth_train(Trainer(), True, resume_from_checkpoint=None) == (
        (True,),
        {"resume_from_checkpoint": None},
    )


@given(st.sampled_from(compat.__all__), st.integers(0, 40), st.sampled_from("qz_"))
def test_a_mistyped_name_is_told_and_no_other_meaning(name, place, letter):
    """One letter more finds the name; a name of something else names only what is of its kind."""
    mistyped = name[: place % len(name)] + letter + name[place % len(name) :]
    if mistyped in compat.__all__ or len(name) < 8 or mistyped.startswith("__"):
        return
    with pytest.raises(ImportError, match="perhaps |it is not here|docs/compat.md"):
        getattr(compat, mistyped)
    if letter == "q" and len(name) > 12:
        with pytest.raises(ImportError, match="perhaps "):
            getattr(compat, mistyped)


def test_what_scripts_read_of_a_trainer(folder, tmp_path):  # noqa: F811
    trainer = SFTTrainer(folder, SFTConfig(output_dir=str(tmp_path), report_to="none"), rows(6), eval_dataset=rows(2))
    for data, count in ((trainer.train_dataset, 6), (trainer.eval_dataset, 2)):
        assert data.column_names == ["input_ids", "labels"] == list(data[0])
        assert data["labels"] == [row["labels"] for row in data] and len(data) == count
    assert made("sft", folder, tmp_path).eval_dataset is None
    for kind in ALL:
        trainer_class, _, _, others = ALL[kind]
        given = {name: folder if value == "folder" else value for name, value in others.items()}
        with pytest.raises(ValueError, match=f"{trainer_class.__name__}: `train_dataset` is required"):
            trainer_class(model=folder, args=None, **given)
    with pytest.raises(ValueError, match=r"ref_model is a \w+; give a name or folder") as told:
        DPOTrainer(folder, train_dataset=PAIRS, ref_model=trainer.tokenizer)
    assert len(str(told.value)) < 300
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        DPOTrainer(trainer.model, train_dataset=PAIRS, ref_model=trainer.model)
