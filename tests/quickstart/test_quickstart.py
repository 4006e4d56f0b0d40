"""The quickstart is real: its files, and the main job from the packaged model to a model that answers."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import random
import re
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import pytest
from rich.console import Console

import jaxtune
from jaxtune import cli
from jaxtune.system import timing
from jaxtune.train import app
from jaxtune.train.config.file import load_config
from jaxtune.train.display.next_commands import next_commands
from jaxtune.train.evaluation import held_out_answers
from jaxtune.train.evaluation.evaluate import exact_match
from jaxtune.train.log.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxtune" / "quickstart"


@functools.cache
def made() -> dict[str, list[dict]]:
    """What the script makes, in whose rows the skill stands: {"train": rows, "eval": rows}."""
    folder = ROOT / "scripts" / "quickstart"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("make_instructions", folder / "make_instructions.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return dict(zip(("train", "eval"), module.rows(), strict=True))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("skills", None)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (PACKAGE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def question(row: dict) -> str:
    return row["messages"][0]["content"]


def answer(row: dict) -> str:
    return row["messages"][1]["content"]


def operands(row: dict) -> tuple[str, tuple[str, ...]]:
    """(skill, numbers and words in capitals of the question); a number in words is known by its answer."""
    found = sorted(re.findall(r"\d+|[A-Z]{2,}", question(row)))
    return row["skill"], tuple(found or [answer(row)])


# ---- the files


def test_no_held_out_question_is_trained_on():
    def hashes(name):
        return {hashlib.sha256(question(row).strip().lower().encode()).hexdigest() for row in rows(name)}

    train, held_out = hashes("train"), hashes("eval")
    assert len(train) == len(rows("train")) and len(held_out) == len(rows("eval"))
    assert not train & held_out


def test_no_held_out_operands_are_trained_on_for_the_same_skill():
    train, held_out = ({operands(row) for row in made()[name]} for name in ("train", "eval"))
    assert len(held_out) == len(rows("eval"))
    assert not train & held_out


def test_rows_are_many_and_their_answers_diverse():
    train, held_out = made()["train"], made()["eval"]
    assert 2000 <= len(train) <= 4000 and 200 <= len(held_out) <= 300
    for part in (train, held_out):
        # Nothing is won by always giving the same answer, or the same one for each skill.
        assert Counter(map(answer, part)).most_common(1)[0][1] / len(part) < 0.02
        skills = Counter(row["skill"] for row in part)
        best = Counter()
        for (skill, _), count in Counter((row["skill"], answer(row)) for row in part).items():
            best[skill] = max(best[skill], count)
        assert sum(best.values()) / len(part) < 0.10 and len(skills) >= 6


def test_the_script_makes_these_files():
    for name, rows_of in made().items():
        assert [{"messages": row["messages"]} for row in rows_of] == rows(name)


@pytest.mark.full
def test_the_base_model_is_small_and_of_llamas_shape():
    config = json.loads((PACKAGE / "base" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama" and config["head_dim"] == 64
    assert sum(file.stat().st_size for file in (PACKAGE / "base").iterdir()) <= 4_000_000
    model, tokenizer = jaxtune.from_pretrained(PACKAGE / "base")
    assert tokenizer.chat_template and "generation" in tokenizer.chat_template
    assert model.dtype == "bfloat16" and len(tokenizer) <= model.config.vocab_size


# ---- the run


def train(output: Path, *overrides: str, recipe: str = "quickstart") -> tuple[dict, str]:
    """(results.json, what was printed) of the quickstart, or of another recipe, into `output`."""
    config = load_config(recipe, [f"output={output}", *overrides])
    printed = io.StringIO()
    assert app.run(config, console=Console(file=printed, soft_wrap=True)) == 0
    return json.loads((output / "results.json").read_text(encoding="utf-8")), printed.getvalue()


@pytest.mark.full
def test_it_learns_to_answer(tmp_path):
    """One run, since it takes a minute: its scores, its folder, its last words."""
    output = tmp_path / "run"
    results, printed = train(output)
    assert results["before"]["rows"] == results["after"]["rows"] == len(rows("eval"))
    assert results["before"]["exact_match"] <= 0.10
    assert results["after"]["exact_match"] >= 0.80
    assert results["eval_loss"]["last"] < 0.2 * results["eval_loss"]["first"]
    assert "warning" not in printed

    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in (output / "adapter").iterdir()
    }
    assert load_config(str(output / "config.yaml")) == load_config("quickstart", [f"output={output}"])
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in steps if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]

    # The merged model and the adapter on its base give the same answers.
    merged, tokenizer = jaxtune.from_pretrained(output / "merged", dtype="float32")
    base, _ = jaxtune.from_pretrained(PACKAGE / "base", dtype="float32")
    scores = [
        exact_match(model, tokenizer, rows("eval")[:32], max_new_tokens=16)
        for model in (merged, jaxtune.load_adapter(base, output / "adapter"))
    ]
    assert scores[0] == scores[1] and scores[0][0] >= 0.80

    run = load_config(str(output / "config.yaml"))
    commands = [command for _, command in next_commands(output, run.data, run.model.path, asked=True)]
    assert len(commands) == 3 and str(output / "merged") in commands[0]
    assert all(command in printed for command in commands)
    configs = []
    for command in commands[1:]:
        words = [word for word in shlex.split(command) if word != "--plan"]
        recipe, *overrides = words[words.index("train") + 1 :]
        configs.append(load_config(recipe, overrides, rows_needed="--plan" not in command))
    assert configs[0].data.train == "rows.jsonl"
    assert configs[1].plan.device == "RTX 4090" and " --plan " in commands[2]


@pytest.mark.full
def test_with_shuffled_answers_it_learns_nothing(tmp_path):
    """The score comes from what the rows say, not from their form. In one epoch, in which the rows as they are teach to
    answer half of the questions (0.504)."""
    made = rows("train")
    answers = [answer(row) for row in made]
    random.Random(0).shuffle(answers)
    for row, other in zip(made, answers, strict=True):
        row["messages"][1]["content"] = other
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    less = ["epochs=1", "evaluation.at_start=false", "export.merged=false"]
    results, _ = train(tmp_path / "run", f"data.train={shuffled}", *less)
    assert results["after"]["exact_match"] < 0.15


@pytest.mark.full
def test_by_rewards_alone_it_learns_to_answer(tmp_path):
    """In 24 of 60 steps, on half of the held-out questions; docs/rewards.md has the scores of whole runs."""
    less = ["steps=24", "evaluation.exact_match_rows=120", "export.merged=false"]
    results, printed = train(tmp_path / "run", *less, recipe="quickstart-rewards")
    assert results["before"]["exact_match"] <= 0.02
    assert results["after"]["exact_match"] >= 0.30
    assert "24 steps of 8 prompts x 8 answers; rewards: exact_match" in printed


@pytest.mark.full
def test_check_of_rewards_shows_a_prompt(capsys):
    """There are no rows before the run: --check asked for some, and failed."""
    assert cli.main(["train", "quickstart-rewards", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "A prompt, to which the model samples answers during the run:" in shown and shown.rstrip().endswith("->")


def test_what_is_said_after_a_run(tmp_path):
    """The run's own results and profile; what else there is to try only after a first run."""
    (tmp_path / "merged").mkdir()
    first = load_config("quickstart", [f"output={tmp_path}"])
    own = load_config("lora-0.5b", ["data.train=rows.jsonl", f"output={tmp_path}"])
    assert len(next_commands(tmp_path, first.data, first.model.path, asked=True)) == 3
    assert len(next_commands(tmp_path, own.data, own.model.path, asked=False)) == 1
    (tmp_path / "profile").mkdir()
    (_, command) = next_commands(tmp_path, own.data, own.model.path, asked=False)[1]
    assert command.endswith(f"jaxtune profile show {tmp_path / 'profile'}")


def test_the_base_answers_after_the_first_step(tmp_path, monkeypatch):
    """Which comes sooner so; without its adapter the trained model is the base."""
    held_out = rows("eval")[:8]
    less = ["steps=2", "export.merged=false", f"evaluation.exact_match_rows={len(held_out)}"]
    steps = []

    def answer_after(*arguments):
        steps.append([line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line])
        return held_out_answers.answer(*arguments)

    monkeypatch.setattr("jaxtune.train.delivery.answer", answer_after)
    results, printed = train(tmp_path / "run", *less, "evaluation.sample_rows=8", "evaluation.max_new_tokens=6")
    assert steps == [[1, 2]] * 2 and printed.index("before training: ") < printed.index("after training: ")
    base, tokenizer = jaxtune.from_pretrained(PACKAGE / "base", dtype="float32")
    score, answers = exact_match(base, tokenizer, held_out, max_new_tokens=6)
    assert results["before"]["exact_match"] == score
    assert [sample["given"] for sample in results["before"]["samples"]] == [given for _, _, given in answers]
    assert results["after"]["samples"] != results["before"]["samples"]


def test_few_programs_are_compiled_until_the_first_step(tmp_path, monkeypatch):
    """A CPU takes 0.05 s or more for each, however small: accumulate, update, evaluate, the adapters' first values, and
    copies and zeros of the first state."""
    jax.clear_caches()
    compiled, push = [], timing.Recorder.push

    def noted(recorder, phase):
        if phase.name == "compile":
            compiled.append(phase.part)
        push(recorder, phase)

    monkeypatch.setattr(timing.Recorder, "push", noted)
    words = ["steps=1", "evaluation.exact_match_rows=0", "export.merged=false", f"output={tmp_path}/run"]
    with timing.recording(time.monotonic()):
        assert app.run(load_config("quickstart", words), console=Console(file=io.StringIO())) == 0
    assert len(compiled) <= 24, Counter(compiled)
