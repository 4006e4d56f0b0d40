"""Scripts with the calls of Unsloth's notebook and TRL's example of models that read pictures, on a tiny model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

import jaxtune
from jaxtune import compat
from jaxtune.compat.model import CompatModel
from jaxtune.compat.vision import Processor, _targets
from jaxtune.models.generation.pictures import processor_of
from jaxtune.models.lora import linears
from tests.train import gemma_runs
from tests.train.data.pictures import MARKS, TEMPLATE
from tests.train.picture_runs import COLOURS, draw, write_model

SCRIPTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    rows = []
    for number in range(8):
        file, colour = folder / f"{number}.png", COLOURS[number % len(COLOURS)]
        draw(colour, number).save(file)
        rows.append({"file": str(file), "text": colour})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.jsonl.tsv").write_text("".join(f"{row['file']}\t{row['text']}\n" for row in rows))
    return {"MODEL": str(write_model(folder / "model")), "DATA": str(folder / "rows.jsonl"), "OUT": str(folder)}


def test_the_calls_of_unsloths_vision_notebook(places, monkeypatch, capsys):
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    script = runpy.run_path(str(SCRIPTS / "compat_vision_script.py"))
    losses = [line["loss"] for line in script["trainer"].state.log_history if "loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert script["before"] != script["after"]
    assert "pictures have at most 262,144 pixels" in capsys.readouterr().out
    adapted = {name for name, linear in linears(script["model"].module) if linear.lora is not None}
    assert any("visual" in name for name in adapted) and any(".layers." in name for name in adapted)
    row = script["trainer"].train_dataset[0]
    picture = script["tokenizer"].pictures.token
    assert picture in row["input_ids"] and picture not in row["labels"]
    assert any(label >= 0 for label in row["labels"])
    assert_saved(Path(places["OUT"]), script["after"])


def assert_saved(out: Path, answer: str) -> None:
    """The folders of the adapter, which gives this answer, and of the merged model load with their towers."""
    for folder in ("lora", "merged"):
        again, processor = compat.FastVisionModel.from_pretrained(str(out / folder), load_in_4bit=False)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(images=[draw(COLOURS[0], 0)], text=[text], return_tensors="pt")
        outputs = again.generate(inputs, max_new_tokens=6, do_sample=False)
        said = processor.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert again.module.vision is not None and (folder == "merged" or said == [answer])


@pytest.mark.parametrize("name", ["gemma4", pytest.param("unified", marks=pytest.mark.full)])
def test_the_calls_of_unsloths_gemma_4_vision_notebooks(places, tmp_path, monkeypatch, capsys, name):
    template = TEMPLATE.replace("<|im_start|>", "<|turn>").replace("<|im_end|>", "<turn|>")
    model = gemma_runs.write_model(tmp_path / "model", name, template)
    hf = json.loads((model / "config.json").read_text())
    hf["text_config"]["max_position_embeddings"] = 2048  # as the notebooks name no length
    (model / "config.json").write_text(json.dumps(hf))
    for key, value in (places | {"MODEL": str(model), "OUT": str(tmp_path)}).items():
        monkeypatch.setenv(key, value)
    script = runpy.run_path(str(SCRIPTS / "compat_gemma_vision_script.py"))
    losses = [line["loss"] for line in script["trainer"].state.log_history if "loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert script["before"] != script["after"] and script["trainer_stats"].metrics["train_runtime"] > 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "'gemma-4' is the tokenizer's own template, which stays" in said and script["after"] in said
    assert script["processor"].chat_template == template.replace("".join(MARKS), MARKS[1])
    adapted = {name for name, linear in linears(script["model"].module) if linear.lora is not None}
    assert any("embed_vision" in name for name in adapted) and any(".layers." in name for name in adapted)
    assert_saved(tmp_path, script["after"])


def test_the_calls_of_trls_example(places, monkeypatch):
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    script = runpy.run_path(str(SCRIPTS / "compat_sft_vlm_script.py"))
    history = script["trainer"].state.log_history
    assert len([line for line in history if "loss" in line]) == 3 and any("eval_loss" in line for line in history)
    _, processor = compat.FastVisionModel.from_pretrained(str(Path(places["OUT"]) / "vlm"), 64, load_in_4bit=False)
    assert processor.pictures == script["processor"].pictures


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ((True, False, True, True), lambda name: "visual" in name),
        ((False, True, True, True), lambda name: "visual" not in name),
        ((True, True, True, False), lambda name: "attn" in name),
        ((False, True, False, True), lambda name: "visual" not in name and "attn" not in name),
        ((True, False, False, True), lambda name: "visual" in name and "attn" not in name),
    ],
)
def test_which_modules_are_finetuned(places, flags, kept):
    model, tokenizer = jaxtune.from_pretrained(places["MODEL"], dtype="float32", pictures=True)
    names = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
    chosen = {f"finetune_{name}": flag for name, flag in zip(names, flags, strict=True)}
    adapted = compat.FastVisionModel.get_peft_model(CompatModel(model, tokenizer, 64, None), r=2, **chosen)
    every = {name for name, _ in linears(model)}
    found = {name for name, linear in linears(adapted.module) if linear.lora is not None}
    assert found == {name for name in every if kept(name)} and found


def test_what_is_refused(places, tmp_path):
    model, tokenizer = jaxtune.from_pretrained(places["MODEL"], dtype="float32", pictures=True)
    text = CompatModel(tiny_model(), tokenizer, 64, None)
    with pytest.raises(ValueError, match="loaded without its tower: use FastVisionModel.from_pretrained"):
        compat.FastVisionModel.get_peft_model(text, finetune_vision_layers=False)
    with pytest.raises(ValueError, match="leave nothing to train"):
        _targets("here", text, False, False, True, True)
    with pytest.raises(ValueError, match="finetune_mlp_modules = False and target_modules"):
        compat.FastVisionModel.get_peft_model(text, target_modules=["q_proj"], finetune_mlp_modules=False)
    with pytest.raises(ValueError, match="the model has no tower: use FastVisionModel"):
        text.generate(np.ones((1, 3), int), pixel_values=np.zeros((4, 9)), image_grid_thw=[[1, 2, 2]])
    with pytest.raises(ValueError, match="resize = 'tiny' is not supported"):
        compat.UnslothVisionDataCollator(text, None, resize="tiny")
    processor = Processor(tokenizer, processor_of(model.source, tokenizer))
    with pytest.raises(ValueError, match="2 images for texts with 1 marks"):
        processor([draw("red", 0)] * 2, "a<|image_pad|>b")
    inputs = processor(draw("red", 0), ["no", "a<|image_pad|>b"])
    assert inputs.attention_mask.tolist()[0][0] == 0 and inputs["attention_mask"].sum() < inputs.input_ids.size
    eyes = CompatModel(model, tokenizer, 64, None)
    with pytest.raises(ValueError, match="tokens of pictures more than image_grid_thw"):
        eyes.generate(
            np.concatenate([inputs.input_ids[1:]] * 2, 1), **{k: inputs[k] for k in ("pixel_values", "image_grid_thw")}
        )
