"""Cards have what the hub reads, and a user's card stays."""

from __future__ import annotations

import json

import jax
import pytest
import yaml
from tiny import CONFIGS
from tiny_models import adapted_model

import jaxtune
from jaxtune.models.files import model_card
from jaxtune.models.hf import model_from_config
from jaxtune.system.version import __version__
from jaxtune.train.folder.results import read_result, write_result

FACTS = model_card.Facts(
    base="org/model", tags=["sft"], datasets=["org/rows:main:train", "rows.jsonl"], figures={"loss | mean": 0.25}
)


def fields(folder) -> dict:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front) | {"body": body}


@pytest.mark.parametrize("kind", ["adapter", "merged", "gguf", "fp8"])
def test_a_card_has_what_the_hub_reads(tmp_path, kind):
    model_card.write(tmp_path, FACTS, kind)
    found = fields(tmp_path)
    library, relation = {"adapter": ("peft", "adapter"), "merged": ("transformers", "finetune")}.get(
        kind, ("gguf" if kind == "gguf" else "transformers", "quantized")
    )
    assert found["base_model"] == "org/model" and found["datasets"] == ["org/rows"]
    assert (found["library_name"], found["base_model_relation"]) == (library, relation)
    assert found["tags"] == ["jaxtune", "sft"] and r"| loss \| mean | 0.25 |" in found["body"]


def test_a_local_base_is_no_field(tmp_path):
    for base in (str(tmp_path), "", "./runs/merged"):
        model_card.write(tmp_path, {**FACTS, "base": base}, "merged")
        assert "base_model" not in fields(tmp_path)


@pytest.mark.parametrize("change", [lambda text: "# Mine", lambda text: text.replace("0.25", "0.2"), lambda text: ""])
def test_a_users_card_stays(tmp_path, change):
    model_card.write(tmp_path, FACTS, "adapter")
    file = tmp_path / "README.md"
    assert model_card.is_ours(file.read_text())
    model_card.write(tmp_path, {**FACTS, "figures": {"loss": 0.125}}, "adapter")
    assert "0.125" in file.read_text()
    model_card.write(tmp_path, FACTS, "adapter")
    file.write_text(changed := change(file.read_text()))
    model_card.write(tmp_path, FACTS, "merged")
    assert file.read_text() == changed


def test_a_run_that_is_made_longer_keeps_a_users_card(tmp_path):
    folder, run = tmp_path / "adapter", {"version": 4}
    write_result(folder, run, 2, lambda inner: (inner / "a").write_text("a"), FACTS)
    made = json.loads((folder / "jaxtune_run.json").read_text())["made"]
    assert made["jaxtune"] == __version__ and "cpu" in made["devices"] and made.keys() >= {"command", "date"}
    assert fields(folder)["library_name"] == "peft" and fields(folder)["body"].startswith("# adapter")
    (folder / "README.md").write_text("# Mine")
    assert read_result(folder).step == 2 and not read_result(folder).added


def test_what_is_exported_has_the_runs_facts(tmp_path):
    base = model_from_config(CONFIGS["llama"], jax.random.key(0), "float32")
    jaxtune.save_pretrained(base, tmp_path / "base")
    model, _ = jaxtune.from_pretrained(tmp_path / "base", dtype="float32")
    jaxtune.save_adapter(adapted_model(model, r=2), tmp_path / "adapter")
    (tmp_path / "adapter" / "jaxtune_run.json").write_text(json.dumps({"card": FACTS}))
    facts = model_card.of_folder(tmp_path / "adapter")
    assert facts == FACTS
    done = jaxtune.export_model(adapted_model(model, r=2), tmp_path / "out", "adapter", facts=facts)
    assert {"README.md", "jaxtune_run.json"} <= {*done.files} and fields(done.folder)["tags"] == [
        *("jaxtune", "sft", "adapter")
    ]
    assert model_card.of_folder(done.folder) == FACTS
