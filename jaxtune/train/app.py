"""The command: from a config to an output folder with the trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtune import terminal
from jaxtune.models.adapter_files import load_adapter, save_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import Pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model, has_adapter
from jaxtune.models.merge import merge_adapter
from jaxtune.models.model_folder import find_config, load_tokenizer
from jaxtune.models.quant import qat_spec
from jaxtune.models.registry import config_from_hf
from jaxtune.terminal import printable
from jaxtune.train import report
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.formats import RowError, attempt, normalize
from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.evaluate import exact_match
from jaxtune.train.loop import COMPUTE_DTYPES, Trainer, TrainingInterrupted
from jaxtune.train.metrics import require_packages
from jaxtune.train.planning import choice, cost, devices
from jaxtune.train.program_cache import use_program_cache
from jaxtune.train.signals import EXIT_SAVED

if TYPE_CHECKING:
    from rich.console import Console

ADAPTER, MERGED = "adapter", "merged"


def load_model(config: TrainConfig) -> tuple[Decoder, Any]:
    """(model with its adapter, tokenizer) that a config asks for."""
    with loading(config) as (weights, tokenizer, model):
        return model if weights is None else weights.result(), tokenizer


@contextlib.contextmanager
def loading(config: TrainConfig) -> Iterator[tuple[Future[Decoder] | None, Any, Decoder]]:
    """(weights, tokenizer, model with its adapter) that a config asks for.

    `weights` is the model on its way, which a thread loads while tokenising and compiling go on; `model` then has
    its shapes, and no arrays. `weights` is None where the model is there at once: made from a config, with an adapter
    of a file, or of a checkpoint in four bits, whose shapes only its bytes tell. Leaving the context ends the loading.
    """
    wanted = config.model
    if wanted.from_config is not None:
        key = jax.random.key(config.seed)
        yield None, _tokenizer(config, None), _adapted(model_from_config(wanted.from_config, key, "float32"), config)
        return
    assert wanted.path is not None
    pretrained = Pretrained(wanted.path, COMPUTE_DTYPES[config.precision], wanted.load_in)
    if pretrained.packed or (config.adapter is not None and config.adapter.path is not None):
        yield None, _tokenizer(config, pretrained.folder), _adapted(pretrained.load(), config)
        return
    cancelled = threading.Event()
    with ThreadPoolExecutor(1, "weights") as pool:
        try:
            # In this order; and none of it kept in a variable here, because the trainer lets go of what it copies.
            yield (
                pool.submit(lambda: _adapted(pretrained.load(cancelled), config)),
                _tokenizer(config, pretrained.folder),
                cost.abstract_model(pretrained.config, config),
            )
        finally:
            cancelled.set()


def _tokenizer(config: TrainConfig, folder: Path | None) -> Any:
    """The tokenizer of config.model.tokenizer, or else of the model's folder."""
    wanted = config.model
    if wanted.tokenizer is not None:
        tokenizer = load_tokenizer(Path(wanted.tokenizer))
        if tokenizer is None:
            raise ValueError(f"model.tokenizer = {wanted.tokenizer!r}: no folder with tokenizer files")
        return tokenizer
    tokenizer = None if folder is None else load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"model.path = {wanted.path!r} has no tokenizer files: set model.tokenizer to a folder")
    return tokenizer


def _adapted(model: Decoder, config: TrainConfig) -> Decoder:
    """The model with the adapter that a config asks for."""
    if config.adapter is None:
        return model
    if config.adapter.path is not None:
        return load_adapter(model, config.adapter.path)
    settings = dataclasses.asdict(config.adapter)
    settings.pop("path")
    return get_peft_model(model, **settings, seed=config.seed)


def conversations(config: TrainConfig, limit: int) -> list[dict[str, Any]]:
    """The first `limit` held-out rows that end with an answer, as {"messages": [...]}, for generation."""
    if config.data.eval is None:
        raise ValueError("evaluation.exact_match_rows needs data.eval: a file of held-out rows")
    rows = []
    for row in read_rows(open_sources(config.data.eval), config.data.format):
        if row.value is None:
            continue
        example = attempt(normalize, row.value, row.format)
        if isinstance(example, RowError):
            if config.data.on_bad_row == "skip":
                continue
            raise ValueError(f"{printable(row.place)}: {printable(example)}")
        if example.messages and example.messages[-1]["role"] == "assistant":
            rows.append({"messages": list(example.messages)})
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"data.eval = {config.data.eval!r}: no row is a conversation that ends with an answer")
    return rows


def answer(model: Decoder, tokenizer: Any, config: TrainConfig, console: Console, when: str) -> dict[str, Any]:
    """Exact match on held-out rows, with a few answers shown."""
    settings = config.evaluation
    rows = conversations(config, settings.exact_match_rows)
    score, answers = exact_match(
        model, tokenizer, rows, max_new_tokens=settings.max_new_tokens, template=config.data.template
    )
    console.print(f"{when}: exact match {100 * score:.1f} % of {len(rows)} held-out questions")
    for question, expected, given in answers[: settings.sample_rows]:
        mark = "right" if given.strip() == expected.strip() else f"expected {expected!r}"
        console.print(f"  {question!r} -> {given!r} ({mark})", markup=False, highlight=False)
    return {"exact_match": score, "rows": len(rows)}


def run(config: TrainConfig, check: bool = False, plan: bool = False, console: Console | None = None) -> int:
    """Trains as `config` says; returns the process's exit code (0, or 75: stopped by a signal, saved, resumable)."""
    console = console or terminal.console(soft_wrap=True)
    require_packages(config.metrics.tensorboard, config.metrics.wandb_project)
    if plan and (config.plan.device is not None or not config.data.train):
        show_plan(config, console)
        return 0
    use_program_cache()
    results: dict[str, Any] = {}
    measure = config.evaluation.exact_match_rows > 0
    with loading(config) as (weights, tokenizer, model):
        trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights)
        if check:
            report.check(trainer, model, console)
            return 0
        if plan:
            report.memory_plan(trainer, console)
            return 0
        console.print(report.trained_table(model))
        console.print(report.data_summary(trainer))
        if measure and config.evaluation.at_start:
            whole = model if weights is None else weights.result()
            results["before"] = answer(whole, tokenizer, config, console, "before training")
            del whole
        del model, weights  # the trainer's alone now: it lets go of what it copies
        try:
            model = trainer.train()
        except TrainingInterrupted as stopped:
            console.print(f"stopped: {stopped}. The same command goes on from there.")
            return EXIT_SAVED
    if measure and config.evaluation.at_end:
        results["after"] = answer(model, tokenizer, config, console, "after training")
    export(model, trainer.tokenizer, config, trainer.output, console)
    evaluations = [line["eval_loss"] for line in trainer.history if "eval_loss" in line]
    if evaluations:
        results["eval_loss"] = {"first": evaluations[0], "last": evaluations[-1]}
    if results:
        (trainer.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(f"done: {trainer.output}\n\nnext:")
    for what, command in next_commands(config, trainer.output):
        console.print(f"  # {what}\n  {command}", markup=False, highlight=False)
    return 0


def show_plan(config: TrainConfig, console: Console) -> None:
    """The plan for a device, here or not, from the model's shape alone: no weights, no rows, nothing compiled."""
    name, limit = config.plan.device, None
    if name is None:
        here = jax.local_devices()[0]
        if here.platform == "cpu":
            raise ValueError(
                "plan.device is not set, and this machine has no GPU: name one, such as plan.device='RTX 4090'"
            )
        name, limit = here.device_kind, (here.memory_stats() or {}).get("bytes_limit")
    if config.adapter is not None and config.adapter.path is not None:
        raise ValueError(
            f"adapter.path = {config.adapter.path!r}: a plan without weights needs the adapter's settings: set "
            "adapter.path=null and adapter.r"
        )
    shape = config_from_hf(find_config(config.model.from_config or config.model.path or ""))
    device = devices.find_device(name, limit, config.plan.host_gb)
    budget_bytes = devices.budget(config, device)
    assert budget_bytes is not None  # a device with a data sheet has a memory
    parts = cost.step_cost(cost.abstract_model(shape, config), config)
    try:
        forecast = choice.choose(parts, config, device, budget_bytes)
    except choice.PlanError as error:
        fixes = choice.fitting_settings(shape, config, device, budget_bytes)
        raise choice.PlanError(error.smallest, budget_bytes, fixes) from None
    longest = choice.longest_row(parts, config, device, budget_bytes)
    console.print(report.plan_elsewhere(forecast, parts, device, budget_bytes, longest))


def next_commands(config: TrainConfig, output: Path) -> list[tuple[str, str]]:
    """(what for, command line): what a person wants after a run, to be typed in the folder that the run began in."""
    interpreter = Path(sys.executable)
    here = interpreter.is_relative_to(Path.cwd())
    python = shlex.quote(str(interpreter.relative_to(Path.cwd()))) if here else "python"
    commands = []
    trained = [output / name for name in (MERGED, ADAPTER) if (output / name).exists()]
    if trained:
        question = "..."
        if config.evaluation.exact_match_rows:
            question = conversations(config, 1)[0]["messages"][-2]["content"]
        ask = f"{python} -m jaxtune.cli generate {shlex.quote(str(trained[0]))} --prompt {shlex.quote(question)}"
        commands.append(("ask the trained model", ask))
    if (profile := output / "profile").is_dir():
        shown = f"{python} -m jaxtune.cli profile show {shlex.quote(str(profile))}"
        commands.append(("where the time of the profiled steps went", shown))
    if Path(config.model.path or "").is_relative_to(Path(__file__).parents[1]):  # the packaged model: a first run
        train = f"{python} -m jaxtune.train"
        commands.append(("train a model of the hub on rows of your own", f"{train} lora-0.5b data.train=rows.jsonl"))
        plan = f"{train} qlora-8b --plan plan.device='RTX 4090'"
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands


def export(model: Decoder, tokenizer: Any, config: TrainConfig, output: Path, console: Console) -> None:
    """Writes the adapter first (it cannot fail late), then the whole model; what is there already is left alone."""
    adapted = has_adapter(model)
    if adapted and config.export.adapter:
        _once(output / ADAPTER, lambda folder: save_adapter(model, folder, tokenizer), console)
        if qat_spec(model) is not None:
            console.print("  qat: it is the adapter before rounding; the rounded weights are those of the merged model")
    if config.export.merged:

        def write(folder):
            save_pretrained(merge_adapter(model) if adapted else model, folder, tokenizer=tokenizer)

        _once(output / MERGED, write, console)


def _once(folder: Path, write, console: Console) -> None:
    if folder.exists():
        console.print(f"{folder} is there already; left as it is")
        return
    write(folder)
    console.print(f"wrote {folder}")


def evaluate(config: TrainConfig) -> dict[str, Any]:
    """Evaluation loss, and exact match where the config asks for it, of the model as it is."""
    use_program_cache()
    model, tokenizer = load_model(config)
    trainer = Trainer(model, tokenizer, config)
    results: dict[str, Any] = trainer.evaluate()
    if config.evaluation.exact_match_rows:
        results |= answer(model, tokenizer, config, terminal.console(stderr=True, soft_wrap=True), "exact match")
    return results
