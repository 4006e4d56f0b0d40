"""What a GGUF file has no place for is named, or, if it was trained, refused by name."""

from __future__ import annotations

import json
import re

import jax
import picture_rows as rows
import pytest
from tiny_models import shaken

import jaxtune
from jaxtune.export.adapters import rank_notes
from jaxtune.models.adapters.trained_over import RUN_RECORD
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import linears, with_trained_tower

pytest.importorskip("gguf")

_FOLLOWED = {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 3, "rope_local_base_freq": 1e4}
GEMMA3 = rows.GEMMA3 | {"text_config": rows.GEMMA3["text_config"] | _FOLLOWED}  # as llama.cpp has it
TOWERS = {"qwen3_vl": rows.QWEN3_VL, "gemma3": GEMMA3, "gemma4": rows.GEMMA4}


def vision(name: str):
    return model_from_config(TOWERS[name], jax.random.key(0), "float32", pictures=True)


def refused(model, path, tokenizer, to: str = "gguf") -> str:
    with pytest.raises(ValueError) as error:
        jaxtune.export_model(model, path, to, tokenizer=tokenizer)
    assert not path.exists()
    return str(error.value)


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_that_is_left_out_is_named(tmp_path, tokenizer, name, pictures):
    """With and without the tower in memory; by the note and the Modelfile."""
    jaxtune.save_pretrained(vision(name), tmp_path / "base")
    model, _ = jaxtune.from_pretrained(tmp_path / "base", dtype="float32", pictures=pictures)
    adapted = shaken(
        jaxtune.get_peft_model(model, r=2, target_modules=["up_proj"], exclude_modules=".*(vision|visual).*")
    )
    for number, exported in enumerate((model, adapted)):
        done = jaxtune.export_model(exported, tmp_path / f"out{number}", "gguf", tokenizer=tokenizer)
        (note,) = [note for note in done.notes if "without model." in note]
        assert re.search(r"without model\.(visual|embed_vision|multi_modal_projector) \(\d+ tensors?\)", note)
        assert f"# {note}" in (done.folder / "Modelfile").read_text().splitlines()


@pytest.mark.parametrize("to", ["gguf", "gguf-adapter"])
@pytest.mark.parametrize("name", TOWERS)
def test_an_adapter_of_any_linear_of_a_tower_is_refused(tmp_path, tokenizer, name, to):
    model = vision(name)
    assert model.vision is not None
    prefixes = model.vision.config.prefixes
    names = [each for each, _ in linears(model) if each.startswith(prefixes)]
    for target in (names[0], names[-1]):
        adapted = jaxtune.get_peft_model(model, r=2, target_modules=[target])
        assert target in refused(adapted, tmp_path / "out", tokenizer, to)


@pytest.mark.parametrize(("layers", "merger"), [(True, False), (False, True), (True, True)])
def test_a_tower_that_trained_whole_is_refused(tmp_path, tokenizer, layers, merger):
    """In memory, and in the folder of a run, by its record."""
    trained = with_trained_tower(vision("qwen3_vl"), layers, merger)
    message = refused(trained, tmp_path / "out", tokenizer)
    assert re.search(r"to = 'gguf': model\.visual\.\S+ was trained.* take merged", message)
    jaxtune.save_pretrained(trained, tmp_path / "merged")
    for tower in ("merger", "frozen"):
        record = {"run": {"config.model.tower": tower}}
        (tmp_path / "merged" / RUN_RECORD).write_text(json.dumps(record))
        for pictures in (False, True):
            model, _ = jaxtune.from_pretrained(tmp_path / "merged", dtype="float32", pictures=pictures)
            if tower == "merger":
                assert "model.tower = 'merger'" in refused(model, tmp_path / "out", tokenizer)
    assert jaxtune.export_model(model, tmp_path / "out", "gguf", tokenizer=tokenizer).notes


def test_a_text_model_has_no_such_note(tmp_path, tokenizer):
    from llama_cpp_models import made

    done = jaxtune.export_model(made("llama"), tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert not [note for note in done.notes if "without" in note]


@pytest.mark.parametrize(
    ("rank", "words"), [(16, None), (17, "--max-lora-rank 32"), (300, "rank 320"), (512, "rank 512"), (513, "no rank")]
)
def test_what_vllm_needs_beyond_its_defaults(rank, words):
    notes = rank_notes(rank)
    assert not notes if words is None else words in notes[0]
