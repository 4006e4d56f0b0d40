"""Defaults of TRL's live configs, its parser and its rewards."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune import compat
from jaxtune.compat import rewards
from jaxtune.compat.settings import plain_value

CONFIGS = {
    "SFTConfig": "trl",
    "DPOConfig": "trl",
    "KTOConfig": "trl",
    "RewardConfig": "trl",
    "GRPOConfig": "trl",
    "RLOOConfig": "trl",
    "DistillationConfig": "trl",
    "ORPOConfig": "trl.experimental.orpo",
    "GKDConfig": "trl.experimental.gkd",
    "TrainingArguments": "transformers",
}

# Here as the model was loaded; and what TRL's constructor makes of the others.
COMPUTED = ("gradient_checkpointing", "generation_batch_size", "steps_per_generation")


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_the_library(name, tmp_path):
    theirs = getattr(importlib.import_module(CONFIGS[name]), name)(str(tmp_path), bf16=False)
    ours = getattr(compat, name)(str(tmp_path), bf16=False)
    compared = 0
    for field in dataclasses.fields(ours):
        if not hasattr(theirs, field.name) or field.name in COMPUTED:
            continue
        value = plain_value(getattr(theirs, field.name))
        if field.name == "loss_type" and isinstance(value, list):
            (value,) = value
        if field.name == "report_to":  # TRL's constructor makes a list of it
            value = value[0] if value else "none"
        assert getattr(ours, field.name) == value, field.name
        compared += 1
    assert compared > 25


@pytest.mark.parametrize("name", ["ModelConfig", "ScriptArguments", "DatasetMixtureConfig"])
def test_the_fields_of_trls_dataclasses(name):
    import trl

    ours, theirs = ({f.name: f.default for f in dataclasses.fields(getattr(m, name))} for m in (compat, trl))
    assert ours.keys() == theirs.keys()
    assert {k: v for k, v in ours.items() if v is not dataclasses.MISSING} == {
        k: v for k, v in theirs.items() if v is not dataclasses.MISSING
    }


WORDS = {
    "learning_rate": st.sampled_from(["1e-5", "0.25"]),
    "max_steps": st.sampled_from(["3", "-1"]),
    "packing": st.sampled_from([None, "true", "False"]),
    "eval_strategy": st.sampled_from(["no", "steps"]),
    "lr_scheduler_kwargs": st.sampled_from(['{"num_cycles": 2}']),
    "use_peft": st.sampled_from([None, "yes"]),
    "lora_target_modules": st.sampled_from(["all-linear", "q_proj v_proj"]),
    "dataset_name": st.sampled_from(["a/b", "7"]),
    "max_length": st.sampled_from(["77"]),
    "warmup_steps": st.sampled_from(["0.1", "5"]),
}


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_command_line_means_the_same_to_both_parsers(data):
    import trl

    words = ["--output_dir", "x", "--bf16", "false"]
    names = sorted(data.draw(st.sets(st.sampled_from(sorted(WORDS)))))
    for name in names:
        value = data.draw(WORDS[name])
        words += [f"--{name}", *([] if value is None else [value] if "{" in value else value.split())]
    found = []
    for module in (trl, compat):
        kinds = (module.ScriptArguments, module.SFTConfig, module.ModelConfig, module.DatasetMixtureConfig)
        made = module.TrlParser(kinds).parse_args_and_config(list(words))
        found.append({name: plain_value(v) for one in made for name, v in vars(one).items() if name in names})
    assert found[0] == found[1]


CHATS = [
    [{"role": "assistant", "content": text}]
    for text in (
        r"My answer is \boxed{\frac{1}{3}}",
        r"<think>a</think> \boxed{2}",
        "<think>\nnothing",
        "no mathematics here",
        r"<think>\boxed{5}</think>",
        "",
    )
]
SOLUTIONS = [r"\frac{1}{3}", "2", "2", "not one", r"$5$", "4"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accuracy_reward", None),
        ("reasoning_accuracy_reward", None),
        ("think_format_reward", None),
        ("get_cosine_scaled_reward", {"max_len": 10}),
        ("get_repetition_penalty_reward", {"ngram_size": 2}),
        ("get_soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 4}),
    ],
)
def test_rewards_are_trls(name, options):
    from trl import rewards as theirs

    ids = [[1, 1, 1], [1, 2, 3, 4], [5] * 8, list(range(12)), [], [1, 2, 1, 2]]
    found = []
    for module in (theirs, rewards):
        function = getattr(module, name) if options is None else getattr(module, name)(**options)
        extra = {}
        log = {"log_extra": extra.__setitem__} if name.endswith("accuracy_reward") else {}
        found.append((function(completions=CHATS, solution=SOLUTIONS, completion_ids=ids, **log), json.dumps(extra)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    if name == "accuracy_reward":
        assert found[0][1] == found[1][1]
