"""Runs with pictures by the command, on a tiny Qwen3.5: what they learn, resume, pack, leave alone and refuse."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from picture_rows import QWEN3_VL
from safetensors.numpy import load_file

from jaxtune import cli
from jaxtune.models.hf import Pretrained
from jaxtune.train.config.file import load_config
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
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
    asked = {"exact_match_rows": 16, "max_new_tokens": 8}
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


@pytest.mark.parametrize("changes", [{"micro_batches": 2}, {"mesh": {"data": 2}}, {"adapter": None}])
def test_divided_rows_have_the_losses_of_whole_steps(tmp_path, places, changes):
    runs = []
    for number, divided in enumerate(({}, changes)):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = dict(model={"tower": "all"}, adapter={"r": 2}, steps=3)
        if "adapter" in changes:  # all weights: a tower that trains beside one that does not
            settings = dict(model={"tower": "all" if divided else "frozen"}, steps=3)
        runs.append(losses(train(folder, places, **(settings | divided))))
    if "adapter" in changes:
        assert runs[0][0] == runs[1][0] and runs[0][1:] != runs[1][1:]
    else:
        np.testing.assert_allclose(runs[0], runs[1], rtol=1e-4)


REFUSED = {
    "objective": (dict(objective="orpo"), "objective = orpo: not supported yet in a run with pictures"),
    "weights divided": (dict(mesh={"fsdp": 2}), "mesh.fsdp = 2: not supported yet in a run with pictures"),
    "streamed": (dict(data={"streaming": True}), "data.streaming = true: not supported yet in a run with pictures"),
    "rounded": (dict(adapter={"r": 2}, qat="int4"), "qat.format = int4: not supported yet in a run with pictures"),
    "asked": (
        dict(evaluation={"generate": ["exact_number"]}, data={"eval": "HELD_OUT"}),
        "evaluation.generate = ['exact_number']: not supported yet in a run with pictures",
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
    text = text.replace("TEXT", str(places["text"]))
    monkeypatch.setattr(Pretrained, "load", lambda *_: pytest.fail("weights were read"))
    assert cli.main(["train", str(recipe(tmp_path, places, **json.loads(text)))]) == cli.USER_ERROR
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_model_without_a_tower_or_its_processor_says_so(tmp_path, places, capsys):
    config = json.loads((places["model"] / "config.json").read_text())
    text = {"architectures": ["Qwen3_5ForCausalLM"], **config["text_config"]}
    alone = tmp_path / "alone"
    shutil.copytree(places["model"], alone)
    (alone / "config.json").write_text(json.dumps(text))
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
