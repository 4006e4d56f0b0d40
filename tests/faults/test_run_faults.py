"""What a run must survive: changed rows, disks that are full, plots that fail, ruined weights, signals anywhere."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxtune import cli
from jaxtune.train import delivery
from jaxtune.train.callbacks import Callback, TrainingStopped
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    OptimConfig,
    ProfileConfig,
    ScheduleConfig,
)
from jaxtune.train.config.file import config_to_dict, config_to_yaml, load_config
from jaxtune.train.engine.programs import Engine
from jaxtune.train.evaluation import held_out_answers
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.record import require_same_config
from jaxtune.train.folder.results import PROOF, read_result
from jaxtune.train.log import metrics as m
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.loop import run
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.spec import loading
from jaxtune.train.trainer import Trainer
from tests.faults.command import STEPS, make_folder
from tests.train.tiny_runs import LENGTH, assert_same, dataset, documents, lora_model, make_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run that made no checkpoint; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    assert cli.main(["train", str(make_folder(folder))]) == 0
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of it. The recipe still names the first folder's model and rows, but its own output."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copy(finished / "rows.jsonl", tmp_path)
    recipe = (finished / "recipe.yaml").read_text()
    recipe = recipe.replace(f"{finished}/run", f"{tmp_path}/run").replace(f"{finished}/rows", f"{tmp_path}/rows")
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "run" / "config.yaml").write_text(config_to_yaml(load_config(str(tmp_path / "recipe.yaml"))))
    return tmp_path


def train(folder: Path, *overrides: str) -> int:
    return cli.main(["train", str(folder / "recipe.yaml"), *overrides])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- results belong to the run that wrote them


@pytest.mark.full
def test_results_prove_whose_they_are(finished):
    for name in ("adapter", "merged"):
        result = read_result(finished / "run" / name)
        assert result.step == STEPS and result.run["config.seed"] == 0 and "data.tokens_crc32" in result.run


@pytest.mark.full
def test_changed_rows_do_not_leave_old_results_as_if_they_were_new(folder, capsys):
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace("red", "pink"))
    before = contents(folder / "run")
    assert train(folder) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert "adapter is the result of another run; move it away, or choose another output" in said
    assert "data.tokens_crc32: saved" in said
    changed = contents(folder / "run")
    assert {name for name in changed if changed[name] != before.get(name)} == set()


def test_the_same_command_again_is_a_complete_run(folder, capsys):
    before = contents(folder / "run")
    assert train(folder) == 0
    assert (
        f"this run is complete: {folder}/run/adapter, {folder}/run/merged hold what it led to"
        in capsys.readouterr().out
    )
    assert contents(folder / "run") == before


@pytest.mark.full
@pytest.mark.parametrize("saves", ["null", "4"])
def test_a_finished_run_tells_its_result_again_without_work(folder, saves, monkeypatch, capsys):
    def work(*_, **__):
        raise AssertionError("it worked")

    def told():
        return [line for line in capsys.readouterr().out.splitlines() if "exact match" in line or " -> " in line]

    shutil.rmtree(folder / "run")
    asked = ["evaluation.exact_match_rows=2", "evaluation.at_start=true", "evaluation.max_new_tokens=2"]
    asked.append(f"checkpoint.every_steps={saves}")
    assert train(folder, *asked, "steps=4") == 0
    result, before = told(), contents(folder / "run")
    assert [line.partition(":")[0] for line in result if "exact" in line] == ["before training", "after training"]
    with monkeypatch.context() as patch:
        patch.setattr(held_out_answers, "exact_match", work)
        patch.setattr(Engine, "fit", work)
        patch.setattr(Engine, "evaluate", work)
        assert train(folder, *asked, "steps=4") == 0
    assert told() == result and contents(folder / "run") == before
    shutil.rmtree(folder / "run" / "adapter")
    assert train(folder, *asked, "steps=4") == 0  # made again; what was measured before training stays
    assert contents(folder / "run")["results.json"] == before["results.json"]


@pytest.mark.parametrize("damage", ["flipped", "missing", "no proof", "torn proof", "foreign"])
def test_a_result_that_proves_nothing_is_not_taken_for_one(folder, damage, capsys):
    result = folder / "run" / "merged"
    weights = result / "model.safetensors"
    if damage == "flipped":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "missing":
        weights.unlink()
    elif damage == "no proof":
        (result / PROOF).unlink()
    elif damage == "torn proof":
        (result / PROOF).write_bytes((result / PROOF).read_bytes()[:100])
    else:
        shutil.rmtree(result)
        result.mkdir()
        (result / "notes.txt").write_text("mine")
    before = contents(result)
    assert train(folder) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert str(result) in said and "move it away, or choose another output" in said
    assert contents(result) == before
    with pytest.raises(ValueError, match="merged"):
        read_result(result)


def test_a_missing_result_is_made_again_and_the_others_are_replaced(folder):
    shutil.rmtree(folder / "run" / "merged")
    assert train(folder) == 0
    assert read_result(folder / "run" / "merged").step == read_result(folder / "run" / "adapter").step == STEPS
    assert not list((folder / "run").glob(".*"))


# ---- what `jaxtune evaluate` scores


def evaluated(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert cli.main(["evaluate", *arguments]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert f"weights: {result['weights']}" in err
    assert f"evaluation loss {result['eval_loss']:.4f} over {result['eval_targets']:,} targets\n" in err
    return result


def test_a_run_s_config_evaluates_what_the_run_led_to(folder, capsys):
    run, config = folder / "run", str(folder / "run" / "config.yaml")
    last = [line["eval_loss"] for line in read_metrics(run / "metrics.jsonl") if "eval_loss" in line][-1]
    of_adapter = evaluated(capsys, config)
    assert of_adapter["weights"].startswith(f"{run / 'adapter'} (step {STEPS}) on ")
    assert of_adapter["eval_loss"] == pytest.approx(last, abs=1e-6)

    untrained = evaluated(capsys, str(folder / "recipe.yaml"))
    assert untrained["weights"].endswith("with a new adapter, untrained")
    assert untrained["eval_loss"] > last + 1e-3

    shutil.rmtree(run / "adapter")
    of_merged = evaluated(capsys, config)
    assert of_merged["weights"] == f"{run / 'merged'} (step {STEPS})"
    assert of_merged["eval_loss"] == pytest.approx(last, abs=2e-2)  # its weights are bfloat16

    shutil.rmtree(run / "merged")
    assert cli.main(["evaluate", config]) == cli.USER_ERROR
    assert f"{run} has no trained weights: no adapter, merged or checkpoint yet" in capsys.readouterr().err
    chosen = evaluated(capsys, config, "adapter=null")
    assert chosen["eval_loss"] == pytest.approx(untrained["eval_loss"], abs=1e-6)


@pytest.mark.full
def test_a_run_with_checkpoints_alone_is_evaluated_from_the_last(folder, capsys):
    shutil.rmtree(folder / "run")
    assert train(folder, "checkpoint.every_steps=2", "export.adapter=false", "export.merged=false") == 0
    last = [line["eval_loss"] for line in read_metrics(folder / "run" / "metrics.jsonl") if "eval_loss" in line][-1]
    found = evaluated(capsys, str(folder / "run" / "config.yaml"))
    assert found["weights"] == f"checkpoint of step {STEPS} in {folder / 'run' / 'checkpoints'}"
    assert found["eval_loss"] == last


def test_questions_that_cannot_be_asked_are_found_before_training(folder, capsys):
    shutil.rmtree(folder / "run")
    rows = folder / "held_out.jsonl"
    for row, words in (
        ({"text": "red"}, "no row is a conversation that ends with an answer"),
        ({"prompt": "red" * 200, "completion": " blue"}, "positions: shorten one of them"),
    ):
        short = row | {"prompt": "red"} if "prompt" in row else row
        rows.write_text(json.dumps(row) + "\n" + json.dumps(short) + "\n")
        assert train(folder, f"data.eval={rows}", "evaluation.exact_match_rows=1", "data.length=128") == 2
        assert words in capsys.readouterr().err
        assert not (folder / "run").exists()


# ---- decoration


def test_a_plot_or_profile_that_cannot_be_written_loses_nothing(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device", "loss.png")

    shutil.rmtree(folder / "run")
    monkeypatch.setattr(m, "loss_plot", full)
    monkeypatch.setattr(run, "capture", full)
    assert train(folder, "profile.steps=1", "profile.start=1") == 0
    assert "loss.png was left out: OSError: [Errno 28] No space left" in caplog.text
    assert "the profile was left out: OSError" in caplog.text
    assert read_result(folder / "run" / "merged").step == STEPS


@pytest.mark.full
def test_steps_that_a_profile_will_not_hold_are_said_at_the_start(tmp_path, capsys):
    def train(steps, profile):
        plain = dict(checkpoint=CheckpointConfig(every_steps=2), schedule=ScheduleConfig(name="constant"))
        config = make_config(tmp_path, steps=steps, profile=profile, **plain)
        Trainer(lora_model(), None, config, dataset(documents(12))).train()
        return capsys.readouterr().err

    said = train(2, ProfileConfig(steps=3, start=1))
    assert "the profile will hold only 1 of profile.steps = 3: 2 steps are left, of which the first profile" in said
    assert json.loads((tmp_path / "profile" / "profile.json").read_text())["meta"]["tokens_per_step"]
    shutil.rmtree(tmp_path / "profile")
    said = train(5, ProfileConfig(steps=3, start=3))
    assert "the profile will hold no step: 3 steps are left" in said and said.index("set it below 3") < said.index(
        "compiling"
    )
    assert not (tmp_path / "profile").exists()
    assert "the profile" not in train(8, ProfileConfig(steps=2, start=1))
    assert (tmp_path / "profile").exists()


# ---- records


@pytest.mark.full
def test_a_torn_config_is_recognised(tmp_path):
    trainer = Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(12)))
    config = trainer.config
    whole = config_to_yaml(config)
    for torn in ("", "\0\0\0", whole[:100], whole[:100] + "\0\0"):
        (tmp_path / "config.yaml").write_text(torn)
        require_same_config(tmp_path, config_to_dict(config))
    (tmp_path / "config.yaml").write_text(whole[:100])
    trainer.train()
    assert (tmp_path / "config.yaml").read_text() == whole
    (tmp_path / "config.yaml").write_text(whole.replace("seed: 0", "seed: 1"))
    refused = r"belongs to another run .*choose another folder, such as output=.*-2, or delete that config.yaml"
    with pytest.raises(ValueError, match=refused):
        require_same_config(tmp_path, config_to_dict(config))


STRANGE = [
    b'{"step": 1, "loss": 2.0}',
    b'{"step": "1"}',
    b'{"step": null}',
    b"{}",
    b"[1]",
    b"\0\0\0",
    b'{"step": 1e400}',
    b"7",
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b'{"step": true}',
    b'{"step": 1, "loss": [[]]}',
]


def test_strange_lines_of_metrics_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(STRANGE) + b'\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 1]
    with m.MetricsLogger(tmp_path, resumed_step=1) as log:
        log.log(2, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(path)] == [1, 1, 2]
    m.loss_plot(tmp_path, "targets")


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"run.lock is a link, which no run creates: remove it"):
        Trainer(lora_model(), None, make_config(tmp_path / "run", steps=1), dataset(documents(12))).train()
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_a_killed_export_left_is_removed(folder):
    (folder / "run" / ".merged.123-abcd0123.tmp").mkdir()
    assert train(folder) == 0
    assert not (folder / "run" / ".merged.123-abcd0123.tmp").exists()


# ---- ruined weights


class Ruined(Trainer):
    """After step `at`, every loss is NaN: what one huge update leaves."""

    at = 3

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        accumulate, self.tried = self.engine.accumulate, 0

        def ruined(programs, sums, state, *others):
            sums = accumulate(programs, sums, state, *others)
            self.tried += 1
            if self.tried <= self.at:
                return sums
            bad_sums = dataclasses.replace(sums.tree, loss=sums.tree.loss * np.float32("nan"))
            return self.engine.flat(state.tree, bad_sums)[1]

        self.engine.accumulate = ruined


def ruined_config(output: Path, **changes):
    return make_config(
        output,
        steps=12,
        checkpoint=CheckpointConfig(every_steps=1, every_minutes=None, keep=1),
        guards=GuardConfig(max_nonfinite_in_row=4),
        **changes,
    )


@pytest.mark.full
def test_ruined_weights_do_not_replace_a_good_checkpoint(tmp_path, caplog, capsys):
    trainer = Ruined(lora_model(), None, ruined_config(tmp_path), dataset(documents(40)))
    with pytest.raises(TrainingStopped, match="4 steps in a row were not finite"):
        trainer.train()
    # Step 3's weights led to nothing but skipped updates; step 2's led to step 3.
    assert saved_steps(tmp_path / "checkpoints") == [2]
    assert "step_00000003, whose steps were not finite; step 2 is the newest now" in caplog.text
    assert "not saved while updates are being skipped" in capsys.readouterr().err

    trained = Trainer(lora_model(), None, ruined_config(tmp_path), dataset(documents(40))).train()
    straight = Trainer(lora_model(), None, ruined_config(tmp_path / "straight"), dataset(documents(40))).train()
    assert_same(trained, straight)
    assert saved_steps(tmp_path / "checkpoints") == [12]  # and one is kept, as asked


def test_a_save_that_a_callback_asks_for_waits_until_updates_are_made_again(tmp_path, capsys):
    class Asks(Callback):
        seen: tuple[int, ...] = ()

        def between(self, moment):
            if moment.step == 5:
                moment.save()
                trainer.at = 100  # the numbers of steps 4 and 5 are not finite, later ones are

        def saved(self, step):
            self.seen += (step,)

    asks = Asks()
    never = CheckpointConfig(every_steps=None, every_minutes=None, keep=1)
    config = dataclasses.replace(ruined_config(tmp_path), steps=8, checkpoint=never)
    trainer = Ruined(lora_model(), None, config, dataset(documents(40)), callbacks=[asks])
    trainer.train()
    assert asks.seen == (6,) and saved_steps(tmp_path / "checkpoints") == [6]
    assert "step 5: not saved while updates are being skipped" in capsys.readouterr().err


def test_ruined_weights_make_way_too_where_an_evaluation_finds_them(tmp_path):
    """No save is due, so the numbers of the last step are first waited for by the evaluation after it."""
    config = dataclasses.replace(
        ruined_config(tmp_path),
        checkpoint=CheckpointConfig(every_steps=3, every_minutes=None, keep=1),
        guards=GuardConfig(max_nonfinite_in_row=2),
        evaluation=EvaluationConfig(every_steps=8),
        data=DataConfig(train="rows", eval="held-out rows", length=LENGTH),
    )
    trainer = Ruined(lora_model(), None, config, dataset(documents(40)), dataset(documents(4, seed=2)))
    trainer.at = 6
    with pytest.raises(TrainingStopped, match="2 steps in a row were not finite"):
        trainer.train()
    assert saved_steps(tmp_path / "checkpoints") == [3]


# ---- signals


class Signalled(Trainer):
    """Sends itself SIGTERM between the batches of the evaluation after `when` steps."""

    when = 4

    def __init__(self, *arguments):
        super().__init__(*arguments)
        real = self.engine.evaluate

        def evaluate(program, trainable, frozen, batches, shown, between, load):
            calls = []

            def then():
                calls.append(1)
                if len(calls) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert len(calls) == 1, "another batch was evaluated"
                between()

            step, _ = between.args  # of Saver.poll: what is done between two batches
            return real(program, trainable, frozen, batches, shown, then if step == self.when else between, load)

        self.engine.evaluate = evaluate


def signalled_config(output, **changes):
    settings = dict(
        steps=6,
        checkpoint=CheckpointConfig(every_minutes=60.0),
        evaluation=EvaluationConfig(every_steps=2),
        rows_per_step=2,
        data=DataConfig(train="rows", eval="held-out rows", length=LENGTH),
    )
    return make_config(output, **(settings | changes))


@pytest.mark.full
@pytest.mark.parametrize("when", [4, 6], ids=["between", "at the end"])
def test_a_signal_in_an_evaluation_saves_and_leaves(tmp_path, when):
    data = dataset(documents(20)), dataset(documents(12, seed=2))
    trainer = Signalled(lora_model(), None, signalled_config(tmp_path / "run"), *data)
    trainer.when = when
    assert trainer.eval_batches.steps_per_epoch > 2
    with pytest.raises(TrainingInterrupted, match=f"SIGTERM after step {when}; saved in "):
        trainer.train()
    assert saved_steps(tmp_path / "run" / "checkpoints") == [when]
    Trainer(lora_model(), None, signalled_config(tmp_path / "run"), *data).train()
    Trainer(lora_model(), None, signalled_config(tmp_path / "straight"), *data).train()
    lines = []
    for name in ("run", "straight"):
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        lines.append([(line["step"], line["eval_loss"]) for line in found if "eval_loss" in line])
    assert lines[0] == lines[1]  # the evaluation that was stopped is made before the next step


def test_the_last_state_is_saved_before_its_evaluation(tmp_path):
    class Killed(BaseException):
        pass

    def dies(*arguments):
        raise Killed

    config = signalled_config(tmp_path, evaluation=EvaluationConfig())
    trainer = Trainer(lora_model(), None, config, dataset(documents(20)), dataset(documents(12, seed=2)))
    trainer.engine.evaluate = dies
    with pytest.raises(Killed):
        trainer.train()
    assert saved_steps(tmp_path / "checkpoints") == [6]


def test_a_signal_while_nothing_would_be_lost_leaves_at_once():
    with StopSignal() as stop, pytest.raises(Interrupted, match="SIGTERM"), stop.at_once():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")
    with StopSignal() as stop:
        with stop.at_once(), stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            stop.requested = stop._handled = False  # acted on
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"), stop.at_once():
            raise AssertionError("a signal that came before was forgotten")


@pytest.mark.parametrize("where", ["loading", "export"])
def test_a_signal_outside_the_loop_leaves_with_the_code_for_again(folder, where, monkeypatch, capsys):
    shutil.rmtree(folder / "run")

    def send(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    module, name = {"loading": (loading, "load_tokenizer"), "export": (delivery, "save_weights")}[where]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, send)
        assert train(folder, "checkpoint.every_steps=4") == EXIT_SAVED
    assert "stopped: SIGTERM. The same command continues from there." in capsys.readouterr().out
    run = folder / "run"
    assert not list(run.glob(".*")) and not (run / "merged").exists()
    assert train(folder, "checkpoint.every_steps=4") == 0
    assert read_result(run / "merged").step == STEPS
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == list(range(1, STEPS + 1))


# ---- going on


@pytest.mark.full
def test_a_run_at_a_constant_rate_can_be_given_more_steps(tmp_path, capsys):
    def trained(name, steps):
        config = make_config(tmp_path / name, steps=steps, checkpoint=CheckpointConfig(every_steps=2))
        return Trainer(lora_model(lora_dropout=0.1), None, config, dataset(documents(40))).train()

    trained("run", 4)
    longer = trained("run", 6)
    assert "changed: config.steps: saved 4, now 6" in capsys.readouterr().out
    assert_same(longer, trained("straight", 6))
    with pytest.raises(ValueError, match="steps = 5: the last checkpoint is of step 6"):
        trained("run", 5)


@pytest.mark.full
def test_a_run_with_a_schedule_that_is_made_longer_says_its_rates(tmp_path, capsys):
    def trainer(steps):
        config = make_config(
            tmp_path,
            steps=steps,
            schedule=ScheduleConfig(name="linear"),
            optim=OptimConfig(learning_rate=1e-3),
            checkpoint=CheckpointConfig(every_steps=2),
        )
        return Trainer(lora_model(), None, config, dataset(documents(40)))

    trainer(2).train()
    trainer(4).train()
    said = capsys.readouterr().out
    assert "changed: config.steps: saved 2, now 4" in said
    assert "follows the linear schedule of 4 steps, and is 0.0005 in step 3" in said
