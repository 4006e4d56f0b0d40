"""The planner's own choices on cards of many sizes: what the search for a plan comes to, and how fast that is.

    python benchmarks/train/budgets.py --ahead [MODEL ...] [--budgets 10,24] [--layers 4] --output FILE.json
    python benchmarks/train/budgets.py [MODEL ...] --budgets 10,24 [--seconds 560] --output FILE.json

Budgets are cards' sizes (memory.budget_gb); a step has 8 x 2,048 tokens, LoRA r=16.

With --ahead, in the environment of `make aot`, programs are compiled for an H200 that is not here. --layers: so many of
the model's layers under the plan of all of them. The difference of their micro-batch's program from the forecast is
added to the whole model's forecast (what is around a layer exists once, and kept residuals are exact), and their
update's temporary bytes are scaled to all layers; 0: all of them are compiled.

Without it, each case is measured by benchmarks/train/step.py on this machine's GPU, in a process of its own whose
allocator has no more than the card would. Another process compiles before it: a run compiles before its weights are
there, and step.py after, when they leave XLA no room to time products in.

A FILE.json that is there is added to: cases that it holds are not run again, and one that takes too long is not held.
Several GPUs take a process each, with CUDA_VISIBLE_DEVICES and a file of its own. Of each case it has the plans that
were compiled, with predicted and compiled bytes and their ratio, the number of compilations, and tokens per second by
the forecast, or measured.

The twelve budgets of a model are chosen by forecasts alone, before anything is compiled (`spread`): from the smallest
card to one of 60 GB, so that speed falls as evenly as it can. Cards at even ratios would show the planner less: a step
of 21 % of memory loses 13 % of speed at one end and 2 % at the other. `curve` has the forecasts of all budgets that are
0.5 % apart, `falls` what each of the twelve loses to the next one by forecast, and `steepest` where most is lost for
4 % of memory: the twelve budgets hide no cliff.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases import Step
from benchmarks.processes import ROOT, TIMED_OUT, Call, Side, step_arguments, wait
from benchmarks.record import commit_here, write

# {model: (arguments of step.py, the smallest of its twelve budgets)}
MODELS: dict[str, tuple[str, float]] = {
    "8b_nf4": ("--shape llama-3.1-8b --load-in nf4", 7.5),
    "8b": ("--shape llama-3.1-8b", 16.75),
    "gpt_oss_nf4": ("--shape gpt-oss-20b --load-in nf4", 17.75),
    "qwen35_9b_nf4": ("--shape qwen3.5-9b --load-in nf4", 9.75),
}
_COUNT, _LARGEST = 12, 60.0  # of the budgets
_STEP = 1.005  # from one card of a curve to the next
_FALL = 0.04  # of speed, at most, between neighbouring budgets
_MOST = 4  # compilations
_SECONDS = 170.0  # of a case that is measured, at most


def step_of(model: str, card: float) -> Step:
    """As step.py counts budgets: in 1e9 bytes."""
    return Step(f"{MODELS[model][0]} --plan auto --budget-gb {card * 2**30 / 1e9:.6f}")


def hosted_update(engine, state, sums) -> Any:
    """The compiled update of a plan with the optimizer's states on the host. A mesh of devices that are not there knows
    no host memory; a single such device does."""
    import jax

    from jaxtune.train.optimizer import optimizer_offload
    from tests.gpu.aot.target import H200

    where, program = H200.sharding(), dataclasses.replace(engine.program, mesh=None)
    host = H200.on_host(where)

    def at(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state, sums = jax.tree.map(lambda leaf: at(leaf, where), (state, sums))
    states = jax.tree.map(lambda leaf: at(leaf, host) if optimizer_offload.is_hosted(leaf) else leaf, state.opt_state)
    state = dataclasses.replace(state, opt_state=states)
    results = program.shardings(state, where), jax.tree.map(lambda _: where, sums), where
    with H200.lowering():
        lowered = jax.jit(program.update, donate_argnums=(0, 1), out_shardings=results).lower(state, sums)
    return lowered.compile(compiler_options=engine.options)


class Ahead:
    """A model's search for a plan, for an H200 that is not here. layers: that are compiled; 0: all."""

    def __init__(self, model: str, layers: int):
        from benchmarks.shapes import SHAPES
        from benchmarks.train import step
        from jaxtune.models.registry import config_from_hf
        from jaxtune.train.planning import devices
        from jaxtune.train.planning.cost import abstract_model, step_cost
        from jaxtune.train.planning.step_spec import StepSpec

        self.options = step.arguments().parse_args(shlex.split(MODELS[model][0]))
        self.options.plan = "auto"
        self.hf, self.config = SHAPES[self.options.shape], step.train_config(self.options)
        self.spec = StepSpec.of(self.config)
        self.layers = layers or self.hf["num_hidden_layers"]
        self.parts = step_cost(abstract_model(config_from_hf(self.hf), self.spec.model), self.spec)
        self.device = devices.find_device("NVIDIA H200")
        self.smallest = MODELS[model][1]

    def room(self, card: float):
        from jaxtune.train.config import MemoryConfig
        from jaxtune.train.planning import devices
        from jaxtune.train.planning.search import Room

        memory = MemoryConfig(budget_gb=card)
        return Room(devices.budget(memory, self.device), devices.limit(memory, self.device))

    def next(self, card: float, failed=()):
        """(forecast, whether it is the smallest plan)."""
        from jaxtune.train.planning.search import next_plan

        return next_plan(self.parts, self.spec, self.device, self.room(card), failed)

    def compiled_bytes(self, found) -> float:
        """Of the model under the plan of this forecast, with all layers."""
        from benchmarks.train import step
        from jaxtune.models.registry import config_from_hf
        from jaxtune.train.planning.cost import abstract_model
        from jaxtune.train.planning.forecasts import forecast
        from jaxtune.train.planning.step_spec import StepSpec
        from tests.gpu.aot.target import H200

        plan, last = found.plan, self.hf["num_hidden_layers"] - 1
        few = self.hf | {"num_hidden_layers": self.layers}
        if "layer_types" in few:
            few["layer_types"] = few["layer_types"][: self.layers]
        kept = [plan.residuals.layers[round(i * last / (self.layers - 1))] for i in range(self.layers)]
        plan = dataclasses.replace(plan, residuals=dataclasses.replace(plan.residuals, layers=tuple(kept)))
        options = argparse.Namespace(**vars(self.options) | {"plan": plan.text})
        options.micro_batches = plan.micro_batches
        model = abstract_model(config_from_hf(few), StepSpec.of(step.train_config(options)).model)
        trainer = step.make_trainer(options, model)
        planner, engine = trainer.planner, trainer.engine
        planner.forecast = forecast(planner.cost, plan, self.device)
        engine.follow_plan()
        engine.use_mesh(H200.mesh(1))
        shapes = trainer.model.first_shapes(engine)
        with H200.lowering():
            programs = engine.compile(*shapes)
        updates = hosted_update(engine, *shapes[:2]) if plan.level("optimizer_states") else programs.update

        def micro_batch(parts, plan) -> float:
            """Bytes that are predicted where no update is under way."""
            placed = parts.placed(plan.moved)
            update = dataclasses.replace(placed.update, bytes=0.0)
            return forecast(dataclasses.replace(placed, update=update), plan, self.device).peak_bytes

        difference = planner.compiled_bytes(programs.accumulate) - micro_batch(planner.cost, plan)
        fixed, own = (parts.fixed_bytes(plan.micro_batches) for parts in (self.parts.placed(plan.moved), planner.cost))
        update = fixed + (planner.compiled_bytes(updates) - own) * (last + 1) / self.layers
        return max(micro_batch(self.parts, found.plan) + difference, update)

    def search(self, card: float) -> dict:
        """What is recorded of a case."""
        from jaxtune.train.planning.search import Failed

        room, failed, tried = self.room(card), [], []
        while True:
            begun = time.monotonic()
            found, smallest = self.next(card, failed)
            need = self.compiled_bytes(found)
            fits = room.fits(need, smallest)
            tried.append(
                {
                    "residuals": found.plan.text,
                    "micro_batches": found.plan.micro_batches,
                    "embeddings": "host" if found.plan.level("embeddings") else "device",
                    "optimizer_states": "host" if found.plan.level("optimizer_states") else "device",
                    "predicted_gb": found.peak_bytes / 1e9,
                    "compiled_gb": need / 1e9,
                    "ratio": need / found.peak_bytes,
                    "fits": fits,
                    "seconds": time.monotonic() - begun,
                }
            )
            if fits or (smallest and failed):
                break
            failed.append(Failed(found.plan, found.peak_bytes, need))
        return {
            "budget_gb": card,
            "room_gb": room.budget_bytes / 1e9,
            "layers": self.layers,
            "compilations": len(tried),
            "trains": fits,
            "tokens_per_second": found.tokens_per_second,
            "tried": tried,
        }

    def curve(self) -> dict[str, float]:
        """{budget: tokens per second} of the plan that would be compiled first, of budgets that are 0.5 % apart, from
        the smallest card that any plan fits, or 0.85 of the smallest of the twelve, to the largest."""
        from jaxtune.train.planning.choice import PlanError

        found = {}
        steps = round(math.log(_LARGEST / self.smallest, _STEP))
        ratio = (_LARGEST / self.smallest) ** (1 / steps)
        for step in range(-32, steps + 1):
            card = round(self.smallest * ratio**step, 2)
            with contextlib.suppress(PlanError):
                found[f"{card:g}"] = self.next(card)[0].tokens_per_second
        return found


def spread(curve: dict[str, float], smallest: float) -> list[float]:
    """The twelve budgets: from the smallest card to the largest, and between them those of the curve with which the
    largest fall from one to the next is least, and of such choices the one with the smallest sum of squares of falls.
    Forecasts decide, before anything is compiled."""
    cards = [card for card in curve if float(card) >= smallest]

    def fall(low: int, high: int) -> float:
        return max(0.0, 1 - curve[cards[low]] / curve[cards[high]])

    # Of each card: (largest fall, sum of squares, cards) of the best way to it from the smallest in so many cards.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for _ in range(_COUNT - 1):
        best = {
            high: min(
                (max(most, fall(low, high)), squares + fall(low, high) ** 2, (*way, high))
                for low, (most, squares, way) in best.items()
                if low < high
            )
            for high in range(1, len(cards))
            if any(low < high for low in best)
        }
    return [float(cards[card]) for card in best[len(cards) - 1][2]]


def falls(speeds: dict[str, float]) -> dict[str, float]:
    """{budget: share of speed lost by a card of this size to the next larger one}."""
    ordered = sorted(speeds.items(), key=lambda one: float(one[0]))
    return {small: 1 - slow / fast for (small, slow), (_, fast) in itertools.pairwise(ordered)}


def steepest(curve: dict[str, float], smallest: float) -> tuple[str, float]:
    """(budget, share of speed lost by it to the one of 4 % more memory) where that is most: of a `curve`, from the
    smallest of the twelve budgets up."""
    cards = [card for card in curve if float(card) >= smallest]
    return max(
        ((low, 1 - curve[low] / curve[high]) for low, high in zip(cards, cards[8:], strict=False)), key=lambda x: x[1]
    )


def must_show(record: dict) -> list[dict]:
    """[{what, value, floor, goal, at_most}] of what the cases came to."""
    ran = [case for model in record["models"].values() for case in model["cases"].values()]
    rows: list[dict] = [
        dict(what="cases that train, share", value=sum(case["trains"] for case in ran) / len(ran), floor=1.0),
        dict(what="most compilations", value=max(case.get("compilations", 1) for case in ran), floor=_MOST, goal=1),
    ]
    for name, model in record["models"].items():
        speeds = {card: case["tokens_per_second"] for card, case in model["cases"].items() if case.get("trains")}
        if lost := falls(speeds).values():
            rows.append(dict(what=f"{name}: largest fall of speed to the next card", value=max(lost), floor=_FALL))
    return [{"goal": None, **row, "at_most": not row["what"].startswith("cases")} for row in rows]


def measured(call: Call, side: Side, model: str, card: float) -> dict | None:
    """On the GPU of this machine; None where time ran out, before the case or in it."""
    from benchmarks.train.memory import pool_of

    case = step_of(model, card)
    arguments, begun = [str(side.cache), shlex.join(step_arguments(case, "unused"))], time.monotonic()
    ahead = side.run("benchmarks/train/compile_ahead.py", arguments, call.log, **pool_of(case))
    wait(ahead, min(call.left, _SECONDS / 2))
    found = call.run(side, case, f"{model} in {card:g} GB", 30, _SECONDS - (time.monotonic() - begun), pool_of(case))
    if found is None or TIMED_OUT in found.get("failed", ""):
        return None
    if "failed" in found:
        return found | {"trains": False}
    return found | {"trains": True, "ratio": found["compiled_peak_gb"] / found["predicted_peak_gb"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--budgets", help="these, as 10.25,14; with --ahead the default is a model's twelve")
    parser.add_argument("--ahead", action="store_true", help="compile for an H200 that is not here")
    parser.add_argument("--layers", type=int, default=4, help="that are compiled ahead; 0: all")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model of this name: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if not options.ahead and options.budgets is None:
        parser.error("--budgets: name those to be measured, such as the `budgets` of budgets_ahead.json")
    wanted = None if options.budgets is None else [float(word) for word in options.budgets.split(",")]
    call = Call(options.output, options.seconds)
    record = call.begun({"benchmark": "train/budgets", "ahead": options.ahead, "commit": commit_here(), "models": {}})
    if record["ahead"] != options.ahead:
        parser.error(f"{options.output} holds cases that were {'compiled ahead' if record['ahead'] else 'measured'}")
    side = Side("new", ROOT, commit_here(), Path(tempfile.mkdtemp()))
    if options.ahead:
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # programs for an absent device cannot be read back
    for name in options.models or list(MODELS):
        model, smallest, budgets = record["models"].setdefault(name, {"cases": {}}), MODELS[name][1], []
        ahead = Ahead(name, options.layers) if options.ahead else None
        if ahead is not None:
            curve = model["curve"] = model.get("curve") or ahead.curve()
            budgets = model["budgets"] = spread(curve, smallest)
            model["falls"] = falls({f"{card:g}": curve[f"{card:g}"] for card in budgets})
            model["steepest"] = steepest(curve, smallest)
            write(options.output, record)
        for card in wanted or budgets:
            if f"{card:g}" in model["cases"]:
                continue
            if call.left <= 0:
                print("out of time; the same command goes on from here", flush=True)
                return 1
            found = ahead.search(card) if ahead is not None else measured(call, side, name, card)
            if found is None:
                return 1
            model["cases"][f"{card:g}"] = found
            record["must_show"] = must_show(record)
            write(options.output, record)
            print(name, card, {key: value for key, value in found.items() if key != "tried"}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
