"""The train command (`run`): it trains by a config, exports the model to the output folder, and measures exact match on
held-out questions if the config asks for it (results.json). With --check it only shows what would be trained and how
rows are tokenised and packed, with --plan only the memory plan (`show_memory`). `answered` reads the held-out
questions, `sampled_by` plans how many are answered at a time, and `answer` has the model answer them and prints the
answers that `answers_to_show` chooses, for the evaluate command (scoring.py) too. `_Delivery` exports and evaluates
what a run has trained (`_train` does the run); it raises `RunIsComplete` if the exports of this run exist already.
`require_fit_for_processes` refuses what several processes cannot do, and `next_commands` says what to do after a
run."""

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
from jaxtune.system import processes, terminal
from jaxtune.system.files import atomic_write, require_makeable
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import fitted, printable
from jaxtune.train import host_memory
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.data.formats import Example, normalize, refuse_excluded
from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.data.row_errors import Excluded, RowError, attempt
from jaxtune.train.display import metrics as m
from jaxtune.train.display import report
from jaxtune.train.display.metrics import require_packages
from jaxtune.train.evaluate import exact_match, questions_of
from jaxtune.train.folder.record import digest, is_digest_of, require_same_settings
from jaxtune.train.folder.results import holds, require_own, require_replaceable, write_result
from jaxtune.train.folder.run_folder import ADAPTER, MERGED, RESULTS, next_name
from jaxtune.train.folder.run_state import read_state, write_state
from jaxtune.train.folder.saving import TrainingInterrupted
from jaxtune.train.loading import loading
from jaxtune.train.planning.phases import Sampled, phase, questions_at_a_time
from jaxtune.train.program.program_cache import use_program_cache
from jaxtune.train.setup import require_sampling
from jaxtune.train.shown_plan import show_plan
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console

BEFORE, AFTER = "before training", "after training"  # printed before the answers that the model gives then


def answered(config: TrainConfig, limit: int) -> tuple[list[Example], int]:
    """Reads the held-out rows (data.eval of `config`) whose answers exact match compares with the model's: those that
    are conversations and end with an assistant's message that is not empty. Returns (the first `limit` of them, as
    examples; the number of other rows that were read until then and are left out, because they have another form, end
    otherwise or are bad). Reading stops once there are `limit`; fewer are returned if the rows have no more.
    `sampled_by` and `answer` call it, and `next_commands` for one question. A row is bad if it cannot be read or does
    not fit its format. Raises ValueError if there is no row to return, or one is bad and data.on_bad_row is "error"."""
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
    """Plans how a run or an evaluation answers the held-out questions of exact match, without sampling: a Sampled, with
    the questions that are answered in one batch (32, or fewer if memory is short) and the tokens of the longest prompt
    and answer, rounded up to powers of two. It is called before training, so that rows that cannot be asked are
    reported then: ValueError if no row ends with an answer, an answer has no question before it, a row is bad
    (`answered`), or a prompt and evaluation.max_new_tokens are more than the model's positions. trainer: the run's."""
    config, wanted, planner = trainer.config, trainer.config.evaluation, trainer.engine.planner
    (rows, _), positions = answered(config, wanted.exact_match_rows), trainer.model.given.config.context_length
    data = config.data
    questions = questions_of(
        trainer.tokenizer, rows, wanted.max_new_tokens, data.trained_template, positions, data.today
    )
    longest = max(len(one.prompt) for one in questions)
    return questions_at_a_time(planner.cost, planner.device, planner.budget_bytes, longest, wanted.max_new_tokens)


def answer(
    model: Decoder, tokenizer: Any, config: TrainConfig, console: Console, sampled: Sampled, when: str = ""
) -> dict[str, Any]:
    """Measures exact match on the held-out rows, and prints the score and evaluation.sample_rows of the answers, chosen
    by `answers_to_show`. The train command calls it before and after training, as the config asks, and the evaluate
    command once.

    Args:
      model, tokenizer, config: those of the run.
      console: prints the lines.
      sampled: how many questions are answered at a time, from `sampled_by`.
      when: printed before the score, such as "before training"; "" prints nothing there.
    Returns:
      {"exact_match": share of right answers, from 0 to 1, "rows": number of questions, "samples": [{"question",
        "expected", "given"}], the answers that were printed}.
    Raises:
      ValueError: the rows cannot be asked, as in `sampled_by`; or device memory ran out (OutOfDeviceMemory).
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
        dict(zip(("question", "expected", "given"), one, strict=True))
        for one in answers_to_show(answers, settings.sample_rows)
    ]
    found = {"exact_match": score, "rows": len(rows), "samples": samples}
    _show_answers(found, console, when, left_out)
    return found


def answers_to_show(answers: Sequence[tuple[str, str, str]], count: int) -> list[tuple[str, str, str]]:
    """Chooses `count` of the answers of an evaluation, (question, expected, given), and keeps their order. Half of
    them, rounded down, are wrong ones, because the mistakes of a model that is nearly always right show most; if there
    are too few wrong or too few right ones, more of the others are taken. An answer is right if it equals the expected
    one apart from white space at the ends. It returns fewer than `count` if there are fewer. `answer` prints and
    returns these; they do not decide the score."""
    wrong = [index for index, (_, expected, given) in enumerate(answers) if given.strip() != expected.strip()]
    right = sorted({*range(len(answers))} - {*wrong})
    few_right = right[: max(count - len(wrong), (count + 1) // 2)]
    return [answers[index] for index in sorted([*few_right, *wrong[: count - len(few_right)]])]


def _show_answers(found: dict[str, Any], console: Console, when: str, left_out: int) -> None:
    """Prints on `console` the score and the samples in `found`, which `answer` returned. `answer` calls it, and
    `_Delivery.show_numbers` for a run that was complete already. when: printed before the score, such as "before
    training"; "" prints nothing there. left_out: the number of rows that `answered` left out."""
    begin, rest = f"{when}: " if when else "", f" ({left_out:,} rows without an answer left out)" if left_out else ""
    console.print(f"{begin}exact match {100 * found['exact_match']:.1f} % of {found['rows']} held-out questions{rest}")
    for sample in found["samples"]:
        question, expected, given = sample["question"], sample["expected"], sample["given"]
        mark = "right" if given.strip() == expected.strip() else f"expected {expected!r}"
        console.print(fitted(f"  {question!r} -> {given!r} ({mark})", console))


def run(config: TrainConfig, check: bool = False, plan: bool = False, console: Console | None = None) -> int:
    """Does what `jaxtune train` does once it has read the config. It trains, exports the model and evaluates it as the
    config asks, and writes all results to the folder config.output. With `check` or `plan` it only prints, and writes
    nothing to that folder (but the caches of tokens and of compiled programs, which are elsewhere, may get entries).

    Args:
      config: the config of the run.
      check: True: the rows are only read, and it is shown how they are tokenised and packed.
      plan: True: only the memory plan is shown. If plan.device is set or data.train is empty, it is computed from the
        model's shapes alone (`show_plan`), otherwise with the rows, and by compiling the step (`show_memory`).
      console: prints; None writes to the terminal.
    Returns:
      The process's exit code: 0, or 75 if a signal stopped the run; the same command then continues from what is saved,
        if anything is. Errors, such as a ConfigError, are raised.
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
                report.check(trainer.model.given, trainer.data_summary(), trainer.batches, trainer.tokenizer, console)
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
    """Checks, before the train and evaluate commands read anything, that a run of several processes is possible. Raises
    ValueError if the processes' configs or package versions differ, or if the config asks for what several processes
    cannot do yet: training on sampled answers, evaluating them, or optim.offload. A single process is always accepted.
    """
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
    """Does a run of the train command by its config, for `run` without --check and --plan: loads, trains, exports and
    evaluates, prints on `console` what to do next (in the first process), and returns the exit code. If all results
    of the run exist already, it does not train, and prints their numbers. stop: watches for signals such as SIGTERM, on
    which it ends the run with TrainingInterrupted or Interrupted; `run` catches both. The exit code is 1 if the last
    state could not be saved."""
    with loading(config) as (weights, tokenizer, model):
        if note := report.cpu_note(model):
            console.print(note, markup=False, highlight=False)
        trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights, checks_folder=True)
        console.print(report.trained_table(trainer.model.given))
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
    for what, command in next_commands(config, trainer.output):
        console.print(f"  # {what}\n  {command}")
    return code


def show_memory(trainer: Trainer, console: Console) -> dict[str, float]:
    """Does what --plan asks for on this machine, without training: prints on `console` the plan of `trainer` (what
    becomes of the values that the backward reads, and the number of micro-batches), compiles its step (and that of
    further plans until one fits), and prints the predicted memory and the compiler's figure. The train command ignores
    what is returned; tests read it.

    Returns:
      {name: GB}: `predicted` and `compiled`, the step's peak memory by the planner and by the compiler; and `limit`,
        the memory that the step may take, unless that is not limited, as on a CPU.
    Raises:
      PlanError: the step of the smallest plan does not fit either.
    """
    planner = trainer.planner

    def show(line: str) -> None:
        """Prints `line` on `console`, broken between words at its width, and without markup."""
        console.print(fitted(line, console), markup=False, highlight=False)

    for line in planner.lines():
        show(line)
    programs = trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, show)
    if planner.device.name != "cpu":  # the speed of a CPU is not known
        price = trainer.config.plan.dollars_per_hour
        console.print(report.finish_line(planner.forecast, trainer.total_steps, price, planner.cost.devices))
    for line in [*trainer.memory_notes(), *trainer.disk_notes()]:
        show(line)
    need = planner.compiled_bytes(programs.accumulate, programs.update)
    return report.memory_plan(planner.forecast, need, programs.seconds, planner.budget_bytes, console)


class RunIsComplete(Exception):
    """Raised by `_Delivery.begin` before the first step if the config asks for an export, every such export exists
    already, is verified to be this run's and has the weights of its last step, and no evaluation is missing that the
    run could still make from its checkpoints. `_train` catches it, and prints the results instead of training."""


class _Delivery:
    """What the train command does with the trained model: it is exported first, so that no later failure can lose it,
    and then answers the held-out questions. The Trainer calls `begin` before the first step and `finish` after the last
    (folder.results.Delivery). The attribute `numbers` has the content of results.json: exact match "before" and "after"
    training (what `answer` returns), "eval_loss": {"first", "last"}, and with checkpoint.best the evaluation whose
    weights are exported, "best_checkpoint": {"step", "metric", "value"}.

    trainer: the run's. console: prints. If exact match is asked for, the constructor sets `trainer.sampled` to how the
    questions will be answered, from which the memory of that phase is planned; it raises ValueError if rows cannot be
    asked (`sampled_by`)."""

    def __init__(self, trainer: Trainer, console: Console):
        self.trainer, self.console, self.config, self.output = trainer, console, trainer.config, trainer.output
        self.numbers: dict[str, Any] = {}
        self.rows = "" if trainer.eval_data is None else trainer.eval_data.documents.identity
        if self.config.evaluation.exact_match_rows:  # rows that cannot be asked raise now, before training
            trainer.sampled = sampled_by(trainer)

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Compares the results that exist in the output folder (exports and results.json) with this run, before its
        first step. Then, if the config asks for it and no step was made yet, it answers the held-out questions, and
        writes the score to results.json at once. Afterwards `numbers` has at most the entry "before". A results.json
        that is damaged or of another run is deleted.

        Args:
          run: a function that returns what identifies the run; it waits for the weights, so it is called only if
            needed.
          start: the steps done so far: that of the checkpoint that the run continues from, or 0.
        Raises:
          RunIsComplete: all exports that the config asks for exist already, with the weights of the last step; and the
            run has no checkpoint (`start` is 0), or one of the last step and no evaluation is missing. `numbers` has
            what results.json has.
          ValueError: an export is of another run, or has files that no run wrote and would be overwritten.
        """
        names = (ADAPTER, MERGED, RESULTS)
        there = processes.of_first(lambda: [name for name in names if os.path.lexists(self.output / name)])
        if there:  # `run()` waits for the weights, so it is called only if there are results to compare with
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
                    f"train anew, name another output, such as output={next_name(self.output)}"
                )
            for name in there if start < total else ():
                if name != RESULTS:
                    require_replaceable(self.output / name, run(), total)
            self.numbers = {key: value for key, value in self.numbers.items() if key == "before"}
        if start == 0 and self.config.evaluation.exact_match_rows and self.config.evaluation.at_start:
            self.trainer.model.take_weights()
            given = self.trainer.model.given
            self.numbers = {"before": self._answers(given, BEFORE)}
            self._write_numbers(run())  # stored now, because a resumed run no longer has these weights

    def _answers(self, model: Decoder, when: str) -> dict[str, Any]:
        """Answers the held-out questions with `model`, and prints the score after the words `when`, such as "before
        training". Returns {"exact_match", "rows", "samples"} of the function `answer`. `begin` calls it before training
        and `finish` after it; evaluations between steps do not."""
        assert self.trainer.sampled is not None  # set in __init__, as the config asks for answers
        return answer(model, self.trainer.tokenizer, self.trainer.config, self.console, self.trainer.sampled, when)

    def _take_numbers(self, run: dict[str, Any]) -> None:
        """Reads the results.json that an earlier process of this run wrote into the attribute `numbers`. The file is
        deleted if it is damaged or of another run, and ignored if it is of other held-out rows and this run has some
        with a loss. run: what identifies this run (`Trainer._same_run`)."""
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
        """Whether the evaluations after training that the config asks for were made: the held-out loss after the last
        step is in metrics.jsonl, and `numbers`, read from results.json, has the exact match of the trained model under
        "after". The metrics of evaluation.generate are not looked for. `begin` asks it about a finished run that is
        started again, if its checkpoints exist: evaluations that are missing are then made. Without checkpoints the run
        would have to train anew, so they are not made."""
        wanted, last = self.trainer.evaluation, self.trainer.total_steps
        due = wanted.after_last(last) and self.rows
        answers = wanted.at_end and wanted.exact_match_rows
        measured = not due or last in m.evaluations(self.output / m.JSONL, self.rows)
        return bool(measured and (not answers or "after" in self.numbers))

    def _write_numbers(self, run: dict[str, Any]) -> None:
        """Writes `numbers`, the results so far, to results.json in the output folder, with a digest of `run` (the
        values that identify the run, from record.same_run) and the identity of its held-out rows, by which a run that
        is started again sees whether the file is its own."""
        content = self.numbers | {"run": digest(run), m.ROWS: self.rows}
        atomic_write(self.output / RESULTS, json.dumps(content, indent=2) + "\n")

    def show_numbers(self) -> None:
        """Prints the exact match before and after training, and the first and last held-out loss, as far as `numbers`
        has them: for a run that was complete already."""
        for key, when in (("before", BEFORE), ("after", AFTER)):
            if key in self.numbers:
                _show_answers(self.numbers[key], self.console, when, 0)
        if losses := self.numbers.get("eval_loss"):
            self.console.print(f"evaluation loss: {losses['first']:.4f} the first time, {losses['last']:.4f} the last")

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        """Exports the trained model to the folders adapter and merged, as the config asks, answers the held-out
        questions, and writes results.json if there is any number. It prints each folder that it wrote. In a run of
        several processes all of them call it, and the first one writes.

        Args:
          model: the trained model.
          run: the values that identify the run, as record.same_run returns them.
          trained: whether this process made any step; if not, exports that exist already are not written again.
        Raises:
          ValueError: a folder of an export is not a result of this run, or has to be written again and has files that
            no run wrote.
        """
        config, console = self.config, self.console
        host_memory.give_back()  # the compiled steps are freed by now
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
        self.numbers |= self.trainer.best
        if self.numbers:
            self._write_numbers(run)

    def _exports(self, adapted: bool) -> list[tuple[str, Callable[[Decoder, Path], None]]]:
        """(folder's name, function that writes a model to a folder) for each export that the config asks for. The
        adapter comes first, because it is quick. adapted: whether the model has an adapter; if not, none is
        exported."""
        tokenizer, wanted = self.trainer.tokenizer, self.config.export

        def whole(model: Decoder, folder: Path) -> None:
            """Writes `model` to `folder` as a checkpoint without an adapter, which is merged into the weights, and its
            tokenizer."""
            save_weights(merged_weights(model) if adapted else Weights(model), folder, tokenizer=tokenizer)

        exports: list[tuple[str, Callable[[Decoder, Path], None]]] = []
        if adapted and wanted.adapter:
            exports.append((ADAPTER, lambda model, folder: save_adapter(model, folder, tokenizer)))
        if wanted.merged:
            exports.append((MERGED, whole))
        return exports


def next_commands(config: TrainConfig, output: Path) -> list[tuple[str, str]]:
    """Commands that are useful after a run, [(purpose, command line)], which the train command prints at its end: one
    that asks the trained model a question, if it was exported; one that shows the profile, if there is one; and after a
    run on the packaged model (a first run) two more, which train a model of the hub on rows of one's own, and which
    show, without training, what memory and time an 8B model needs on a GPU. They are valid in the folder where the run
    was started. output: the run's folder. config: the run's; the question is that of a held-out row if exact match is
    measured and the row can be read, else "..."."""
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
        shown = spelled(f"profile show {shlex.quote(str(profile))}")
        commands.append(("where the time of the profiled steps went", shown))
    if Path(config.model.path or "").is_relative_to(Path(__file__).parents[1]):  # the packaged model: a first run
        train = spelled("train lora-0.5b data.train=rows.jsonl")
        commands.append(("train a model of the hub on rows of your own", train))
        plan = spelled("train qlora-8b --plan plan.device='RTX 4090'")
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands
