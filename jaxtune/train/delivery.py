"""What a run leaves in its folder when it ends: exports, scores, and the check of earlier ones."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_card import Facts
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.files.weights import Weights
from jaxtune.models.hf import save_weights
from jaxtune.models.lora import has_adapter, without_adapter
from jaxtune.system import host_memory, processes
from jaxtune.system.files import atomic_write
from jaxtune.train.data.rendering.pictures import PictureOptions, picture_options
from jaxtune.train.evaluation.held_out_answers import AFTER, BEFORE, _show_answers, answer, sampled_by
from jaxtune.train.folder.record import digest, is_digest_of
from jaxtune.train.folder.results import holds, require_own, require_replaceable, write_result
from jaxtune.train.folder.run_folder import ADAPTER, MERGED, RESULTS, next_name
from jaxtune.train.log import metrics as m

if TYPE_CHECKING:
    from rich.console import Console

    from jaxtune.train.trainer import Trainer


class RunIsComplete(Exception):
    """All exports that the config asks for exist, of this run's last step, and no evaluation is missing that
    checkpoints allow.
    """


class Delivery:
    """Exports the trained model first, so that no later failure loses it, then answers the held-out questions.
    `numbers` is the content of results.json: exact match "before" and "after", "eval_loss": {"first", "last"},
    "best_checkpoint". ValueError at once if rows cannot be asked.
    """

    def __init__(self, trainer: Trainer, console: Console):
        self.trainer, self.console, self.config, self.output = trainer, console, trainer.config, trainer.output
        self.numbers: dict[str, Any] = {}
        self.rows = "" if trainer.eval_data is None else trainer.eval_data.documents.identity
        if self.config.evaluation.exact_match_rows:  # rows that cannot be asked raise now, before training
            positions = trainer.model.given.config.context_length
            settings, data = self.config.evaluation, self.config.data
            trainer.sampled = sampled_by(trainer.planner, trainer.tokenizer, settings, data, positions, self._pictures)

    @property
    def _pictures(self) -> PictureOptions | None:
        return picture_options(self.trainer.model.given, self.trainer.tokenizer, self.config.data)

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Compares the folder's results with this run, before its first step; then has a model that trains whole answer
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
        if start == 0 and self._asks_before and not self._base_stays:
            self.trainer.model.take_weights()
            untrained = self.trainer.model.given
            self.numbers = {"before": self._answers(untrained, BEFORE)}
            self._write_numbers(run())  # stored now, because a resumed run no longer has these weights

    @property
    def _asks_before(self) -> bool:
        return bool(self.config.evaluation.exact_match_rows and self.config.evaluation.at_start)

    @property
    def _base_stays(self) -> bool:
        """Whether the trained model without its adapter is the untrained one, so that it can answer later."""
        adapter = self.config.adapter
        return self.trainer.adapted and adapter is not None and adapter.path is None

    def _answers(self, model: Decoder, when: str) -> dict[str, Any]:
        assert self.trainer.sampled is not None  # set in __init__, as the config asks for answers
        settings, data, sampled = self.trainer.config.evaluation, self.trainer.config.data, self.trainer.sampled
        return answer(model, self.trainer.tokenizer, settings, data, self.console, sampled, when, self._pictures)

    def _take_numbers(self, run: dict[str, Any]) -> None:
        """Reads an earlier process's results.json; deletes a damaged or foreign one, and ignores one of other held-out
        rows.
        """
        path = self.output / RESULTS
        try:
            numbers = json.loads(path.read_text(encoding="utf-8"))
            is_own, of_these = is_digest_of(numbers.pop("run"), run), m.of_rows(numbers, self.rows)
            numbers.pop(m.ROWS, None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_own = of_these = False
        if not is_own:
            path.unlink()
        elif of_these or not self.rows:
            self.numbers = numbers

    def _is_measured(self) -> bool:
        """Whether the evaluations after training were made: held-out loss and exact match."""
        settings, last = self.trainer.spec.evaluation, self.trainer.total_steps
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
                write_result(target, run, total, functools.partial(write, model), self._facts())
            console.print(f"wrote {folder}")
        if config.export.adapter and has_adapter(model) and qat_spec(model) is not None:
            console.print("  qat: it is the adapter before rounding; the rounded weights are those of the merged model")
        if self._asks_before and self._base_stays and "before" not in self.numbers:
            self.numbers["before"] = self._answers(without_adapter(model), BEFORE)
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

    def _facts(self) -> Facts:
        """Of the run, for the cards of its exports."""
        config, losses = self.config, list(m.evaluations(self.output / m.JSONL, self.rows).values())
        rows = [config.data.train] if isinstance(config.data.train, str) else config.data.train
        figures: dict[str, str | int | float] = {
            "objective": config.objective.name,
            "steps": self.trainer.total_steps,
            "rows per step": config.rows_per_step,
            "learning rate": config.optim.learning_rate,
        }
        if config.adapter is not None:
            figures |= {"rank": config.adapter.r, "alpha": config.adapter.lora_alpha}
        if losses:
            figures |= {"evaluation loss, first": losses[0], "evaluation loss, last": losses[-1]}
        return Facts(
            base=str(config.model.path or ""),
            tags=[config.objective.name, *["lora"] * (config.adapter is not None)],
            datasets=[name if isinstance(name, str) else name[0] for name in rows],
            figures=figures,
        )

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
