"""Runs with pictures by the command, on a tiny Qwen3.5: what they learn, resume, pack, leave alone and refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from picture_rows import QWEN3_VL
from safetensors.numpy import load_file

from jaxtune import cli
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import matrices
from jaxtune.models.stack.residual_plan import KEEP, ResidualPlan
from jaxtune.models.vision.pictures import Pictures
from jaxtune.train.config import MeshConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.data.packing.answers import SAMPLED_LOGPS
from jaxtune.train.objectives.distillation import generalized_jsd
from jaxtune.train.objectives.policy import log_probs_of
from jaxtune.train.objectives.teachers import without_teacher
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
from tests.train.data.pictures import SETTINGS
from tests.train.picture_runs import COLOURS, write_model, write_rows

STEPS = 24


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{name: path} of a model, and of rows with pictures, without any, and held out."""
    folder = tmp_path_factory.mktemp("pictures")
    return {
        "model": write_model(folder / "model"),
        "rows": write_rows(folder / "rows", 48, text=12),
        "held_out": write_rows(folder / "held_out", 16, seed=1000),
        "text": write_rows(folder / "text", 0, text=16),
        "pairs": write_rows(folder / "pairs", 48, text=8, form="pairs"),
        "prompts": write_rows(folder / "prompts", 12, text=4, form="prompts"),
        "held_out_pairs": write_rows(folder / "held_out_pairs", 16, seed=1000, form="pairs"),
    }


def recipe(folder, places, **changes):
    settings = {
        "model": {"path": str(places["model"])},
        "data": {"train": str(places["rows"]), "length": 128},
        "precision": "fp32",
        "steps": STEPS,
        "rows_per_step": 4,
        "optim": {"learning_rate": 3e-3},
        "schedule": {"name": "constant"},
        "checkpoint": {"every_steps": None, "every_minutes": None},
        "output": str(folder / "out"),
    }
    for key, value in changes.items():
        section = settings.get(key)
        settings[key] = section | value if isinstance(section, dict) and isinstance(value, dict) else value
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(settings))
    return file


def train(folder, places, *overrides, **changes):
    """The folder of a run by the command."""
    assert cli.main(["train", str(recipe(folder, places, **changes)), *overrides]) == 0
    return folder / "out"


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def trainer_of(folder, places, **changes):
    config = load_config(str(recipe(folder, places, **changes)))
    with loading(config, trains=False) as (weights, tokenizer, model):
        return Trainer(model, tokenizer, config, weights=weights, trains=False)


def test_a_run_learns_what_only_pictures_tell_and_goes_on_to_the_same_bits(tmp_path, places, capsys):
    """New pictures are named better than any reader of the text can; a run that lost its last step makes it again."""
    saves = {"every_steps": STEPS - 1, "every_minutes": None}
    held_out = {"eval": str(places["held_out"])}
    asked = {"exact_match_rows": 16, "max_new_tokens": 8, "generate": ["exact_match"]}
    run = train(tmp_path, places, checkpoint=saves, data=held_out, evaluation=asked, export={"merged": True})
    said = " ".join("".join(capsys.readouterr()).split())
    assert "48 pictures of 4 to 25 tokens and 16 to 100 patches" in said
    assert "room for 256 patches a row, in a frozen tower of 2 layers" in said
    evaluation = next(line for line in reversed(lines(run)) if "eval_loss" in line)
    by_chance = math.log(len(COLOURS)) * 16 / evaluation["eval_targets"]
    assert evaluation["eval_loss"] < by_chance / 2
    results = json.loads((run / "results.json").read_text())["after"]
    assert results["exact_match"] > 0.6 and results["samples"][0]["question"] == "<image>Which?"
    assert cli.main(["evaluate", str(run / "config.yaml"), "precision=fp32"]) == 0
    scores = json.loads(capsys.readouterr().out)
    answers = [line["eval_answers/exact_match"] for line in lines(run) if "eval_answers/exact_match" in line]
    assert answers[-1] == scores["eval_answers/exact_match"] == results["exact_match"]
    assert scores["exact_match"] == results["exact_match"] and scores["samples"] == results["samples"]
    before, first = load_file(run / "merged" / "model.safetensors"), losses(run)
    shutil.rmtree(run / "merged")
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    train(tmp_path, places, checkpoint=saves, data=held_out, evaluation=asked, export={"merged": True})
    assert losses(run) == first
    after = load_file(run / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_preferences_that_only_pictures_tell(tmp_path, places, capsys):
    """New pairs are told apart; a run that lost its last step makes it again from the same reference."""
    changes = dict(
        objective={"name": "dpo", "precompute_ref_log_probs": True},
        checkpoint={"every_steps": STEPS - 1, "every_minutes": None},
        data={"train": str(places["pairs"]), "eval": str(places["held_out_pairs"]), "cache_dir": str(tmp_path / "c")},
    )
    run = train(tmp_path, places, **changes)
    assert "96 pictures of 4 to 25 tokens" in " ".join("".join(capsys.readouterr()).split())  # of both answers
    evaluation = next(line for line in reversed(lines(run)) if "eval_loss" in line)
    assert evaluation["eval_rewards/accuracies"] > 0.8
    first = losses(run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    train(tmp_path, places, **changes)
    assert losses(run) == first
    assert "log-probabilities of the reference: /" in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(("rows", "objective"), [("rows", "sft"), ("pairs", "dpo")])
def test_streamed_rows_go_on_to_the_same_bits(tmp_path, places, rows, objective):
    changes = dict(
        objective=objective,
        data={"train": str(places[rows]), "eval": None, "streaming": True, "buffer_size": 16},
        checkpoint={"every_steps": 5, "every_minutes": None},
        adapter={"r": 2},
        steps=6,
    )
    run = train(tmp_path, places, **changes)
    first = losses(run)
    assert len(set(first)) == 6
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    train(tmp_path, places, **changes)
    assert losses(run) == first


@pytest.mark.parametrize("tower", ["frozen", "all"])
def test_a_reference_of_pairs_is_computed_in_steps_or_before(tmp_path, places, tower):
    runs = []
    for before in (True, False):
        (folder := tmp_path / str(before)).mkdir()
        objective = {"name": "dpo", "precompute_ref_log_probs": before}
        settings = dict(model={"tower": tower}, adapter={"r": 2}, steps=3, data={"train": str(places["pairs"])})
        runs.append(losses(train(folder, places, objective=objective, **settings)))
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)
    assert runs[0][0] == pytest.approx(math.log(2)) and runs[0][2] < 0.69


def test_packed_rows_have_the_losses_of_rows_alone(tmp_path, places):
    results = []
    for packing in (True, False):
        data = {"train": str(places["rows"]), "eval": str(places["held_out"]), "packing": packing}
        trainer = trainer_of(tmp_path, places, data=data)
        results.append(trainer.evaluate())
        assert trainer.eval_data is not None
        assert (trainer.eval_data.report.rows < 16) == packing
    assert results[0]["eval_targets"] == results[1]["eval_targets"]
    np.testing.assert_allclose(results[0]["eval_loss"], results[1]["eval_loss"], rtol=1e-5)


def test_text_is_trained_on_as_without_a_tower(tmp_path, places):
    """Bit for bit, and nobody loads the tower unless he is told to."""
    runs = {}
    for pictures in (None, True):
        folder = tmp_path / str(pictures)
        folder.mkdir()
        changes = dict(model={"pictures": pictures}, data={"train": str(places["text"])}, steps=3)
        assert (trainer_of(folder, places, **changes).model.given.vision is not None) == bool(pictures)
        runs[pictures] = train(folder, places, **changes)
    assert losses(runs[None]) == losses(runs[True])
    with_tower, without = (load_file(run / "merged" / "model.safetensors") for run in (runs[True], runs[None]))
    assert with_tower.keys() == without.keys() and any("visual" in name for name in without)
    for name, tensor in without.items():
        np.testing.assert_array_equal(with_tower[name], tensor, err_msg=name)


@pytest.mark.parametrize("tower", ["frozen", "merger", "layers", "all"])
def test_adapters_are_where_the_config_says(tmp_path, places, tower):
    run = train(tmp_path, places, model={"tower": tower}, adapter={"r": 2}, steps=2)
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    moved = {name for name, tensor in tensors.items() if "lora_B" in name and tensor.any()}
    assert {name for name in tensors if "lora_B" in name} == moved
    parts = {name.split("visual.")[1].split(".")[0] for name in moved if "visual." in name}
    assert parts == {"frozen": set(), "merger": {"merger"}, "layers": {"blocks"}, "all": {"merger", "blocks"}}[tower]


def test_features_of_earlier_layers_train_too(tmp_path, places):
    """Qwen3-VL's, whose mergers are several."""
    model = {"path": str(write_model(tmp_path / "vl", QWEN3_VL)), "tower": "merger"}
    run = train(tmp_path, places, model=model, adapter={"r": 2}, steps=8)
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    moved = {name.split("visual.")[1].split(".linear")[0] for name in tensors if "visual." in name}
    assert moved == {"merger", "deepstack_merger_list.0", "deepstack_merger_list.1"}
    assert all(tensor.any() for tensor in tensors.values())
    assert losses(run)[-1] < 0.75 * losses(run)[0]


def test_a_plan_elsewhere_counts_patches(places, capsys, tmp_path):
    file = str(recipe(tmp_path, places))
    asked = [file, "--plan", "plan.device=H200", "precision=bf16", "model.pictures=true"]
    assert cli.main(["train", *asked]) == cli.USER_ERROR
    assert "data.patches_per_row is not set" in capsys.readouterr().err
    assert cli.main(["train", *asked, "data.patches_per_row=4096"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "room for 4,096 patches a row, in a frozen tower of 2 layers" in said and "pictures of two steps" in said


def test_the_plan_counts_the_patches_of_held_out_rows(tmp_path, places):
    """They have the room of training rows, or that of their own pictures where those have none."""
    for train_rows, length in (("rows", 384), ("text", 128)):
        data = {"train": str(places[train_rows]), "eval": str(places["held_out"]), "length": length}
        trainer = trainer_of(tmp_path, places, data=data, model={"pictures": True}, rows_per_step=2)
        costs, held_out, patches = trainer.engine.planner.cost, trainer.eval_data, trainer.batches.patches
        assert (patches > 256) == (train_rows == "rows") and costs.tower.patches == (patches or 256)  # of evaluation
        assert held_out is not None and held_out.rows.patches == costs.held_out.patches == (patches or 256)
        assert held_out.report.pictures.left_out == 0
        batch = held_out.rows.empty(2)
        assert costs.held_out_bytes == 2 * sum(array.nbytes for array in batch.pictures.values())


MESHES = [{"mesh": {"data": 2}}, {"mesh": {"data": 4, "fsdp": 2}, "rows_per_step": 8}, {"mesh": {"fsdp": 4}}]


@pytest.mark.parametrize("changes", [{"micro_batches": 2}, *MESHES, {"adapter": None}])
def test_divided_rows_have_the_losses_of_whole_steps(tmp_path, places, changes):
    runs = []
    for number, divided in enumerate(({}, changes)):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = dict(model={"tower": "all"}, adapter={"r": 2}, steps=3)
        settings |= {"rows_per_step": changes.get("rows_per_step", 4)}
        if "adapter" in changes:  # all weights: a tower that trains beside one that does not
            settings = dict(model={"tower": "all" if divided else "frozen"}, steps=3)
        runs.append(losses(train(folder, places, **(settings | divided))))
    if "adapter" in changes:
        assert runs[0][0] == runs[1][0] and runs[0][1:] != runs[1][1:]
    else:
        np.testing.assert_allclose(runs[0], runs[1], rtol=1e-4)


@pytest.mark.parametrize("tower", ["frozen", "all"])
def test_weights_of_the_text_are_rounded_and_none_of_the_tower(tmp_path, places, tower):
    settings = dict(model={"tower": tower}, adapter={"r": 2}, qat="int4")
    given = trainer_of(tmp_path, places, **settings).model.prepared
    rounded = {name for name, matrix in matrices(given) if matrix.fake_quant is not None}
    assert rounded and not any("visual" in name for name in rounded)
    run = train(tmp_path, places, **settings, steps=8, export={"merged": True})
    (tmp_path / "plain").mkdir()
    made, plain = losses(run), losses(train(tmp_path / "plain", places, **(settings | {"qat": None}), steps=1))
    assert made[-1] < made[0] and made[0] != plain[0]
    before, after = (load_file(folder / "model.safetensors") for folder in (places["model"], run / "merged"))
    changed = {name for name in after if (after[name] != before[name]).any()}
    stored = {f"{name.replace('model.', 'model.language_model.', 1)}.weight" for name in rounded}
    assert before.keys() == after.keys() and stored <= changed
    assert any("visual" in name for name in changed) == (tower == "all")


@pytest.mark.parametrize("tower", ["frozen", "all"])
def test_a_teacher_sees_the_pictures_of_its_student(tmp_path, places, tower):
    """The first loss is the divergence of two forwards; another picture is another one."""
    teacher = write_model(tmp_path / "teacher", seed=1)
    objective = {"name": "distill", "teacher": str(teacher), "on_policy": 0.0, "beta": 0.5}
    settings = dict(objective=objective, model={"tower": tower}, adapter={"r": 2})
    with loading(load_config(str(recipe(tmp_path, places, **settings))), trains=False) as (_, _, student):
        batch = trainer_of(tmp_path, places, **settings).batches.batch_at(0)

    def divergence(batch) -> float:
        pictures = Pictures(**batch.pictures)
        logits = [
            model(batch.tokens, batch.segment_ids, batch.positions, pictures=pictures)
            for model in (without_teacher(student), student.teacher)
        ]
        losses = generalized_jsd(*logits, beta=0.5)
        return float((losses * batch.weights).sum() / batch.weights.sum())

    expected = divergence(batch)
    made = losses(train(tmp_path, places, **settings, steps=8))
    np.testing.assert_allclose(made[0], expected, rtol=1e-4)
    assert made[-1] < 0.7 * made[0]
    dark = {**batch.pictures, "patches": -batch.pictures["patches"]}
    assert abs(divergence(dataclasses.replace(batch, pictures=dark)) - expected) > 20 * 1e-4 * expected


def test_the_plan_of_a_teacher_with_a_tower(tmp_path, places):
    objective = {"name": "distill", "teacher": str(places["model"]), "on_policy": 0.0}
    settings = dict(data={"patches_per_row": 64, "length": 128}, adapter={"r": 2}, micro_batches=1)
    config = load_config(str(recipe(tmp_path, places, objective=objective, **settings)))
    with loading(config, trains=False) as (_, _, student):
        spec = StepSpec.of(config, tower=student.vision.config)
        shapes = abstract_model(student.config, spec.model)
    costs = step_cost(student, spec)
    assert costs.teacher.tower.patches == costs.tower.patches == 64
    assert costs.fixed["teacher's weights"] == costs.fixed["frozen weights"], "it is the student's base"
    assert step_cost(shapes, spec).fixed == costs.fixed
    card, plan = find_device("H100"), StepPlan(ResidualPlan.uniform(KEEP, 2), 1, 128)
    seconds = forecast(costs, plan, card).device_seconds
    blind = dataclasses.replace(costs, teacher=dataclasses.replace(costs.teacher, tower=None))
    assert seconds > forecast(blind, plan, card).device_seconds


def test_the_plan_of_a_divided_teacher(tmp_path, places):
    """Its weights, and its tower's, are whole where their layer runs."""
    objective = {"name": "distill", "teacher": str(places["model"]), "on_policy": 0.0}
    settings = dict(data={"patches_per_row": 64, "length": 128}, adapter={"r": 2}, micro_batches=1, rows_per_step=8)
    config = load_config(str(recipe(tmp_path, places, objective=objective, **settings)))
    with loading(config, trains=False) as (_, _, student):
        spec = StepSpec.of(dataclasses.replace(config, mesh=MeshConfig(1, 8)), tower=student.vision.config)
    costs, plan = step_cost(student, spec), StepPlan(ResidualPlan.uniform(KEEP, 2), 1, 1)

    def large(parts):
        return dataclasses.replace(parts, divided=dataclasses.replace(parts.divided, layer_bytes=1e12))

    teacher = costs.teacher
    of_tower = dataclasses.replace(teacher, tower=dataclasses.replace(teacher.tower, parts=large(teacher.tower.parts)))
    for changed, name in ((large(teacher), "the teacher"), (of_tower, "the teacher's tower")):
        parts = forecast(dataclasses.replace(costs, teacher=changed), plan, find_device("H100")).parts
        assert f"the forward of {name}" in parts and parts["gathered weights"] > 1e12


def test_the_plan_of_a_divided_tower(tmp_path, places):
    """Weights that devices divide are whole where their layer runs, and their gradients until they are summed."""
    settings = dict(data={"patches_per_row": 64, "length": 128}, model={"tower": "all"}, micro_batches=1)
    config = load_config(str(recipe(tmp_path, places, **settings, rows_per_step=8)))
    with loading(config, trains=False) as (_, _, model):
        whole, divided = (
            step_cost(
                model, StepSpec.of(dataclasses.replace(config, mesh=MeshConfig(*mesh)), tower=model.vision.config)
            )
            for mesh in ((8, 1), (1, 8))
        )
    assert whole.tower.parts.gathered_bytes == (0.0, 0.0, 0.0)
    matrices = [sum(math.prod(m.sizes) for *_, m in layer.matrices()) for layer in model.vision.layers]
    _, forward, backward = divided.tower.parts.gathered_bytes
    assert forward >= 2 * 4 * max(matrices) and backward == forward + 8 * max(matrices)


REWARDS = """
from PIL import Image


def named(prompts, completions, answer, images, **columns):
    for prompt, shown in zip(prompts, images):
        parts = prompt[-1]["content"]
        if shown is None:
            assert isinstance(parts, str)
            continue
        assert [part["type"] for part in parts] == ["image", "text"]
        assert len(shown) == 1 and isinstance(shown[0], Image.Image) and shown[0].mode == "RGB"
    pairs = zip(completions, answer)
    return [sum(letter in said[-1]["content"] for letter in right) / len(right) for said, right in pairs]
"""


def rewarded(folder, places, objective="grpo", **settings):
    (folder / "rewards.py").write_text(REWARDS)
    how = {"name": objective, "reward_funcs": [f"{folder}/rewards.py:named"], "max_completion_length": 6}
    return dict(
        objective={**how, "num_generations": 4, **settings},
        data={"train": str(places["prompts"]), "length": 128},
        rows_per_step=16,
        adapter={"r": 2},
    )


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_rewards_of_answers_to_pictures(tmp_path, places, objective):
    """Sampler and trainer give answers the same probabilities; a run that lost its last step, in the middle of a
    generation, makes it again.
    """
    changes = rewarded(tmp_path, places, objective, steps_per_generation=2, beta=0.1)
    changes |= dict(steps=6, model={"tower": "all"}, checkpoint={"every_steps": 5, "every_minutes": None})
    run = train(tmp_path, places, **changes)
    steps = [line for line in lines(run) if "loss" in line]
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 2e-4
    assert any(line["reward_std"] > 0 for line in steps)
    before, rollouts = [line["loss"] for line in steps], (run / "rollouts.jsonl").read_text()
    assert {"type": "image"} in json.loads(rollouts.splitlines()[0])["prompt"][-1]["content"] or "Say" in rollouts
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    train(tmp_path, places, **changes)
    assert losses(run) == before and (run / "rollouts.jsonl").read_text() == rollouts


@pytest.mark.parametrize("changes", [{}, {"data": {"patches_per_row": 64}}, {"objective": {"num_generations": 3}}])
def test_answers_are_trained_on_where_they_were_sampled(tmp_path, places, changes):
    """With the pictures and the positions of their prompts: with others they are unlikely."""
    settings = rewarded(tmp_path, places) | dict(rows_per_step=12)
    settings |= {key: settings[key] | value for key, value in changes.items()}
    trainer = trainer_of(tmp_path, places, **settings)
    source, model = trainer.batches, trainer.model.prepared
    batch = source.batch_at(0, lambda: model)
    room = source.patches
    assert batch.pictures["patches"].shape == (source.rows_per_step, room, 96)
    assert changes.get("data") is None or room == 256
    group = settings["objective"]["num_generations"]
    prompts = [len({answer.prompt for answer in row}) for row in rows_of(source)]
    assert max(prompts) <= -(-source.max_documents // group) + 1
    for row, segments in enumerate(batch.pictures["patch_segments"]):
        assert segments.max() <= min(prompts[row], source.max_pictures)  # a group's picture is there once

    def apart(other):
        differences = log_probs_of(1.0, model, other) - batch.extra[SAMPLED_LOGPS]
        return np.abs(differences[batch.weights > 0]).max()

    assert apart(batch) < 1e-4
    index = np.broadcast_to(np.arange(batch.tokens.shape[1])[None, :, None], batch.positions.shape)
    assert apart(dataclasses.replace(batch, positions=index.astype(np.int32))) > 1e-3
    dark = {**batch.pictures, "patches": -batch.pictures["patches"]}
    assert apart(dataclasses.replace(batch, pictures=dark)) > 1e-3


def rows_of(source):
    """The answers of each row of the first step."""
    [_, answers] = source._generation
    rows = [[] for _ in range(source.rows_per_step)]
    for answer, (row, _, _) in zip(answers, source.rows.places_of(answers), strict=True):
        rows[row].append(answer)
    return rows


TOOL = '''
def add(one: int, other: int) -> int:
    """Adds.

    Args:
        one: A number.
        other: A number.
    """
    return one + other
'''

REFUSED = {
    "called": (
        dict(
            objective={"name": "grpo", "reward_funcs": ["exact_match"], "tools": ["FOLDER/tools.py:add"]},
            rows_per_step=8,
        ),
        "objective.tools or environment_factory: not supported yet in a run with pictures",
    ),
    "objective": (dict(objective="reward"), "objective = reward: not supported yet in a run with pictures"),
    "sampled from the student": (
        dict(objective={"name": "distill", "teacher": "base"}, adapter={"r": 2}),
        "objective.on_policy = 1.0: not supported yet in a run with pictures; set objective.on_policy=0, or train on",
    ),
    "stored teacher": (
        dict(objective={"name": "distill", "teacher": "TEACHER", "on_policy": 0.0, "teacher_top_k": 4}),
        "objective.teacher_top_k: not supported yet in a run with pictures",
    ),
    "teacher without a tower": (
        dict(objective={"name": "distill", "teacher": "BLIND", "on_policy": 0.0}),
        "pictures of a 'qwen3_5_text' model are not supported",
    ),
    "teacher of other pictures": (
        dict(objective={"name": "distill", "teacher": "OTHER", "on_policy": 0.0}),
        "its image processor cuts pictures otherwise than the student's",
    ),
    "activations rounded": (
        dict(adapter={"r": 2}, qat="nvfp4-nvfp4"),
        "qat.format = nvfp4-nvfp4: not supported yet in a run with pictures",
    ),
    "no pictures wanted": (dict(model={"pictures": False}), "a part of the type image in content; only text can be"),
    "no tower to train": (
        dict(model={"pictures": False, "tower": "all"}),
        "model.tower = 'all': model.pictures = f",
    ),
    "a tower without pictures": (
        dict(model={"tower": "all"}, data={"train": "TEXT"}),
        "model.tower = 'all': none of the first 1,000 rows has a picture: leave it out, or set model.pictures=true",
    ),
    "adapter elsewhere": (
        dict(model={"tower": "all"}, adapter={"r": 2, "target_modules": ["q_proj"]}),
        "model.tower = 'all': adapter.target_modules = ('q_proj',) names none of its linears",
    ),
    "picture is missing": (dict(data={"train": "MISSING"}), "_.png' in "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name_before_weights_are_read(tmp_path, places, case, monkeypatch, capsys):
    changes, words = REFUSED[case]
    missing = tmp_path / "rows.jsonl"
    missing.write_text(places["rows"].read_text().replace('.png"', '_.png"'))
    text = json.dumps(changes).replace("HELD_OUT", str(places["held_out"])).replace("MISSING", str(missing))
    text = text.replace("TEXT", str(places["text"])).replace("FOLDER", str(tmp_path))
    text = text.replace("TEACHER", str(places["model"]))
    if "OTHER" in text:
        brighter = SETTINGS | {"image_mean": [0.4, 0.4, 0.4]}
        text = text.replace("OTHER", str(write_model(tmp_path / "other", settings=brighter)))
    text = text.replace("BLIND", str(text_model(tmp_path, places)))
    (tmp_path / "tools.py").write_text(TOOL)
    monkeypatch.setattr(Pretrained, "load", lambda *_: pytest.fail("weights were read"))
    assert cli.main(["train", str(recipe(tmp_path, places, **json.loads(text)))]) == cli.USER_ERROR
    assert words in " ".join(capsys.readouterr().err.split())


def text_model(folder, places):
    """A folder that says it has no tower."""
    config = json.loads((places["model"] / "config.json").read_text())
    shutil.copytree(places["model"], folder / "alone")
    text = {"architectures": ["Qwen3_5ForCausalLM"], **config["text_config"]}
    (folder / "alone" / "config.json").write_text(json.dumps(text))
    return folder / "alone"


def test_a_model_without_a_tower_or_its_processor_says_so(tmp_path, places, capsys):
    alone = text_model(tmp_path, places)
    asked = recipe(tmp_path, places, model={"path": str(alone), "pictures": True})
    assert cli.main(["train", str(asked)]) == cli.USER_ERROR
    assert "model.pictures = true: pictures of a 'qwen3_5_text' model are not" in capsys.readouterr().err
    asked = recipe(tmp_path, places, model={"path": str(alone), "tower": "all"})
    assert cli.main(["train", str(asked)]) == cli.USER_ERROR
    assert "model.tower = 'all': pictures of a 'qwen3_5_text' model are not" in capsys.readouterr().err
    assert cli.main(["train", str(recipe(tmp_path, places, model={"path": str(alone)}))]) == cli.USER_ERROR
    assert "a part of the type image in content; only text can be read" in capsys.readouterr().err
    (bare := tmp_path / "bare").mkdir()
    for file in places["model"].iterdir():
        if file.name != "preprocessor_config.json":
            shutil.copy(file, bare)
    assert cli.main(["train", str(recipe(tmp_path, places, model={"path": str(bare)}))]) == cli.USER_ERROR
    assert "there is no preprocessor_config.json" in capsys.readouterr().err
