"""The train command: trains by a config, exports the model, and measures exact match on held-out questions."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.files.weights import Weights
from jaxtune.models.hf import save_weights
from jaxtune.models.lora import has_adapter
from jaxtune.system import host_memory, processes, terminal
from jaxtune.system.files import atomic_write, require_makeable
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.data.rendering.formats import Example, normalize, refuse_excluded
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_errors import Excluded, RowError, attempt
from jaxtune.train.display import metrics as m
from jaxtune.train.display import model_report, plan_text, rows_report
from jaxtune.train.display.metrics import require_packages
from jaxtune.train.evaluation.evaluate import exact_match, questions_of
from jaxtune.train.folder.record import digest, is_digest_of, require_same_settings
from jaxtune.train.folder.results import holds, require_own, require_replaceable, write_result
from jaxtune.train.folder.run_folder import ADAPTER, MERGED, RESULTS, next_name
from jaxtune.train.folder.run_state import read_state, write_state
from jaxtune.train.folder.saving import TrainingInterrupted
from jaxtune.train.planning.phases import Sampled, phase, questions_at_a_time
from jaxtune.train.program.program_cache import use_program_cache
from jaxtune.train.shown_plan import show_plan
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.spec.loading import loading
from jaxtune.train.spec.setup import require_sampling
from jaxtune.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console

BEFORE, AFTER = "before training", "after training"  # printed before the answers that the model gives then


def answered(config: TrainConfig, limit: int) -> tuple[list[Example], int]:
    """The first `limit` held-out rows (data.eval) that end with a non-empty answer, and the number of other rows read
    until then. ValueError if there is none, or a row is bad and data.on_bad_row is "error".
    """
    rows, left_out = [], 0
    sources = open_sources(config.data.eval, columns=config.data.columns)
    for row in read_rows(sources, config.data.format):
        example = RowError(row.error) if row.value is None else attempt(_asked, row.value, row.format)
        if isinstance(example, RowError) and not isinstance(example, Excluded) and config.data.on_bad_row == "error":
            raise ValueError(f"{printable(row.place)}: {printable(example)}")
        last = example.messages[-1] if isinstance(example, Example) and example.messages else {}
        if isinstance(example, Example) and last.get("role") == "assistant" and last["content"].strip():
            rows.append(example)
        else:
            left_out += 1
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"data.eval = {config.data.eval!r}: no row is a conversation that ends with an answer")
    return rows, left_out


def _asked(value: Mapping[str, Any], format: str) -> Example:
    refuse_excluded(value)
    return normalize(value, format)


def sampled_by(trainer: Trainer) -> Sampled:
    """How held-out questions will be answered: how many at a time, and the tokens of the longest prompt and answer.
    Samples nothing; before training, so that rows that cannot be asked raise ValueError then.
    """
    config, settings, planner = trainer.config, trainer.config.evaluation, trainer.engine.planner
    (rows, _), positions = answered(config, settings.exact_match_rows), trainer.model.given.config.context_length
    data = config.data
    questions = questions_of(
        trainer.tokenizer, rows, settings.max_new_tokens, data.trained_template, positions, data.today
    )
    longest = max(len(question.prompt) for question in questions)
    return questions_at_a_time(planner.cost, planner.device, planner.budget_bytes, longest, settings.max_new_tokens)


def answer(
    model: Decoder, tokenizer: Any, config: TrainConfig, console: Console, sampled: Sampled, when: str = ""
) -> dict[str, Any]:
    """Measures exact match, prints the score and some answers (`answers_to_show`), and returns {"exact_match": 0 to 1,
    "rows", "samples": [{"question", "expected", "given"}]}.

      sampled: from `sampled_by`.
      when: printed before the score, such as "before training".

    ValueError if rows cannot be asked, or device memory ran out (OutOfDeviceMemory).
    """
    settings = config.evaluation
    rows, left_out = answered(config, settings.exact_match_rows)
    with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.exact_match_rows=0"):
        score, answers = exact_match(
            model,
            tokenizer,
            rows,
            settings.max_new_tokens,
            config.data.trained_template,
            sampled.rows,
            config.data.today,
        )
    samples = [
        dict(zip(("question", "expected", "given"), shown_answer, strict=True))
        for shown_answer in answers_to_show(answers, settings.sample_rows)
    ]
    result = {"exact_match": score, "rows": len(rows), "samples": samples}
    _show_answers(result, console, when, left_out)
    return result


def answers_to_show(answers: Sequence[tuple[str, str, str]], count: int) -> list[tuple[str, str, str]]:
    """`count` of the answers (question, expected, given) in their order. Half of them, rounded down, are wrong ones if
    there are such, as a good model's mistakes show most.
    """
    wrong = [
        index for index, (_, expected, answer_text) in enumerate(answers) if answer_text.strip() != expected.strip()
    ]
    right = sorted({*range(len(answers))} - {*wrong})
    few_right = right[: max(count - len(wrong), (count + 1) // 2)]
    return [answers[index] for index in sorted([*few_right, *wrong[: count - len(few_right)]])]


def _show_answers(result: dict[str, Any], console: Console, when: str, left_out: int) -> None:
    begin, suffix = f"{when}: " if when else "", f" ({left_out:,} rows without an answer left out)" if left_out else ""
    console.print(
        f"{begin}exact match {100 * result['exact_match']:.1f} % of {result['rows']} held-out questions{suffix}"
    )
    for sample in result["samples"]:
        question, expected, answer_text = sample["question"], sample["expected"], sample["given"]
        mark = "right" if answer_text.strip() == expected.strip() else f"expected {expected!r}"
        console.print(fitted(f"  {question!r} -> {answer_text!r} ({mark})", console))


def run(config: TrainConfig, check: bool = False, plan: bool = False, console: Console | None = None) -> int:
    """Trains, exports and evaluates as the config asks; all results are in config.output. Returns the exit code: 0, 1
    if the last state was not saved, or 75 after a signal, and the same command then continues. Errors are raised.

      check: only reads rows and shows how they are tokenised and packed.
      plan: only shows the memory plan: from shapes if plan.device is set or data.train is empty, else by compiling the
      step.
      console: None: the terminal.

    `check` and `plan` write nothing to the output folder, perhaps to the caches of tokens and programs.
    """
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
                rows_report.check(
                    trainer.model.given, trainer.data_summary(), trainer.batches, trainer.tokenizer, console
                )
            else:
                show_memory(trainer, console)
        return 0
    with StopSignal() as stop:
        try:
            with stop.at_once():
                return _train(config, console, stop)
        except (TrainingInterrupted, Interrupted) as stopped:
            processes.last_words(f"it was stopped: {stopped}")
            console.print(fitted(f"stopped: {stopped}. The same command continues from there.", console))
            return EXIT_SAVED


def require_fit_for_processes(config: TrainConfig) -> None:
    """ValueError for what several processes cannot do: other configs or packages, sampled answers, optim.offload."""
    if (count := processes.count()) == 1:
        return
    require_same_settings(config)
    if config.objective.samples:
        require_sampling(config, config.mesh or MeshConfig())
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
    """A run of the train command; returns the exit code. Signals raise TrainingInterrupted or Interrupted."""
    with loading(config) as (weights, tokenizer, model):
        if note := model_report.cpu_note(model):
            console.print(note, markup=False, highlight=False)
        trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights, checks_folder=True)
        console.print(model_report.trained_table(trainer.model.given))
        console.print(fitted(trainer.data_summary(), console))
        delivery = _Delivery(trainer, console)
        del model, weights  # only the trainer refers to the model now, so it can free what it copies
        try:
            trainer.train(stop, delivery)
        except RunIsComplete as complete:
            if read_state(trainer.output).name != "finished":  # it was killed after its export
                write_state(trainer.output, "finished", "", trainer.total_steps)
            console.print(fitted(str(complete), console))
            delivery.show_numbers()
    code = 0 if trainer.unsaved is None else 1
    if not processes.first():
        return code
    if trainer.unsaved is not None:
        console.print(fitted(f"warning: the last state is not saved, only exported: {trainer.unsaved}", console))
    console.print(f"done: {trainer.output}\n\nnext:")
    for purpose, command in next_commands(config, trainer.output):
        console.print(f"  # {purpose}\n  {command}")
    return code


def show_memory(trainer: Trainer, console: Console) -> dict[str, float]:
    """Prints the plan, compiles its step (and further ones until one fits), and prints predicted and compiled memory.
    Returns {"predicted", "compiled" and, if limited, "limit": GB}. PlanError if nothing fits.
    """
    planner = trainer.planner

    def show(line: str) -> None:
        console.print(fitted(line, console), markup=False, highlight=False)

    for line in planner.lines():
        show(line)
    programs = trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, show)
    if planner.device.name != "cpu":  # the speed of a CPU is not known
        price = trainer.config.plan.dollars_per_hour
        console.print(plan_text.finish_line(planner.forecast, trainer.total_steps, price, planner.cost.devices))
    for line in [*trainer.memory_notes(), *trainer.disk_notes()]:
        show(line)
    need = planner.compiled_bytes(programs.accumulate, programs.update)
    return plan_text.memory_plan(planner.forecast, need, programs.seconds, planner.budget_bytes, console)


class RunIsComplete(Exception):
    """All exports that the config asks for exist, of this run's last step, and no evaluation is missing that
    checkpoints allow.
    """


class _Delivery:
    """Exports the trained model first, so that no later failure loses it, then answers the held-out questions.
    `numbers` is the content of results.json: exact match "before" and "after", "eval_loss": {"first", "last"},
    "best_checkpoint". ValueError at once if rows cannot be asked.
    """

    def __init__(self, trainer: Trainer, console: Console):
        self.trainer, self.console, self.config, self.output = trainer, console, trainer.config, trainer.output
        self.numbers: dict[str, Any] = {}
        self.rows = "" if trainer.eval_data is None else trainer.eval_data.documents.identity
        if self.config.evaluation.exact_match_rows:  # rows that cannot be asked raise now, before training
            trainer.sampled = sampled_by(trainer)

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Compares the folder's results with this run, before its first step; then has the untrained model answer
        questions if the config asks for it, and writes the score at once. A damaged or foreign results.json is deleted.
        run: waits for weights. start: steps done. RunIsComplete if nothing is left to do; ValueError for another run's
        export, or one with files that no run wrote.
        """
        names = (ADAPTER, MERGED, RESULTS)
        existing = processes.of_first(lambda: [name for name in names if os.path.lexists(self.output / name)])
        if existing:  # `run()` waits for the weights, so it is called only if there are results to compare with
            total = self.trainer.total_steps
            results = [require_own(self.output / name, run(), total) for name in existing if name != RESULTS]
            if RESULTS in existing and processes.first():
                self._take_numbers(run())
            exports = [self.output / name for name, _ in self._exports(self.trainer.adapted)]
            proven = {result.folder for result in results if result.step == total}
            led_to = exports and proven.issuperset(exports)
            if led_to and (start == 0 or (start == total and processes.of_first(self._is_measured))):
                raise RunIsComplete(
                    f"this run is complete: {', '.join(map(str, exports))} hold what it led to ({total} steps); to "
                    f"train anew, name another output, such as output={next_name(self.output)}"
                )
            for name in existing if start < total else ():
                if name != RESULTS:
                    require_replaceable(self.output / name, run(), total)
            self.numbers = {key: value for key, value in self.numbers.items() if key == "before"}
        if start == 0 and self.config.evaluation.exact_match_rows and self.config.evaluation.at_start:
            self.trainer.model.take_weights()
            untrained = self.trainer.model.given
            self.numbers = {"before": self._answers(untrained, BEFORE)}
            self._write_numbers(run())  # stored now, because a resumed run no longer has these weights

    def _answers(self, model: Decoder, when: str) -> dict[str, Any]:
        assert self.trainer.sampled is not None  # set in __init__, as the config asks for answers
        return answer(model, self.trainer.tokenizer, self.trainer.config, self.console, self.trainer.sampled, when)

    def _take_numbers(self, run: dict[str, Any]) -> None:
        """Reads an earlier process's results.json; deletes a damaged or foreign one, and ignores one of other held-out
        rows.
        """
        path = self.output / RESULTS
        try:
            numbers = json.loads(path.read_text(encoding="utf-8"))
            is_own, rows = is_digest_of(numbers.pop("run"), run), numbers.pop(m.ROWS, self.rows)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_own = rows = False
        if not is_own:
            path.unlink()
        elif rows == self.rows or not self.rows:
            self.numbers = numbers

    def _is_measured(self) -> bool:
        """Whether the evaluations after training were made: held-out loss and exact match. Metrics of
        evaluation.generate are not looked for.
        """
        settings, last = self.trainer.evaluation, self.trainer.total_steps
        due = settings.after_last(last) and self.rows
        answers = settings.at_end and settings.exact_match_rows
        measured = not due or last in m.evaluations(self.output / m.JSONL, self.rows)
        return bool(measured and (not answers or "after" in self.numbers))

    def _write_numbers(self, run: dict[str, Any]) -> None:
        """Writes results.json with digests of run and held-out rows, by which a later process knows it."""
        content = self.numbers | {"run": digest(run), m.ROWS: self.rows}
        atomic_write(self.output / RESULTS, json.dumps(content, indent=2) + "\n")

    def show_numbers(self) -> None:
        for key, when in (("before", BEFORE), ("after", AFTER)):
            if key in self.numbers:
                _show_answers(self.numbers[key], self.console, when, 0)
        if losses := self.numbers.get("eval_loss"):
            self.console.print(f"evaluation loss: {losses['first']:.4f} the first time, {losses['last']:.4f} the last")

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        """Exports as the config asks, answers the held-out questions, and writes results.json. Collective; the first
        process writes. trained: this process made a step; if not, existing exports stay. ValueError if a folder is not
        this run's result, or has files that no run wrote.
        """
        config, console = self.config, self.console
        host_memory.give_back()  # the compiled steps are freed by now
        for name, write in self._exports(has_adapter(model)):
            folder, total = self.output / name, self.trainer.total_steps
            if not trained and processes.of_first(functools.partial(holds, folder, run, total)):
                console.print(f"{folder} is there already; left as it is")
                continue
            with processes.written_by_first(folder) as target:
                write_result(target, run, total, functools.partial(write, model))
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
        self.numbers |= self.trainer.best
        if self.numbers:
            self._write_numbers(run)

    def _exports(self, adapted: bool) -> list[tuple[str, Callable[[Decoder, Path], None]]]:
        """(folder's name, function that writes it) of each export; the quick adapter first."""
        tokenizer, settings = self.trainer.tokenizer, self.config.export

        def whole(model: Decoder, folder: Path) -> None:
            save_weights(merged_weights(model) if adapted else Weights(model), folder, tokenizer=tokenizer)

        exports: list[tuple[str, Callable[[Decoder, Path], None]]] = []
        if adapted and settings.adapter:
            exports.append((ADAPTER, lambda model, folder: save_adapter(model, folder, tokenizer)))
        if settings.merged:
            exports.append((MERGED, whole))
        return exports


def next_commands(config: TrainConfig, output: Path) -> list[tuple[str, str]]:
    """[(purpose, command)] after a run: ask the model, show the profile, and after a first run on the packaged model
    two more. They hold in the folder where the run was started.
    """
    commands = []
    trained = [output / name for name in (MERGED, ADAPTER) if (output / name).exists()]
    if trained:
        question, raw = "...", ""
        with contextlib.suppress(OSError, ValueError, StopIteration):  # the example question may be missing
            scored = config.evaluation.exact_match_rows
            if scored:
                example = answered(config, 1)[0][0]
            else:
                sources = open_sources(config.data.train, columns=config.data.columns)
                row = next(read_rows(sources, config.data.format))
                example = normalize(row.value or {}, row.format)
            if config.data.template is None and (example.prompt is not None or example.text is not None):
                raw = " --raw"  # without a template, as in training
            if scored:
                question = str(example.prompt) if raw else (example.messages or [])[-2]["content"]
        ask = f"generate {shlex.quote(str(trained[0]))}{raw} --prompt {shlex.quote(question)}"
        commands.append(("ask the trained model", spelled(ask)))
    if (profile := output / "profile").is_dir():
        show_command = spelled(f"profile show {shlex.quote(str(profile))}")
        commands.append(("where the time of the profiled steps went", show_command))
    if Path(config.model.path or "").is_relative_to(Path(__file__).parents[1]):  # the packaged model: a first run
        train = spelled("train lora-0.5b data.train=rows.jsonl")
        commands.append(("train a model of the hub on rows of your own", train))
        plan = spelled("train qlora-8b --plan plan.device='RTX 4090'")
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands
