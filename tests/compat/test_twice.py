"""What a script writes it may write again; what anybody else wrote stays. One rule over all that write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxtune
from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer
from jaxtune.compat.saves import MARK, require_free, saved_into
from jaxtune.models.lora import linears
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.folder_lock import FolderLock
from jaxtune.train.folder.run_folder import next_name
from tests.test_compat import folder, load, rows, trainer_of  # noqa: F401

SAVES = {
    "save_pretrained": lambda model, tokenizer, path: model.save_pretrained(path),
    "save_lora": lambda model, tokenizer, path: model.save_lora(path),
    "lora": lambda model, tokenizer, path: model.save_pretrained_merged(path, tokenizer, save_method="lora"),
    "merged_16bit": lambda model, tokenizer, path: model.save_pretrained_merged(path, tokenizer),
    "merged_4bit": lambda model, tokenizer, path: model.save_pretrained_merged(path, save_method="merged_4bit"),
    "gguf": lambda model, tokenizer, path: model.save_pretrained_gguf(path, tokenizer, "q8_0"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))


def changed(model, value: float):
    for _, linear in linears(model.module):
        if linear.lora is not None:
            linear.lora.b[...] = linear.lora.b[...] * 0 + value
    return model


def weights(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.suffix in (".safetensors", ".gguf")
    }


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_replaces_that_of_a_script_and_no_other(folder, tmp_path, kind, capsys):  # noqa: F811
    model, tokenizer = load(folder)
    path, save = tmp_path / "saved", SAVES[kind]
    save(changed(model, 0.5), tokenizer, path)
    place = next(path.rglob(MARK)).parent
    (place / "notes.txt").write_text("mine")
    first = weights(path)
    assert first and "replaced" not in capsys.readouterr().out
    save(changed(model, 1.5), tokenizer, path)
    assert capsys.readouterr().out.count("the model that was saved there before is replaced") == 1
    second = weights(path)
    assert second.keys() == first.keys() and second != first
    assert (place / "notes.txt").read_text() == "mine" and not list(path.parent.glob("*.tmp"))
    # Somebody's weights in its place, and a model that no script saved.
    strange = tmp_path / "strange"
    shutil.copytree(place, strange)
    next(strange.rglob(MARK)).unlink()
    os.utime(next(file for file in place.iterdir() if file.suffix in (".safetensors", ".gguf")), (1, 1))
    for theirs in (path, strange if kind != "gguf" else None):
        if theirs is not None:
            before = weights(theirs)
            with pytest.raises(ValueError, match=r"which no script saved there; name another folder, such as .*-2'"):
                save(model, tokenizer, theirs)
            assert weights(theirs) == before


def test_a_save_goes_beside_a_tokenizer_and_not_over_a_file(folder, tmp_path):  # noqa: F811
    model, tokenizer = load(folder)
    path = tmp_path / "lora_model"
    for _ in range(2):  # as a script that saves the tokenizer first, run twice
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    assert jaxtune.load_adapter(load(folder, peft=False)[0].module, path) is not None
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name another folder"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="is where a disk is mounted"):
        require_free("/", "save")


def test_a_save_that_fails_or_has_fewer_files_leaves_a_whole_model(tmp_path):
    """Shards of the larger model before are gone; after an error everything is as it was, and can be replaced."""
    path = tmp_path / "m"

    def write(names):
        def into(new):
            new.mkdir(exist_ok=True)
            for name in names:
                (new / name).write_text(name)

        return into

    saved_into(path, "save", write(["model-1.safetensors", "model-2.safetensors", "config.json"]))

    def fails(new):
        write(["model.safetensors"])(new)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        saved_into(path, "save", fails)
    assert len(list(path.glob("*.safetensors"))) == 2
    saved_into(path, "save", write(["model.safetensors", "config.json"]))
    assert sorted(file.name for file in path.iterdir()) == [MARK, "config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == [path]


def run(folder, tmp_path, model=None, capsys=None, **settings):  # noqa: F811
    trainer = trainer_of(folder, tmp_path, model=model, **settings)
    return trainer.train(), trainer


@pytest.mark.full
def test_a_finished_run_is_replaced(folder, tmp_path, capsys):  # noqa: F811
    """With other settings, with saves, a second train() of one trainer, and with the tokens of other rows."""
    output = tmp_path / "run"
    saving = dict(save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    run(folder, tmp_path, max_steps=3, **saving)
    assert saved_steps(output / "checkpoints") == [1, 2, 3] and "replaces" not in capsys.readouterr().out
    _, trainer = run(folder, tmp_path, max_steps=2, learning_rate=1e-2, save_total_limit=2, **saving)
    told = capsys.readouterr().out
    assert told.count("holds an earlier run, which this one replaces; output_dir=") == 1 and "run-2'" in told
    assert saved_steps(output / "checkpoints") == [1, 2]
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()][-1] == 2
    assert "learning_rate: 0.01" in (output / "config.yaml").read_text()
    before = np.array(next(linear.lora.b[...] for _, linear in linears(trainer.model.module) if linear.lora))
    assert trainer.train().global_step == 2  # from the weights that it has, as there
    after = np.array(next(linear.lora.b[...] for _, linear in linears(trainer.model.module) if linear.lora))
    assert not np.array_equal(before, after)
    assert trainer.train(resume_from_checkpoint=True).global_step == 2


@pytest.mark.full
def test_a_run_that_could_go_on_is_kept_unless_it_is_said(folder, tmp_path, capsys):  # noqa: F811
    settings = dict(max_steps=4, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)

    def stops(trainer):
        def events(leave, measure, made=trainer._events):
            made = made(leave, measure)
            stepped = made.stepped

            def fails(step, metrics):
                stepped(step, metrics)
                if step == 2:
                    raise RuntimeError("a reward failed")

            made.stepped = fails
            return made

        trainer._events = events
        return trainer

    trainer = stops(trainer_of(folder, tmp_path, **settings))
    with pytest.raises(RuntimeError, match="a reward failed"):
        trainer.train()
    told = capsys.readouterr().out
    steps = saved_steps(tmp_path / "run/checkpoints")
    assert "the model holds the weights from before train(); train(resume_from_checkpoint=True) continues" in told
    assert f"continues from step {steps[-1]}" in told
    with pytest.raises(ValueError, match=rf"failed after step {steps[-1]}: train\(resume.*overwrite_output_dir=True"):
        run(folder, tmp_path, **settings)
    assert saved_steps(tmp_path / "run/checkpoints") == steps
    assert run(folder, tmp_path, overwrite_output_dir=True, **settings)[0].global_step == 4


@pytest.mark.full
def test_no_other_programs_run_is_replaced(folder, tmp_path):  # noqa: F811
    """Nor one of the command, nor one that is running, and nothing is tokenised before."""
    output = tmp_path / "run"
    run(folder, tmp_path, max_steps=1)
    lock = FolderLock(output / "checkpoints")
    with pytest.raises(ValueError, match="is in use by another run"):
        run(folder, tmp_path, max_steps=1)
    lock.release()
    config = (output / "config.yaml").read_text()
    for other in (config.replace("train: train_dataset", "train: rows.jsonl"), "hydra: {run: 1}\n"):
        (output / "config.yaml").write_text(other)
        trainer = trainer_of(folder, tmp_path, max_steps=1)
        with pytest.raises(ValueError, match=r"holds a run that no script made: name output_dir='.*run-2'"):
            trainer.train()
        assert "_prepared" not in vars(trainer) and (output / "config.yaml").read_text() == other


def test_the_next_name(tmp_path):
    assert next_name(tmp_path / "a").name == "a-2"
    (tmp_path / "a-2").mkdir()
    assert next_name(tmp_path / "a").name == next_name(tmp_path / "a-2").name == "a-3"
    assert next_name("runs/llama-3.1").name == "llama-3.1-2"


@pytest.mark.full
def test_what_was_saved_first_is_read_again(folder, tmp_path):  # noqa: F811
    """save_model into output_dir, which has checkpoint-N folders, twice; the second weights are there."""
    args = SFTConfig(str(tmp_path / "run"), max_steps=1, save_strategy="no", learning_rate=1e-2)
    found = []
    for _ in range(2):
        trainer = SFTTrainer(load(folder)[0], args=args, train_dataset=rows(8))
        trainer.train()
        changed(trainer.model, float(len(found) + 1))
        trainer.save_model()
        found.append(load_file(tmp_path / "run/adapter_model.safetensors"))
    assert all((found[1][name] == 2).all() for name in found[1] if "lora_B" in name)
    assert any((found[0][name] != found[1][name]).any() for name in found[0])
    assert FastLanguageModel.from_pretrained(str(tmp_path / "run"), 64, load_in_4bit=False)[0].has_adapter
