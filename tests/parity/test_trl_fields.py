"""Every argument of TRL's configs is one that jaxtune.compat knows, and none is ignored in silence."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import pytest

from jaxtune import compat
from tests.docs.conftest import desk, hub, tiny_model, workplace  # noqa: F401

CONFIGS = [
    ("trl", "GRPOConfig"),
    ("trl", "RLOOConfig"),
    ("trl.experimental.gkd", "GKDConfig"),
    ("trl.experimental.distillation", "DistillationConfig"),
]
PROMPTS = [{"prompt": f"Say {n}."} for n in range(4)]
# Arguments that are read only in some runs, and in which.
CONDITIONAL = {
    "num_train_epochs": "max_steps = -1",
    "model_init_kwargs": "the model is given by its name",
    "teacher_model_init_kwargs": "the teacher is given by its name",
    "project": "report_to = 'trackio'",
    "metric_for_best_model": "there are evaluations",
    "greater_is_better": "there are evaluations",
    "num_completions_to_print": "log_completions",
    "hub_model_id": "push_to_hub",
    "hub_private_repo": "push_to_hub",
    "hub_token": "push_to_hub",
}
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]} for n in range(4)
]


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def read_in_a_run(kind, monkeypatch) -> tuple[set[str], set[str]]:
    """(the fields of a config that are its own, those that are read while a trainer is made and trains)."""
    usual = dict(max_steps=1, per_device_train_batch_size=8)
    fields, read = {field.name for field in dataclasses.fields(kind.config_type)}, set()
    usual |= {name: 4 for name in ("max_completion_length", "max_new_tokens") if name in fields}

    def recorded(self, name):
        if sys._getframe(1).f_code.co_qualname != "SFTTrainer.__init__":  # it copies all fields
            read.add(name)
        return object.__getattribute__(self, name)

    model, _ = compat.FastLanguageModel.from_pretrained("base", 64, load_in_4bit=False, dtype="float32")
    model = compat.FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj"])
    rewarded = issubclass(kind, compat.GRPOTrainer | compat.RLOOTrainer)
    rows = CHATS if kind is compat.GKDTrainer else PROMPTS
    made = kind.config_type(**usual)
    monkeypatch.setattr(kind.config_type, "__getattribute__", recorded, raising=False)
    kind(model, length if rewarded else None, args=made, train_dataset=rows).train()
    return fields, read & fields


@pytest.mark.parametrize("module, name", CONFIGS, ids=[name for _, name in CONFIGS])
def test_every_argument_is_followed_or_named(module, name, workplace, monkeypatch):  # noqa: F811
    theirs = getattr(importlib.import_module(module), name)
    ours = getattr(compat, name)
    kind = getattr(compat, name.replace("Config", "Trainer"))
    own, read = read_in_a_run(kind, monkeypatch)
    names = {field.name for field in dataclasses.fields(theirs)}
    assert len(names) > 100
    assert sorted(names - own - {*ours.table}) == [], "arguments that nobody looks at"
    unread = (names & own) - read - {*CONDITIONAL}
    assert not unread, f"arguments that are taken and never read: {sorted(unread)}"
    for field in dataclasses.fields(theirs):  # TRL's own default never is an error
        if field.name not in own and field.default is not dataclasses.MISSING:
            ours(**{field.name: field.default})
