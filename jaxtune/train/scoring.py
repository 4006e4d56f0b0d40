"""The evaluate command: scores the weights of a run or recipe on held-out rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jaxtune.models.adapters import trained_over
from jaxtune.models.precision import DTYPES
from jaxtune.system import terminal, timing
from jaxtune.system.program_cache import use_program_cache
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.config import AdapterConfig, CheckpointConfig, ModelConfig, OptimConfig, QatConfig, TrainConfig
from jaxtune.train.config.precision import REST, Precision
from jaxtune.train.data.rendering.pictures import picture_options
from jaxtune.train.display import rows_report
from jaxtune.train.evaluation.answer_metrics import SAMPLES
from jaxtune.train.evaluation.held_out_answers import answer, sampled_by
from jaxtune.train.folder.best import BEST, BestEvaluation, best_saved
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.record import is_digest_of
from jaxtune.train.folder.results import Result, read_result
from jaxtune.train.folder.run_folder import ADAPTER, CHECKPOINTS, CONFIG, MERGED, RESULTS
from jaxtune.train.log import metrics as m
from jaxtune.train.planning.phases import phase
from jaxtune.train.spec.loading import loading
from jaxtune.train.spec.run_spec import decided_objective
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Weights:
    """The keys of a config that load weights, or the model into which a checkpoint is restored."""

    model: ModelConfig
    adapter: AdapterConfig | None
    qat: QatConfig | None
    optim: OptimConfig
    precision: Literal["bf16", "fp32", "fp16"] | dict[str, str]

    @property
    def numbers(self) -> Precision:
        return Precision.of(self.precision)

    def within(self, words: Mapping[str, str]) -> Weights:
        """With other words for modules."""
        return replace(self, precision={**words, REST: self.numbers.computes_in})


@dataclasses.dataclass(frozen=True)
class Scored:
    """Which weights are scored: the config's, a checkpoint's, or what a run exported."""

    text: str
    weights: Weights
    checkpoints: Path | None = None
    """The folder of checkpoints, if one has the weights."""
    step: int | None = None
    """Of that checkpoint; None: the newest intact one."""
    result: Result | None = None
    """The exported folder, if it has the weights. Its `step` is the run's last, even if the weights are of the best
    evaluation.
    """


def weights_to_score(
    weights: Weights, checkpoint: CheckpointConfig, recipe: str = "", overrides: Sequence[str] = ()
) -> Scored:
    """Finds the weights, and loads nothing: a run's result if `recipe` is the config.yaml of its folder, else what the
    recipe names, as also with overrides of `model` or `adapter`.

    A run's result is its export (with QAT the merged model first, else the adapter), or a checkpoint if nothing is
    exported or it is of a later step: the best one with checkpoint.best, else the newest. ValueError if there are no
    trained weights, or the result is damaged.
    """
    run = Path(recipe).parent
    weight_overrides = [text for text in overrides if text.split("=")[0].split(".")[0] in ("model", "adapter")]
    is_run = Path(recipe).name == CONFIG and ((run / m.JSONL).exists() or (run / CHECKPOINTS).exists())
    if not is_run or weight_overrides:
        text, adapter = str(weights.model.path or f"random weights of {weights.model.from_config}"), weights.adapter
        if adapter is not None:
            text += f" with the adapter {adapter.path}" if adapter.path else " with a new adapter, untrained"
        return Scored(text, weights)
    order = [MERGED, ADAPTER] if weights.qat is not None else [ADAPTER, MERGED]  # QAT rounds when it merges
    export_folder = next((run / name for name in order if (run / name).exists()), None)
    saved = max(saved_steps(run / CHECKPOINTS), default=0)
    result = None if export_folder is None else read_result(export_folder)
    if result is None and not saved:
        raise ValueError(
            f"{run} has no trained weights: no {ADAPTER}, {MERGED} or checkpoint yet. To score the model that it "
            "begins from, name its recipe, or set model.path"
        )
    if result is None or saved > result.step:
        best = best_saved(run, checkpoint)
        text, step = f"checkpoint of step {saved} in {run / CHECKPOINTS}", None
        if best is not None:
            step = best["step"]
            text = f"checkpoint of step {step} in {run / CHECKPOINTS} ({_best(best)}; the newest is of step {saved})"
        elif checkpoint.best is not None:
            text += f" (the newest: no evaluation of a saved step has {checkpoint.best})"
        return Scored(text, weights, run / CHECKPOINTS, step)
    exported = _exported(run, result)
    of_step = (
        f"step {result.step}" if exported is None else f"step {exported['step']} of {result.step}, {_best(exported)}"
    )
    text = f"{result.folder} ({of_step})"
    if result.folder.name == ADAPTER:
        weights = replace(weights, adapter=AdapterConfig(path=str(result.folder)))
        return Scored(f"{text} on {weights.model.path}", weights, result=result)
    plain = {
        "from_config": None,
        "load_in": None,
        "compute": None,
        "rope_scaling": None,
        "max_position_embeddings": None,
    }
    model = replace(weights.model, path=str(result.folder), **plain)
    # The Trainer needs an optimizer, which is not used; this one has no states.
    optim = OptimConfig(name="sgd", momentum=0.0)
    components = weights.numbers.components
    words = {pattern: word for pattern, word in components.items() if word in DTYPES}  # merged weights are plain
    weights = replace(weights.within(words), model=model, adapter=None, qat=None, optim=optim)
    return Scored(text, weights, result=result)


def _best(evaluation: BestEvaluation) -> str:
    return f"the best by {evaluation['metric']}, {evaluation['value']:.4f}"


def _exported(run: Path, result: Result) -> BestEvaluation | None:
    """The best evaluation whose weights were exported, by results.json; for words only."""
    try:
        numbers = json.loads((run / RESULTS).read_text(encoding="utf-8"))
        evaluation = numbers[BEST] if is_digest_of(numbers["run"], result.run) else None
        return evaluation and BestEvaluation(
            step=int(evaluation["step"]), metric=str(evaluation["metric"]), value=float(evaluation["value"])
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def loaded_in(scored: Scored, load_in: str | None, overrides: Sequence[str] = ()) -> Scored:
    """`scored` with the frozen weights in the format `load_in` ("stored": the checkpoint's own). None: an adapter's
    base as it was trained over, if its folder says so and no override sets model.load_in. Quantised weights without an
    adapter get an untrained one of rank 1, which they need. ValueError for a format with a checkpoint.
    """
    weights, model = scored.weights, scored.weights.model
    if scored.checkpoints is not None:
        if load_in is not None:
            raise ValueError(
                f"--load-in {load_in}: what is scored is a {scored.text}, which goes with the weights of its run; let "
                "the run end, and score what it exports"
            )
        return scored
    adapter = weights.adapter
    if load_in is not None:
        format_name = None if load_in == "stored" else load_in
        model_config = replace(
            model, load_in=format_name, compute=model.compute if format_name == model.load_in else None
        )
    else:
        is_set = any(text.split("=")[0] in ("model", "model.load_in") for text in overrides)
        path = None if adapter is None or is_set else adapter.path
        over = None if path is None else trained_over.read(Path(path).expanduser())
        if over is None:
            return scored
        model_config = replace(model, load_in=over.load_in, compute=over.compute)
        numbers = weights.numbers
        weights = weights.within(numbers.components or over.words(numbers.dtype, over.load_in))
    if model_config.load_in is not None and adapter is None:
        adapter = AdapterConfig(r=1)  # quantised weights need an adapter; an untrained one changes nothing
    return replace(scored, weights=replace(weights, model=model_config, adapter=adapter))


def evaluate(
    config: TrainConfig,
    recipe: str = "",
    overrides: Sequence[str] = (),
    eval_rows: float = 0,
    load_in: str | None = None,
) -> dict[str, Any]:
    """Scores weights on the held-out rows, prints the results on stderr and returns them: {"weights", "eval_loss" (not
    if rows have only questions), "eval_UNIT", the objective's "eval_NAME"}, what `answer` returns, and metrics of
    evaluation.generate (NaN as None) with "eval_samples". A checkpoint's folder is locked meanwhile, and incomplete
    saves of a dead run go.

      eval_rows: the recipe's data.eval_rows if data.eval was overridden: they stay out of data.train, as a run's
      checkpoint is known by its training rows.
      load_in: format of the frozen weights; "stored"; None: as configured or trained over.
      recipe, overrides: the file that `config` was read from, and the settings given beside it, such as
      "data.eval=FILE".

    ValueError without such weights or held-out rows, for rows that the run trained on, or while it is running;
    CheckpointError without an intact checkpoint that fits.
    """
    timing.imported()
    use_program_cache()
    console = terminal.console(stderr=True, soft_wrap=True)
    decided_objective(config)
    weights = Weights(config.model, config.adapter, config.qat, config.optim, config.precision)
    scored = loaded_in(weights_to_score(weights, config.checkpoint, recipe, overrides), load_in, overrides)
    console.print(f"weights: {scored.text}")
    config = replace(config, **vars(scored.weights))
    held_out, of_run = None, config
    if eval_rows and config.evaluation.generate:
        if scored.checkpoints is not None:
            raise ValueError(
                f"evaluation.generate = {[*config.evaluation.generate]}: the run took its held-out rows out of "
                "data.train and has exported nothing yet; set evaluation.exact_match_rows instead, or let the run end"
            )
    elif eval_rows:
        held_out = config.data.eval
        data, evaluation = replace(config.data, eval=None, eval_rows=eval_rows), config.evaluation
        of_run = replace(config, data=data, evaluation=replace(evaluation, exact_match_rows=0))  # asked below
    # Weights stream under an adapter, with which a checkpoint of a model that trains whole is another run's.
    streams = scored.checkpoints is None or config.adapter is not None
    with loading(config, trains=False, streams=streams) as (_, tokenizer, model):
        trainer = Trainer(model, tokenizer, of_run, eval_rows=held_out, keeps_model=False, trains=False)
    for line in trainer.stream_lines():
        console.print(fitted(line, console), markup=False, highlight=False)
    if scored.result is not None and config.data.eval_rows:
        _require_same_split(scored.result, trainer)
    for warning in rows_report.held_out_warnings(trainer.train_data, trainer.eval_data):
        console.print(fitted(f"warning: {printable(warning)}", console))
    results: dict[str, Any] = {"weights": scored.text}
    if scored.checkpoints is None:
        results |= trainer.evaluate(trained=bool(config.adapter and config.adapter.path))
    else:
        del model  # so that the checkpoint's weights can take the place of its trained tensors
        values, model = trainer.evaluate_checkpoint(scored.checkpoints, scored.step)
        results |= values
    unit = trainer.spec.objective.unit
    if "eval_loss" in results:
        console.print(f"evaluation loss {results['eval_loss']:.4f} over {results[f'eval_{unit}']:,} {unit}")
    if trainer.answers is not None:
        with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.generate=[]"):
            answers = trainer.answers(model)
        for line in answers.lines():
            console.print(fitted(line, console))
        results |= {key: None if math.isnan(value) else value for key, value in answers.metrics.items()}
        results[SAMPLES] = answers.samples
    if config.evaluation.exact_match_rows:
        settings, positions = config.evaluation, trainer.model.given.config.context_length
        pictures = picture_options(trainer.model.given, trainer.tokenizer, config.data)
        sampled = sampled_by(trainer.engine.planner, trainer.tokenizer, settings, config.data, positions, pictures)
        results |= answer(model, tokenizer, settings, config.data, console, sampled, pictures=pictures)
    return results


def _require_same_split(result: Result, trainer: Trainer) -> None:
    """ValueError if data.eval_rows takes out other rows than the run did, which trained on some of them."""
    key, rows = "config.data.eval_rows", trainer.config.data.eval_rows
    held_out, tokens = result.run.get(key), result.run.get("data.tokens_crc32")
    if (held_out, tokens) != (rows, trainer.batches.identity().get("tokens_crc32")):
        source_words = "data.train" if held_out != rows else "other rows, or by another template"
        raise ValueError(
            f"data.eval_rows = {rows}: the run held out {held_out} rows of {source_words}, so it was trained "
            "on some of these; set data.eval to a file of held-out rows, and data.eval_rows=0"
        )
