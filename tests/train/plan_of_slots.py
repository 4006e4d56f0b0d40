"""The slots that a run plans and those that its samplers take, of drawn settings; also as one process of several.

Usage: plan_of_slots.py FOLDER --coordinator=HOST:PORT --processes=N --process=I, which prints what differs.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from unittest.mock import patch

from jax.sharding import AbstractMesh

from jaxtune.models.files.quant import quantize
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.placement import partition
from jaxtune.system import ending, joining, processes
from jaxtune.train.config import DataConfig, MemoryConfig, MeshConfig, ObjectiveConfig
from jaxtune.train.config.sections import EvaluationConfig
from jaxtune.train.evaluation import answer_metrics
from jaxtune.train.sampled import answering, own_samples, rollout_function
from jaxtune.train.trainer import Trainer
from tests.models.tiny_models import adapted_model, tiny_model
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

ENOUGH_GB = 30.0
QUESTIONS = 32  # that are answered at a time
WAYS = "rewards", "own samples", "tools", "a rollout function"
MESHES = MeshConfig(1, 1), MeshConfig(2, 1), MeshConfig(1, 2), MeshConfig(2, 2)
MODELS = "all weights", "an adapter", "an adapter on quantised weights"


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}{% for m in messages %}"
    "{{ m.role + ': ' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def roll(sides: int) -> int:
    """Rolls a die.

    Args:
        sides: of the die.
    """
    return sides // 2


def rollout(prompts, model):
    raise AssertionError("its model is made first")


class MadeError(Exception):
    """In place of sampling, with the sampler that would sample."""


class Made:
    def __init__(self, *values, **options):
        raise MadeError(Sampler(*values, **options))


def trainer_of(folder: Path, way: str, name: str, mesh: MeshConfig, draw: random.Random) -> Trainer:
    """Of drawn numbers of answers, questions, slots, and layers that are whole on each device."""
    tokenizer = make_tokenizer(TEMPLATE) if way == "tools" else make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256)
    model = quantize(model, "nf4") if "quantised" in name else model
    adapts = name != "all weights"
    questions, count = folder / "held.jsonl", draw.randint(1, 50)
    if processes.first():
        folder.mkdir(parents=True)
        questions.write_text("\n".join([json.dumps({"prompt": "one", "answer": "two"})] * count))
    processes.all_of(None)
    objective: dict = dict(max_completion_length=8, slots=draw.choice([None, draw.randint(1, 40)]))
    if way == "own samples":
        objective |= dict(name="distill", teacher="base", on_policy=1.0)
    else:
        objective |= dict(name="grpo", reward_funcs=("brevity",), num_generations=draw.choice([2, 4]))
        objective |= dict(exact=draw.choice([True, None]) if way == "rewards" and mesh.fsdp == 1 else None)
    objective["cache"] = None if objective.get("exact") else draw.choice([None, "fp8"])
    if way == "tools":
        objective["tools"] = (f"{__file__}:roll",)
    if way == "a rollout function":
        objective["rollout_func"] = f"{__file__}:rollout"
    plans = [None, "keep", "keep; resident=1", f"keep; resident={len(model.layers)}"]
    config = make_config(
        folder / "run",
        steps=2,
        mesh=mesh,
        rows_per_step=8 * draw.randint(1, 12),
        memory=MemoryConfig(plan=draw.choice(plans) if adapts and mesh.fsdp > 1 else None, budget_gb=ENOUGH_GB),
        objective=ObjectiveConfig(**objective),
        data=DataConfig(train="rows that the test made", eval=str(questions), length=64),
        evaluation=EvaluationConfig(generate=("exact_match",), max_new_tokens=8),
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two of them")]
    return Trainer(adapted_model(model, r=4) if adapts else model, tokenizer, config, rows)


def differences(trainer: Trainer) -> list[str]:
    """Between the plan and the samplers that a run without a plan would make for the same rows."""
    plans = trainer.slots
    state, _, _ = trainer.model.first_state(trainer.engine)
    model = trainer.model.sampling(state.trainable)
    sampling = getattr(getattr(trainer.batches, "answering", None), "sampling", trainer.batches)
    for name in ("plan", "_plan"):
        if getattr(sampling, name, None) is not None:
            setattr(sampling, name, None)
    assert trainer.answers is not None
    asked = dataclasses.replace(trainer.answers, most_slots=QUESTIONS, most_converted=None)
    found, sizes = [], tuple(partition.MeshShape.of(trainer.mesh))
    shapes = trainer.model.sampled(trainer.planner.plan, AbstractMesh(sizes, trainer.mesh.axis_names))
    if Sharing.of(shapes) != Sharing.of(model):
        found.append(f"a plan without devices: {Sharing.of(shapes)}, not {Sharing.of(model)}")
    for name, sample in (
        ("answers", lambda: trainer.batches.batch_at(0, lambda: model)),
        ("generate", lambda: asked(model)),
    ):
        try:
            with (
                patch.object(answering, "Sampler", Made),
                patch.object(own_samples, "Sampler", Made),
                patch.object(rollout_function, "Sampler", Made),
                patch.object(answer_metrics, "Sampler", Made),
            ):
                sample()
        except MadeError as made:
            sampler = made.args[0]
        else:
            raise AssertionError(f"{name}: it sampled without a sampler of these modules")
        if sampler.plan.slots != plans[name].slots:
            found.append(f"{name}: {sampler.plan.slots} slots, planned {plans[name].slots}")
        if sampler.plan.cache != plans[name].cache:
            found.append(f"{name}: keys and values in {sampler.plan.cache}, planned {plans[name].cache}")
        if plans[name].converted_layers and not Sharing.of(model).weights_are_whole:
            found.append(f"{name}: {plans[name].converted_layers} layers are planned that cannot be converted")
    return found


def main() -> int:
    folder, *words = sys.argv[1:]
    given = dict(word[2:].split("=") for word in words)
    joining.join(given["coordinator"], int(given["processes"]), int(given["process"]))
    draw = random.Random(0)
    for way in WAYS[:2]:  # several processes share no others
        for mesh in MESHES[1:3]:
            name = draw.choice(MODELS[1:] if way == "own samples" else MODELS)
            trainer = trainer_of(Path(folder) / f"{way} {mesh.sizes}", way, name, mesh, draw)
            print(f"of {way}, {name}, {mesh}: {differences(trainer)}", file=sys.stderr, flush=True)
    ending.leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
