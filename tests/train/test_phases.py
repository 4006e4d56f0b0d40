"""What a run holds beside its step: at a resume and in an evaluation. Each is measured in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from step_costs import phase_sections

from jaxtune.train.config import CheckpointConfig, EvaluationConfig, MemoryConfig, OptimConfig
from jaxtune.train.planning.choice import PlanError
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import phase_lines, phases_of
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import gc, json, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests/models"]
import jax
from flax import nnx
from tiny_models import tiny_model
from jaxtune.train.folder import checkpoint
from jaxtune.train.config import CheckpointConfig, EvaluationConfig
from jaxtune.train.engine.programs import Engine
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

output, what = sys.argv[1:]
seen = dict(restored=0, step=0, evaluated=0)

def watched(owner, name, key):
    real = getattr(owner, name)

    def measured(*arguments, **options):
        result = real(*arguments, **options)
        while True:
            gc.collect()
            try:
                live = {{a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays()}}  # a shared buffer counts once
                break
            except jax.errors.JaxRuntimeError:  # another thread has just donated one of them to a step
                continue
        seen[key] = max(seen[key], sum(live.values()))
        return result

    setattr(owner, name, measured)

watched(checkpoint, "_place", "restored")
watched(Engine, "zero_sums", "restored")
watched(Engine, "accumulate", "step")
watched(Engine, "place", "evaluated" if what == "evaluate" else "step")
model = tiny_model("bfloat16", hidden_size=256, intermediate_size=512)
weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
config = make_config(output, steps=2 if what == "first" else 4, precision="bf16",
    checkpoint=CheckpointConfig(every_steps=2, every_minutes=None))
trainer = Trainer(model, None, config, dataset(documents(12)), dataset(documents(6, seed=1)), keeps_model=False,
    trains=what != "evaluate")
del model
if what == "evaluate":
    loss = trainer.evaluate()["eval_loss"]
else:
    trainer.train()
print(json.dumps(seen | dict(parameters=weights)))
"""


def measured(output: Path, what: str) -> dict[str, int]:
    """Bytes of live arrays in a run of a tiny model, all of whose weights train."""
    command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT)), str(output), what]
    done = subprocess.run(command, cwd=output.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_resume_holds_no_more_than_a_step(tmp_path):
    """At most 1.2 times: no first state is made for its shapes, and what was given is let go."""
    first = measured(tmp_path / "run", "first")
    resumed = measured(tmp_path / "run", "resumed")
    assert first["step"] >= 16 * first["parameters"]  # float32 weights, two moments and gradients
    assert 12 * first["parameters"] <= resumed["restored"] <= 1.2 * first["step"]
    assert resumed["step"] <= 1.02 * first["step"]


@pytest.mark.full
def test_an_evaluation_has_no_optimizer(tmp_path):
    found = measured(tmp_path / "run", "evaluate")
    assert 2 * found["parameters"] <= found["evaluated"] <= 2.5 * found["parameters"]  # bfloat16 weights, and rows


def runs(output, **changes):
    return make_config(output, steps=4, evaluation=EvaluationConfig(), **changes)


@pytest.mark.full
@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(name="adamw_8bit")])
def test_an_evaluation_is_planned_as_a_forward_pass(optim, tmp_path):
    """Under a budget that has room for the weights and not for their optimizer."""
    from tiny_models import tiny_model

    model = tiny_model("float32", hidden_size=128, intermediate_size=256)
    config = runs(tmp_path, optim=optim)
    rows, held_out = dataset(documents(12)), dataset(documents(6, seed=1))
    whole = Trainer(model, None, config, rows, held_out, trains=False)
    planner = whole.engine.planner
    assert isinstance(planner, ForwardPlanner)
    room = planner.weight_bytes + planner.working_bytes(planner.plan)
    config = dataclasses.replace(config, memory=MemoryConfig(budget_gb=1.05 * room / 1e9))
    with pytest.raises(PlanError):
        Trainer(model, None, config, rows, held_out)
    tight = Trainer(model, None, config, rows, held_out, trains=False)
    assert tight.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-6)


def test_a_forward_pass_is_cut_into_parts_where_memory_is_short(tmp_path):
    rows, held_out = dataset(documents(40)), dataset(documents(20, seed=1))
    config = runs(tmp_path)
    whole = Trainer(lora_model(), None, config, rows, held_out, trains=False)
    planner = whole.engine.planner
    assert planner.plan.micro_batches == 1
    less = planner.weight_bytes + 0.6 * planner.working_bytes(planner.plan)
    config = dataclasses.replace(config, memory=MemoryConfig(budget_gb=less / 1e9 / 0.98))
    cut = Trainer(lora_model(), None, config, rows, held_out, trains=False)
    assert cut.engine.planner.plan.micro_batches > 1
    assert cut.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-6)


def test_a_forward_pass_that_compiles_larger_than_planned_is_planned_smaller(tmp_path, monkeypatch):
    rows, held_out = dataset(documents(40)), dataset(documents(20, seed=1))
    config = runs(tmp_path, memory=MemoryConfig(budget_gb=1.0))
    trainer = Trainer(lora_model(), None, config, rows, held_out, trains=False)
    whole = trainer.engine.planner.plan

    class Program:
        def memory_analysis(self):
            return dataclasses.make_dataclass("Sizes", ["temp_size_in_bytes"])(2e9)

    assert trainer.engine.planner.smaller(Program()) and trainer.engine.planner.plan != whole
    while trainer.engine.planner.smaller(Program()):
        pass
    assert trainer.engine.planner.plan.micro_batches == 4  # one row at a time, which the device has to judge


@pytest.mark.full
def test_the_weights_of_a_checkpoint_are_read_without_its_optimizer(tmp_path):
    """`evaluate_checkpoint` gives what the run's own last evaluation said."""
    rows, held_out = dataset(documents(12)), dataset(documents(6, seed=1))
    config = runs(tmp_path, checkpoint=CheckpointConfig(every_steps=2, every_minutes=None))
    trainer = Trainer(lora_model(), None, config, rows, held_out)
    trainer.train()
    told = [line["eval_loss"] for line in trainer.history if "eval_loss" in line]
    again = Trainer(lora_model(), None, config, rows, held_out, trains=False)
    values, _ = again.evaluate_checkpoint(tmp_path / "checkpoints")
    assert values["eval_loss"] == pytest.approx(told[-1], rel=1e-6)


def test_a_trainer_that_only_evaluates_refuses_to_train(tmp_path):
    trainer = Trainer(lora_model(), None, make_config(tmp_path), dataset(documents(12)), trains=False)
    with pytest.raises(ValueError, match="trains=False"):
        trainer.train()


def test_a_save_needs_host_memory_beside_what_the_step_pinned(tmp_path):
    """An 8B's whole state of 32 GB, saved beside 19 GB of pinned residuals, took 41 GB where 32 had been stated."""
    config = make_config(tmp_path, checkpoint=CheckpointConfig(every_steps=2))
    trainer = Trainer(lora_model(), None, config, dataset(documents(12)))
    planner = trainer.planner
    pinning = dataclasses.replace(planner.forecast, host_bytes=19e9)
    found = phases_of(
        trainer.model.prepared, trainer.model.trainable, planner.cost, pinning, planner.device, *phase_sections(config)
    )
    host = {each.name: each.host_bytes for each in found}
    assert host["step"] == 19e9 and host["save"] == 19e9 + host["resume"] > 19e9
    lines = phase_lines(found, None, 19e9)
    for line, name in zip(lines[1:], ("save", "export"), strict=True):
        assert f"warning: {name} will need 19.00 GB of 19.00 GB of host memory: " in line
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=N" in lines[1]


@pytest.mark.parametrize(("limit", "pool"), [(64e9, 2.0**35), (30e9, 30e9), (10e9, 19e9)])
def test_the_pool_of_pinned_memory_is_counted_as_large_as_it_grows(tmp_path, limit, pool):
    """An 8B whose step pins 19.4 GB held 36 GB of pinned memory, which is the process's until it ends."""
    config = make_config(tmp_path, checkpoint=CheckpointConfig(every_steps=2))
    trainer = Trainer(lora_model(), None, config, dataset(documents(12)))
    planner, model = trainer.planner, trainer.model
    pinning = dataclasses.replace(planner.forecast, host_bytes=19e9)
    device = dataclasses.replace(planner.device, host_bytes=limit)
    found = phases_of(model.prepared, model.trainable, planner.cost, pinning, device, *phase_sections(config))
    host = {each.name: each.host_bytes for each in found}
    assert host["step"] == pool and host["save"] == pool + host["resume"]


def test_a_resume_reads_a_large_state_in_parts(tmp_path):
    config = make_config(tmp_path, checkpoint=CheckpointConfig(every_steps=2))
    trainer = Trainer(lora_model(), None, config, dataset(documents(12)))
    planner, model = trainer.planner, trainer.model
    large = dataclasses.replace(planner.cost, fixed=planner.cost.fixed | {"optimizer states": 15e9})
    found = phases_of(model.prepared, model.trainable, large, planner.forecast, planner.device, *phase_sections(config))
    host = {each.name: each.host_bytes for each in found}
    assert host["resume"] == 2e9 and host["save"] > 15e9


def test_the_devices_of_a_process_need_host_memory_each(tmp_path):
    """Each has its own of what the step pins; it has a part of a state that is divided, and else the same as all."""
    config = make_config(tmp_path, checkpoint=CheckpointConfig(every_steps=2))
    trainer = Trainer(lora_model(), None, config, dataset(documents(12)))
    planner, model = trainer.planner, trainer.model
    pinning = dataclasses.replace(planner.forecast, host_bytes=19e9)

    def host(devices, weight_parts):
        cost = planner.cost.reshaped(devices=devices)
        of_plan = (cost, pinning, planner.device, *phase_sections(config), weight_parts)
        found = phases_of(model.prepared, model.trainable, *of_plan)
        return {each.name: each.host_bytes for each in found}

    saved = host(1, 1)["resume"]
    for devices, weight_parts in ((4, 1), (4, 2), (4, 4)):
        found = host(devices, weight_parts)
        assert found["step"] == 4 * 19e9 and found["resume"] == weight_parts * saved
        assert found["save"] == found["step"] + found["resume"]


# ---- the whole life of a run

LIFE = """
import contextlib, gc, json, sys, threading, time
import jax
from jaxtune import cli
from jaxtune.models import hf
from jaxtune.models.adapters import merge
from jaxtune.train import app, delivery
from jaxtune.train.engine import trained_model
from jaxtune.train.planning import phases
from jaxtune.train.engine.programs import Engine
from jaxtune.train.trainer import Trainer

peaks, now, planned, last = {}, ["load"], {}, [0.0]

def sample():
    live = {}
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # deleted meanwhile
            live[array.unsafe_buffer_pointer()] = array.nbytes
    peaks[now[0]] = max(peaks.get(now[0], 0), sum(live.values()))

# A thread of its own that looks at arrays beside the steps, which donate theirs, can wait for ever. So the run looks
# itself, whenever a function returns, and while it loads, the threads that load do so too.
def returned(frame, event, argument):
    main = threading.current_thread() is threading.main_thread()
    if event == "return" and (main or now[0] == "load") and time.monotonic() > last[0] + 0.002:
        sample()
        last[0] = time.monotonic()

def entered(owner, name, phase, after=None):
    real = getattr(owner, name)
    def run(*arguments, **options):
        before, now[0] = now[0], phase
        try:
            return real(*arguments, **options)
        finally:
            sample()
            now[0] = before if after is None else after
    setattr(owner, name, run)

entered(Engine, "first_step", "step", after="step")
entered(Engine, "evaluate", "evaluate")
entered(delivery, "answer", "sample")
entered(delivery.Delivery, "finish", "export", after="load")
real = Trainer._start
def start(self, *arguments):
    planner, model = self.planner, self.model
    sections = self.config.model.load_in, self.config.data, self.config.checkpoint, self.config.export
    of_plan = (planner.cost, planner.forecast, planner.device, *sections, 1, self.sampled)
    planned.update({p.name: p.device_bytes for p in phases.phases_of(model.prepared, model.trainable, *of_plan)})
    return real(self, *arguments)
Trainer._start = start
jax.devices()  # JAX cannot list arrays while it starts
threading.setprofile(returned)
sys.setprofile(returned)
code = cli.main(sys.argv[1:])
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(dict(code=code, peaks=peaks, planned=planned)))
"""


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    given = ["model.load_in=nf4", "epochs=null", "steps=3", "evaluation.exact_match_rows=8"]
    command = [sys.executable, "-c", LIFE, "train", "quickstart", *given]
    output = tmp_path_factory.mktemp("life") / "run"
    done = subprocess.run([*command, f"output={output}"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("phase", ["load", "step", "evaluate", "sample", "export"])
def test_every_phase_of_a_run_stays_within_its_figure(life, phase):
    """QLoRA of the packaged model with the merge at its end, on arrays that are alive at any moment."""
    assert life["code"] == 0
    assert 0 < life["peaks"][phase] <= life["planned"][phase]


@pytest.mark.full
def test_two_merged_models_are_never_live(life):
    """At the end a run holds its packed base, the adapter, and one merged matrix at a time: no merged model, whose
    weights in 32 bits would alone be more than the packed base and one matrix."""
    sizes = json.loads((ROOT / "jaxtune/quickstart/base/config.json").read_text(encoding="utf-8"))
    hidden, wide, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    merged = 4 * layers * 3 * hidden * wide  # the MLPs alone
    before = min(life["peaks"][phase] for phase in ("step", "sample"))
    assert life["peaks"]["export"] < before + merged
