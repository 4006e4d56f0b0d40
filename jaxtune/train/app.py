"""The command: from a config to an output folder with the trained model."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import find_config, load_tokenizer
from jaxtune.models.files.quant import compute_in_fp8, qat_spec
from jaxtune.models.files.weights import Weights
from jaxtune.models.hf import Pretrained, model_from_config, save_weights
from jaxtune.models.lora import get_peft_model, has_adapter
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf, weights_stored_in
from jaxtune.models.reward import with_head
from jaxtune.system import processes, terminal
from jaxtune.system.files import atomic_write, require_makeable
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import fitted, printable
from jaxtune.train import host_memory
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.formats import Example, normalize
from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.data.row_errors import RowError, attempt
from jaxtune.train.display import metrics as m
from jaxtune.train.display import report
from jaxtune.train.display.metrics import require_packages
from jaxtune.train.evaluate import asked, exact_match
from jaxtune.train.folder.record import digest, is_digest_of, require_same_settings
from jaxtune.train.folder.results import holds, require_own, require_replaceable, write_result
from jaxtune.train.folder.run_folder import ADAPTER, MERGED, RESULTS
from jaxtune.train.folder.saving import TrainingInterrupted
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning import choice, cost, devices, fitting, search
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.phases import Sampled, phase, questions_at_a_time
from jaxtune.train.program.program_cache import use_program_cache
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.trainer import COMPUTE_DTYPES, Trainer

if TYPE_CHECKING:
    from rich.console import Console

BEFORE, AFTER = "before training", "after training"


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
    stored = replace(config, model=replace(wanted, load_in=wanted.load_in or pretrained.stored_in))
    chosen, _ = mesh_of(config, lambda: cost.abstract_model(pretrained.config, stored))
    mesh = None if chosen.fsdp == 1 else partition.make_mesh(chosen.data, chosen.fsdp)
    if pretrained.packed or (config.adapter is not None and config.adapter.path is not None):
        yield None, _tokenizer(config, pretrained.folder), _adapted(pretrained.load(mesh=mesh), config)
        return
    cancelled = threading.Event()
    with ThreadPoolExecutor(1, "weights") as pool:
        try:
            # In this order; and none of it kept in a variable here, because the trainer lets go of what it copies.
            yield (
                pool.submit(lambda: _adapted(pretrained.load(cancelled, mesh), config)),
                _tokenizer(config, pretrained.folder),
                cost.abstract_model(pretrained.config, config),
            )
        finally:
            cancelled.set()


def _tokenizer(config: TrainConfig, folder: Path | None) -> Any:
    """The tokenizer of config.model.tokenizer, or else of the model's folder."""
    wanted = config.model
    if wanted.tokenizer is not None:
        tokenizer = load_tokenizer(Path(wanted.tokenizer).expanduser())
        if tokenizer is None:
            raise ValueError(f"model.tokenizer = {wanted.tokenizer!r}: no folder with tokenizer files")
        return tokenizer
    tokenizer = None if folder is None else load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"model.path = {wanted.path!r} has no tokenizer files: set model.tokenizer to a folder")
    return tokenizer


def _adapted(model: Decoder, config: TrainConfig) -> Decoder:
    """The model with the head, the adapter and the products that a config asks for."""
    if config.model.compute == "fp8":
        model = compute_in_fp8(model)
    model = with_head(model, objective_of(config).head, config.seed)
    if config.adapter is None:
        return model
    if config.adapter.path is not None:
        return load_adapter(model, config.adapter.path)
    return get_peft_model(model, **config.adapter.settings, seed=config.seed)


def answered(config: TrainConfig, limit: int) -> list[Example]:
    """The first `limit` held-out rows that end with an answer in words, for generation."""
    rows = []
    sources = open_sources(config.data.eval, columns=config.data.columns)
    for row in read_rows(sources, config.data.format):
        if row.value is None:
            continue
        example = attempt(normalize, row.value, row.format)
        if isinstance(example, RowError):
            if config.data.on_bad_row == "skip":
                continue
            raise ValueError(f"{printable(row.place)}: {printable(example)}")
        last = example.messages[-1] if example.messages else {}
        if last.get("role") == "assistant" and last["content"].strip():
            rows.append(example)
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"data.eval = {config.data.eval!r}: no row is a conversation that ends with an answer")
    return rows


def sampled_by(trainer: Trainer) -> Sampled:
    """How a run, or an evaluation, answers its held-out questions: as many at a time as its memory allows.

    Raises:
      ValueError: a row that cannot be asked.
    """
    config, wanted, planner = trainer.config, trainer.config.evaluation, trainer.engine.planner
    rows, positions = answered(config, wanted.exact_match_rows), trainer.model.given.config.context_length
    prompts, *_ = asked(trainer.tokenizer, rows, wanted.max_new_tokens, config.data.template, positions)
    longest = max(map(len, prompts))
    return questions_at_a_time(planner.cost, planner.device, planner.budget_bytes, longest, wanted.max_new_tokens)


def answer(
    model: Decoder, tokenizer: Any, config: TrainConfig, console: Console, sampled: Sampled, when: str = ""
) -> dict[str, Any]:
    """Exact match on held-out rows, with a few answers shown; when: said before it."""
    settings = config.evaluation
    rows = answered(config, settings.exact_match_rows)
    with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.exact_match_rows=0"):
        score, answers = exact_match(
            model, tokenizer, rows, settings.max_new_tokens, config.data.template, batch_size=sampled.rows
        )
    samples = [
        dict(zip(("question", "expected", "given"), one, strict=True)) for one in telling(answers, settings.sample_rows)
    ]
    found = {"exact_match": score, "rows": len(rows), "samples": samples}
    _show_answers(found, console, when)
    return found


def telling(answers: Sequence[tuple[str, str, str]], count: int) -> list[tuple[str, str, str]]:
    """`count` of the (question, expected, given) of an evaluation, in their order: wrong answers are half of them where
    there are enough, because a model that answers nearly everything right shows most in what it gets wrong."""
    wrong = [index for index, (_, expected, given) in enumerate(answers) if given.strip() != expected.strip()]
    right = sorted({*range(len(answers))} - {*wrong})
    few_right = right[: max(count - len(wrong), (count + 1) // 2)]
    return [answers[index] for index in sorted([*few_right, *wrong[: count - len(few_right)]])]


def _show_answers(found: dict[str, Any], console: Console, when: str) -> None:
    begin = f"{when}: " if when else ""
    console.print(f"{begin}exact match {100 * found['exact_match']:.1f} % of {found['rows']} held-out questions")
    for sample in found["samples"]:
        question, expected, given = sample["question"], sample["expected"], sample["given"]
        mark = "right" if given.strip() == expected.strip() else f"expected {expected!r}"
        console.print(fitted(f"  {question!r} -> {given!r} ({mark})", console))


def run(config: TrainConfig, check: bool = False, plan: bool = False, console: Console | None = None) -> int:
    """Trains as `config` says; returns the process's exit code (0, or 75: stopped by a signal, the same command goes
    on from what is saved)."""
    console = console or terminal.console(soft_wrap=True)
    require_packages(config.metrics.tensorboard, config.metrics.wandb_project, config.metrics.trackio_project)
    require_fit_for_processes(config)
    require_makeable("output", config.output)
    if plan and (config.plan.device is not None or not config.data.train):
        show_plan(config, console)
        return 0
    use_program_cache()
    if check or plan:
        with loading(config) as (weights, tokenizer, model):
            trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights, trains=plan)
            if check:
                report.check(model, trainer.data_summary(), trainer.batches, trainer.tokenizer, console)
            else:
                show_memory(trainer, console)
        return 0
    with StopSignal() as stop:
        try:
            with stop.at_once():
                return _train(config, console, stop)
        except (TrainingInterrupted, Interrupted) as stopped:
            processes.last_words(f"it was stopped: {stopped}")
            console.print(fitted(f"stopped: {stopped}. The same command goes on from there.", console))
            return EXIT_SAVED


def require_fit_for_processes(config: TrainConfig) -> None:
    """Raises ValueError where a run of several processes has not one config, or one that asks for what they cannot do
    yet."""
    if (count := processes.count()) == 1:
        return
    require_same_settings(config)
    for key, value in config.evaluation.asking:
        raise ValueError(
            f"{key} = {value}: {count} processes cannot generate at the same time yet; unset it, and generate from "
            "what the run exports"
        )
    if config.optim.offload:
        raise ValueError(
            f"optim.offload = true: states in host memory are those of one process yet, and this run has {count}; "
            "divide them over the devices (mesh.fsdp)"
        )


def _train(config: TrainConfig, console: Console, stop: StopSignal) -> int:
    with loading(config) as (weights, tokenizer, model):
        trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights)
        console.print(report.trained_table(model))
        console.print(fitted(trainer.data_summary(), console))
        delivery = _Delivery(trainer, console)
        del model, weights  # the trainer's alone now: it lets go of what it copies
        try:
            trainer.train(stop, delivery)
        except RunIsComplete as complete:
            console.print(fitted(str(complete), console))
            delivery.show_numbers()
    if not processes.first():
        return 0
    console.print(f"done: {trainer.output}\n\nnext:")
    for what, command in next_commands(config, trainer.output):
        console.print(f"  # {what}\n  {command}")
    return 0


def show_memory(trainer: Trainer, console: Console) -> dict[str, float]:
    """Shows the plan that a run comes to and what the compiler says of it; returns report.memory_plan's figures."""
    planner = trainer.planner

    def said(line: str) -> None:
        console.print(fitted(line, console), markup=False, highlight=False)

    for line in planner.lines():
        said(line)
    programs = trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, said)
    if planner.device.name != "cpu":  # whose speed is not known
        price = trainer.config.plan.dollars_per_hour
        console.print(report.finish_line(planner.forecast, trainer.total_steps, price, planner.cost.devices))
    for line in trainer.memory_notes():
        said(line)
    need = planner.compiled_bytes(programs.accumulate, programs.update)
    return report.memory_plan(planner.forecast, need, programs.seconds, planner.budget_bytes, console)


class RunIsComplete(Exception):
    """Every result of the run is there, and proven to be its own."""


class _Delivery:
    """What becomes of a trained model: exported first, so that nothing after it can lose it, then measured."""

    def __init__(self, trainer: Trainer, console: Console):
        self.trainer, self.console, self.config, self.output = trainer, console, trainer.config, trainer.output
        self.numbers: dict[str, Any] = {}
        self.rows = "" if trainer.eval_data is None else trainer.eval_data.documents.identity
        if self.config.evaluation.exact_match_rows:  # what cannot be asked is said before training
            trainer.sampled = sampled_by(trainer)

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        names = (ADAPTER, MERGED, RESULTS)
        there = processes.of_first(lambda: [name for name in names if os.path.lexists(self.output / name)])
        if there:  # else there is no need to wait for the weights
            total = self.trainer.total_steps
            found = [require_own(self.output / name, run(), total) for name in there if name != RESULTS]
            if RESULTS in there and processes.first():
                self._take_numbers(run())
            wanted = [self.output / name for name, _ in self._exports(self.trainer.adapted)]
            proven = {result.folder for result in found if result.step == total}
            led_to = wanted and proven.issuperset(wanted)
            if led_to and (start == 0 or (start == total and processes.of_first(self._is_measured))):
                raise RunIsComplete(
                    f"this run is complete: {', '.join(map(str, wanted))} hold what it led to ({total} steps); to "
                    "train anew, name another output"
                )
            for name in there if start < total else ():
                if name != RESULTS:
                    require_replaceable(self.output / name, run(), total)
            self.numbers = {key: value for key, value in self.numbers.items() if key == "before"}
        if start == 0 and self.config.evaluation.exact_match_rows and self.config.evaluation.at_start:
            self.trainer.model.take_weights()
            given = self.trainer.model.given
            self.numbers = {"before": self._answers(given, BEFORE)}
            self._write_numbers(run())  # a run that goes on from a checkpoint has other weights

    def _answers(self, model: Decoder, when: str) -> dict[str, Any]:
        assert self.trainer.sampled is not None  # rows are asked for
        return answer(model, self.trainer.tokenizer, self.config, self.console, self.trainer.sampled, when)

    def _take_numbers(self, run: dict[str, Any]) -> None:
        """Takes over what an earlier process measured of this run; what is another's goes, as its metrics do."""
        path = self.output / RESULTS
        try:
            numbers = json.loads(path.read_text(encoding="utf-8"))
            own, rows = is_digest_of(numbers.pop("run"), run), numbers.pop(m.ROWS, self.rows)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            own = rows = False
        if not own:
            path.unlink()
        elif rows == self.rows or not self.rows:
            self.numbers = numbers

    def _is_measured(self) -> bool:
        """Whether the trained model was measured as the config asks."""
        wanted, last = self.config.evaluation, self.trainer.total_steps
        due = wanted.after_last(last) and self.rows
        answers = wanted.at_end and wanted.exact_match_rows
        measured = not due or last in m.evaluations(self.output / m.JSONL, self.rows)
        return bool(measured and (not answers or "after" in self.numbers))

    def _write_numbers(self, run: dict[str, Any]) -> None:
        told = self.numbers | {"run": digest(run), m.ROWS: self.rows}
        atomic_write(self.output / RESULTS, json.dumps(told, indent=2) + "\n")

    def show_numbers(self) -> None:
        """Says what was measured of this run."""
        for key, when in (("before", BEFORE), ("after", AFTER)):
            if key in self.numbers:
                _show_answers(self.numbers[key], self.console, when)
        if losses := self.numbers.get("eval_loss"):
            self.console.print(f"evaluation loss: {losses['first']:.4f} the first time, {losses['last']:.4f} the last")

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        config, console = self.config, self.console
        host_memory.give_back()  # the programs of the steps are gone
        for name, write in self._exports(has_adapter(model)):
            folder, total = self.output / name, self.trainer.total_steps
            if not trained and processes.of_first(functools.partial(holds, folder, run, total)):
                console.print(f"{folder} is there already; left as it is")
                continue
            with processes.written_by_first(folder) as own:
                write_result(own, run, total, functools.partial(write, model))
            console.print(f"wrote {folder}")
        if config.export.adapter and has_adapter(model) and qat_spec(model) is not None:
            console.print("  qat: it is the adapter before rounding; the rounded weights are those of the merged model")
        if config.evaluation.exact_match_rows and config.evaluation.at_end:
            self.numbers["after"] = self._answers(model, AFTER)
        if not processes.first():
            return
        evaluations = list(m.evaluations(self.output / m.JSONL, self.rows).values())
        if evaluations:
            self.numbers["eval_loss"] = {"first": evaluations[0], "last": evaluations[-1]}
        if self.numbers:
            self._write_numbers(run)

    def _exports(self, adapted: bool) -> list[tuple[str, Callable[[Decoder, Path], None]]]:
        """(name, how it is written) of each result that the config asks for; the adapter first: it is quick."""
        tokenizer, wanted = self.trainer.tokenizer, self.config.export

        def whole(model: Decoder, folder: Path) -> None:
            save_weights(merged_weights(model) if adapted else Weights(model), folder, tokenizer=tokenizer)

        exports: list[tuple[str, Callable[[Decoder, Path], None]]] = []
        if adapted and wanted.adapter:
            exports.append((ADAPTER, lambda model, folder: save_adapter(model, folder, tokenizer)))
        if wanted.merged:
            exports.append((MERGED, whole))
        return exports


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
    hf = find_config(config.model.from_config or config.model.path or "")
    shape, stored_in = config_from_hf(hf), weights_stored_in(hf)
    config = replace(config, model=replace(config.model, load_in=config.model.load_in or stored_in))
    if config.plan.device is None:
        chosen, why = mesh_of(config, lambda: cost.abstract_model(shape, config))
        config = replace(config, mesh=chosen)
        if why is not None:
            console.print(fitted(why, console), markup=False, highlight=False)
    device = devices.find_device(name, limit, config.plan.host_gb)
    budget_bytes = devices.budget(config, device)
    assert budget_bytes is not None  # a device with a data sheet has a memory
    parts = cost.step_cost(cost.abstract_model(shape, config), config)
    room = search.Room(budget_bytes, devices.limit(config, device))
    try:
        forecast, _ = search.next_plan(parts, config, device, room)
    except choice.PlanError as error:
        fixes = fitting.fitting_settings(shape, config, device, budget_bytes)
        raise choice.PlanError(error.smallest, budget_bytes, fixes) from None
    longest = fitting.longest_row(parts, config, device, budget_bytes)
    report.plan_elsewhere(forecast, parts, device, budget_bytes, longest, console)
    console.print(report.finish_line(forecast, config.steps, config.plan.dollars_per_hour, parts.devices))


def next_commands(config: TrainConfig, output: Path) -> list[tuple[str, str]]:
    """(what for, command line): what a person wants after a run, to be typed in the folder that the run began in."""
    commands = []
    trained = [output / name for name in (MERGED, ADAPTER) if (output / name).exists()]
    if trained:
        question, raw = "...", ""
        with contextlib.suppress(OSError, ValueError, StopIteration):  # a hint is not worth a failure
            scored = config.evaluation.exact_match_rows
            sources = open_sources(config.data.train, columns=config.data.columns)
            row = None if scored else next(read_rows(sources, config.data.format))
            example = answered(config, 1)[0] if row is None else normalize(row.value or {}, row.format)
            if config.data.template is None and (example.prompt is not None or example.text is not None):
                raw = " --raw"  # asked as it was trained
            if scored:
                question = str(example.prompt) if raw else (example.messages or [])[-2]["content"]
        ask = f"generate {shlex.quote(str(trained[0]))}{raw} --prompt {shlex.quote(question)}"
        commands.append(("ask the trained model", spelled(ask)))
    if (profile := output / "profile").is_dir():
        shown = spelled(f"profile show {shlex.quote(str(profile))}")
        commands.append(("where the time of the profiled steps went", shown))
    if Path(config.model.path or "").is_relative_to(Path(__file__).parents[1]):  # the packaged model: a first run
        train = spelled("train lora-0.5b data.train=rows.jsonl")
        commands.append(("train a model of the hub on rows of your own", train))
        plan = spelled("train qlora-8b --plan plan.device='RTX 4090'")
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands
