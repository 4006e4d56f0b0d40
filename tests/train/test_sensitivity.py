"""`jaxtune sensitivity`: the matrix that was made to suffer is found, and the map that is printed loads as measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

import jaxtune
from jaxtune.cli import main
from jaxtune.models.components import components
from jaxtune.pallas.formats import Stored
from jaxtune.train.config.file import load_config
from jaxtune.train.sensitivity import Matrix, Sensitivity, choose, model_and_batches

PACKAGED = Path(jaxtune.__file__).parent / "quickstart" / "base"
HARMED = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The packaged model, one of whose matrices has an outlier in each row that takes NF4's precision from the rest."""
    model, tokenizer = jaxtune.from_pretrained(PACKAGED, dtype="float32")
    for each, _, module in components(model):
        if each.name == HARMED:
            weight = module.weight.get_value()
            module.weight = module.weight.replace(weight.at[:, ::64].set(20 * abs(weight).max()))
    folder = tmp_path_factory.mktemp("sensitivity") / "base"
    jaxtune.save_pretrained(model, folder, tokenizer)
    return folder


def printed(capsys, *arguments: str) -> str:
    assert main(["sensitivity", "quickstart", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_the_map_keeps_what_suffers_most_and_loads_as_measured(base, capsys, tmp_path):
    """The map's model is loaded by the train command's own path, and its divergence is the one that was printed."""
    path = f"model.path={base}"
    plain, batches = model_and_batches(load_config("quickstart", [path]), 4)
    of = Sensitivity(plain, batches, "nf4")
    packed = {each.name: each for each in of.measure()}
    smallest = of.weight_bytes - sum(each.saved_bytes for each in packed.values())
    most = smallest + packed[HARMED].saved_bytes
    text = printed(capsys, path, "--rows", "4", "--memory-gb", repr(most / 1e9))
    assert f"  {HARMED} (" in text.splitlines()[1]
    keys = yaml.safe_load(text)
    assert keys == {"model": {"load_in": "nf4"}, "precision": {"*": "fp32", HARMED: "fp32"}}

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**keys, "data": {"train": "rows"}, "adapter": {}}))
    config = load_config(str(tmp_path / "recipe.yaml"), [path])
    model, _ = jaxtune.from_pretrained(base, dtype="float32", load_in=config.model.load_in, precision=config.components)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) == most
    weights = {each.name: module.weight.get_value() for each, _, module in components(model)}
    assert [name for name in packed if not isinstance(weights[name], Stored)] == [HARMED]
    graph, state = nnx.split(model)
    logits = [nnx.merge(graph, state)(b.tokens, b.segment_ids, b.positions) for b in batches]
    expected = [plain(b.tokens, b.segment_ids, b.positions) for b in batches]
    found = 0.0
    for batch, ours, whole in zip(batches, logits, expected, strict=True):
        log_p, log_q = jax.nn.log_softmax(whole), jax.nn.log_softmax(ours)
        found += float(((np.exp(log_p) * (log_p - log_q)).sum(-1) * batch.weights).sum())
    lost = next(line for line in text.splitlines() if "all but 1" in line)
    assert float(lost.split()[1]) == pytest.approx(found / of.tokens, rel=0.02)
    assert packed[HARMED].loss > 10 * max(each.loss for name, each in packed.items() if name != HARMED)
    assert of.divergence([]) < 1e-7


def test_a_kind_that_stays_in_eight_bits(base, capsys):
    """Measured as one; what is kept costs the bytes of its format, and the whole choice is measured in it."""
    path = f"model.path={base}"
    plain, batches = model_and_batches(load_config("quickstart", [path]), 1)
    of = Sensitivity(plain, batches, "nf4", kinds=True, kept_in="int8")
    found = {each.name: each for each in of.measure()}
    harmed = HARMED.rpartition(".")[2]
    assert found.keys() == of.modules.keys() and all(len(modules) > 1 for modules in of.modules.values())
    assert max(found.values(), key=lambda each: each.loss / each.extra_bytes).name == harmed
    singles = {each.name: each for each in Sensitivity(plain, batches[:1], "nf4").measure()}
    assert found[harmed].packed_bytes == sum(singles[name].packed_bytes for name in of.modules[harmed])
    smallest = of.weight_bytes - sum(each.saved_bytes for each in found.values())
    most = (smallest + found[harmed].extra_bytes) / 1e9
    text = printed(capsys, path, "--rows", "1", "--by", "kinds", "--keep", "int8", "--memory-gb", repr(most))
    assert yaml.safe_load(text)["precision"] == {"*": "fp32", harmed: "int8"}
    lost = float(next(line for line in text.splitlines() if "all but 1" in line).split()[1])
    others = [name for name in found if name != harmed]
    assert lost < of.divergence() and lost == pytest.approx(of.divergence(others, [harmed]), 0.02)


@pytest.mark.full
def test_all_of_a_kind_become_one_pattern(base, capsys):
    """With room for all of them, the map names each kind once; without --memory-gb only figures are printed."""
    text = printed(capsys, f"model.path={base}", "--rows", "1", "--format", "int8", "--memory-gb", "100")
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert yaml.safe_load(text)["precision"] == {"*": "fp32"} | dict.fromkeys(kinds, "fp32")
    assert yaml.safe_load(printed(capsys, f"model.path={base}", "--rows", "1", "--format", "int8")) is None


def test_choose():
    """By hand: of 1,000 bytes, 250 remain for what stays; b loses most a byte, c does not fit beside it, a does."""
    matrices = [Matrix("a", 1.0, 200, 100), Matrix("b", 9.0, 300, 150), Matrix("c", 4.0, 500, 300)]
    assert choose(matrices, 1000, 550 + 250) == ["a", "b"]
    assert choose(matrices, 1000, 550) == []
    with pytest.raises(ValueError, match=r"--memory-gb 5.4e-07: with all matrices quantised the weights take 0.00 GB"):
        choose(matrices, 1000, 540)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective=dpo", "evaluation.exact_match_rows=0"],
            "objective = dpo: the rows must be those of supervised fine-tuning",
        ),
        (["precision={'*': fp32, norms: fp32}"], "precision names modules already, such as 'norms'"),
        (
            [
                "data.streaming=true",
                "data.eval=null",
                "evaluation.at_start=false",
                "evaluation.exact_match_rows=0",
                "steps=2",
                "epochs=null",
            ],
            "the rows are streamed or mixed",
        ),
    ],
)
def test_what_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        model_and_batches(load_config("quickstart", overrides), 1)


def test_all_rows_that_are_asked_for_are_measured(base, tmp_path):
    """Ten rows of 2,048 tokens make two whole batches and half of one."""
    rows = [{"prompt": f"Count {n}:", "completion": " one two three"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"model.path={base}", f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=null", "data.packing=false"]
    changes += ["data.length=2048", f"data.cache_dir={tmp_path}", "data.template=null"]
    config = load_config("quickstart", [*changes, "evaluation.at_start=false", "evaluation.exact_match_rows=0"])
    for count in (1, 4, 10, 16, 99):
        _, batches = model_and_batches(config, count)
        assert len({batch.tokens.shape for batch in batches}) == 1
        assert sum(int(batch.segment_ids.any(1).sum()) for batch in batches) == min(count, 16)


def test_a_recipe_for_more_devices_than_there_are_is_measured_on_one():
    config = load_config("quickstart", ["mesh.data=64", "rows_per_step=64", "profile.start=99"])
    assert len(model_and_batches(config, 2)[1]) >= 1
