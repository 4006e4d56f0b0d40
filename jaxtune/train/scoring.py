"""The evaluate command (`evaluate`). `weights_to_score` finds which weights it scores, those of a run or those that a
recipe names, as a `Scored`; `loaded_in` sets the format in which they are loaded; and `evaluate` scores them on the
held-out rows; `_require_same_split` refuses rows of data.eval_rows that the run trained on. `_exported` finds the best
evaluation whose weights a run exported, and `_best` writes it in words."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtune.models.adapters import trained_over
from jaxtune.models.precision import DTYPES
from jaxtune.system import terminal
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.answer_metrics import SAMPLES
from jaxtune.train.app import answer, require_fit_for_processes, sampled_by
from jaxtune.train.config import AdapterConfig, OptimConfig, TrainConfig
from jaxtune.train.display import metrics as m
from jaxtune.train.display import report
from jaxtune.train.folder.best import BEST, BestEvaluation, best_saved
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.record import is_digest_of
from jaxtune.train.folder.results import Result, read_result
from jaxtune.train.folder.run_folder import ADAPTER, CHECKPOINTS, CONFIG, MERGED, RESULTS
from jaxtune.train.loading import load_model
from jaxtune.train.planning.phases import phase
from jaxtune.train.program.program_cache import use_program_cache
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Scored:
    """Which weights the evaluate command scores, as `weights_to_score` finds them: those that the config names, those
    of a run's best or newest checkpoint, or those that a run exported."""

    text: str
    """The weights in words, for the screen and the results."""
    config: TrainConfig
    """The config that loads the weights, or the model into which the checkpoint's are restored."""
    checkpoints: Path | None = None
    """The folder of the run's checkpoints, if one of them has the weights; otherwise None."""
    step: int | None = None
    """The step of that checkpoint; None for the newest intact one, or without `checkpoints`."""
    result: Result | None = None
    """The folder that the run exported (an adapter or a merged model) as its proof describes it, if it has the weights;
    otherwise None. `evaluate` checks by its record that the same rows were left out of training. Its `step` is the last
    one of the run, also where the weights are of the best evaluation."""


def weights_to_score(config: TrainConfig, recipe: str = "", overrides: Sequence[str] = ()) -> Scored:
    """Finds the weights that `jaxtune evaluate` scores, and loads nothing: the result of a run if `recipe` is the
    config.yaml of its folder, which has metrics or checkpoints, otherwise the model that the recipe names. If an
    override sets a key of `model` or `adapter`, the weights are always those that the config names.

    A run's result is its exported adapter or model (with QAT the model, otherwise the adapter, if both exist), or a
    checkpoint if nothing is exported or a checkpoint is of a later step: with checkpoint.best that of the best
    evaluation, as in what the run exports, and the newest one without it, or if no saved step has such an evaluation.
    The config of the result loads these weights: an exported model has neither adapter nor QAT there.

    Args:
      config: of the recipe, overrides applied.
      recipe: its file or name.
      overrides: "key=value" arguments of the command.
    Raises:
      ValueError: the run has no trained weights yet, or its result is damaged.
    """
    run = Path(recipe).parent
    chosen = [text for text in overrides if text.split("=")[0].split(".")[0] in ("model", "adapter")]
    is_run = Path(recipe).name == CONFIG and ((run / m.JSONL).exists() or (run / CHECKPOINTS).exists())
    if not is_run or chosen:
        text = str(config.model.path or f"random weights of {config.model.from_config}")
        if config.adapter is not None:
            text += (
                f" with the adapter {config.adapter.path}" if config.adapter.path else " with a new adapter, untrained"
            )
        return Scored(text, config)
    order = [MERGED, ADAPTER] if config.qat is not None else [ADAPTER, MERGED]  # QAT rounds when it merges
    found = next((run / name for name in order if (run / name).exists()), None)
    saved = max(saved_steps(run / CHECKPOINTS), default=0)
    result = None if found is None else read_result(found)
    if result is None and not saved:
        raise ValueError(
            f"{run} has no trained weights: no {ADAPTER}, {MERGED} or checkpoint yet. To score the model that it "
            "begins from, name its recipe, or set model.path"
        )
    if result is None or saved > result.step:
        best = best_saved(run, config.checkpoint)
        text, step = f"checkpoint of step {saved} in {run / CHECKPOINTS}", None
        if best is not None:
            step = best["step"]
            text = f"checkpoint of step {step} in {run / CHECKPOINTS} ({_best(best)}; the newest is of step {saved})"
        elif config.checkpoint.best is not None:
            text += f" (the newest: no evaluation of a saved step has {config.checkpoint.best})"
        return Scored(text, config, run / CHECKPOINTS, step)
    exported = _exported(run, result)
    of_step = (
        f"step {result.step}" if exported is None else f"step {exported['step']} of {result.step}, {_best(exported)}"
    )
    text = f"{result.folder} ({of_step})"
    if result.folder.name == ADAPTER:
        config = replace(config, adapter=AdapterConfig(path=str(result.folder)))
        return Scored(f"{text} on {config.model.path}", config, result=result)
    plain = {
        "from_config": None,
        "load_in": None,
        "compute": None,
        "rope_scaling": None,
        "max_position_embeddings": None,
    }
    model = replace(config.model, path=str(result.folder), **plain)
    # The Trainer needs an optimizer, which is not used; this one has no states.
    optim = OptimConfig(name="sgd", momentum=0.0)
    words = {pattern: word for pattern, word in config.components.items() if word in DTYPES}  # merged weights are plain
    config = replace(config, precision=words | {"*": config.computes_in})
    return Scored(text, replace(config, model=model, adapter=None, qat=None, optim=optim), result=result)


def _best(found: BestEvaluation) -> str:
    """A best evaluation (`found`) in words, for Scored.text: "the best by eval_loss, 0.1234"."""
    return f"the best by {found['metric']}, {found['value']:.4f}"


def _exported(run: Path, result: Result) -> BestEvaluation | None:
    """The evaluation whose weights a run exported as its best ones, as results.json in its folder `run` names it, for
    Scored.text only: which weights are scored does not depend on it. None if it exported the last ones, or if the file
    is missing, cannot be read or is of another run than `result`."""
    try:
        numbers = json.loads((run / RESULTS).read_text(encoding="utf-8"))
        found = numbers[BEST] if is_digest_of(numbers["run"], result.run) else None
        return found and BestEvaluation(
            step=int(found["step"]), metric=str(found["metric"]), value=float(found["value"])
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def loaded_in(scored: Scored, load_in: str | None, overrides: Sequence[str] = ()) -> Scored:
    """Returns `scored` with a config that loads the layers' frozen weights in the format `load_in`, or, without one, in
    the format over which the adapter was trained, for the evaluate command. If the format is a quantised one and the
    weights have no adapter, the config gets a new adapter of rank 1, which changes nothing, because such weights need
    one.

    Args:
      scored: the weights to score, from `weights_to_score`.
      load_in: a format of from_pretrained's load_in, or "stored" for the checkpoint's own; model.compute is kept only
        if the format is that of the config. With None, the base of an adapter is loaded in the format and compute
        format that the adapter was trained over, and, unless the config has a precision map, with the precision of
        single modules; this needs a folder that records them, and no override of model.load_in. Otherwise `scored`
        itself is returned.
      overrides: "key=value" arguments of the command.
    Raises:
      ValueError: a format is given, and the weights are a checkpoint, which belongs to the base of its run.
    """
    config, model = scored.config, scored.config.model
    if scored.checkpoints is not None:
        if load_in is not None:
            raise ValueError(
                f"--load-in {load_in}: what is scored is a {scored.text}, which goes with the weights of its run; let "
                "the run end, and score what it exports"
            )
        return scored
    adapter = config.adapter
    if load_in is not None:
        wanted = None if load_in == "stored" else load_in
        kept = replace(model, load_in=wanted, compute=model.compute if wanted == model.load_in else None)
    else:
        is_set = any(text.split("=")[0] in ("model", "model.load_in") for text in overrides)
        path = None if adapter is None or is_set else adapter.path
        over = None if path is None else trained_over.read(Path(path).expanduser())
        if over is None:
            return scored
        kept = replace(model, load_in=over.load_in, compute=over.compute)
        words = config.components or over.words(config.dtype, over.load_in)
        config = replace(config, precision=words | {"*": config.computes_in})
    if kept.load_in is not None and adapter is None:
        adapter = AdapterConfig(r=1)  # quantised weights need an adapter; an untrained one changes nothing
    return replace(scored, config=replace(config, model=kept, adapter=adapter))


def evaluate(
    config: TrainConfig, recipe: str = "", overrides: Sequence[str] = (), taken: float = 0, load_in: str | None = None
) -> dict[str, Any]:
    """The evaluate command: scores the weights that `weights_to_score` finds on the held-out rows, and prints the
    results in words on stderr; the command prints what it returns as JSON. It writes no results to the run's folder. If
    it scores a checkpoint, the folder of checkpoints is locked meanwhile, and incomplete saves of a dead run in it are
    removed (Checkpointer).

    Args:
      config: the config of the recipe, overrides applied.
      recipe: the file or name of the recipe.
      overrides: "key=value" arguments of the command.
      taken: the recipe's data.eval_rows (a number or share of rows) if an override of data.eval replaced it, else 0. A
        run's checkpoint is recognised by its training rows, so the same rows must be left out of data.train as in the
        run, though others are scored.
      load_in: the format of the frozen weights, as load_in of from_pretrained, or "stored" for the checkpoint's own;
        None keeps that of the config or the adapter.
    Returns:
      {"weights": in words, "eval_loss", "eval_UNIT": the number of targets or pairs, and the objective's other metrics
        as "eval_NAME"}. With evaluation.exact_match_rows it also has what app.answer returns: "exact_match", "rows"
        (the number of questions) and "samples". With evaluation.generate it has its metrics (None for one that is NaN)
        and "eval_samples", some of its answers. If the held-out rows have only questions, it has no loss.
    Raises:
      ValueError: there are no such weights, no held-out rows, or these are not those that the run left out; or the run
        whose checkpoint is scored is still running.
      CheckpointError: the run has no intact checkpoint, or it does not fit the config.
    """
    use_program_cache()
    console = terminal.console(stderr=True, soft_wrap=True)
    require_fit_for_processes(config)
    scored = loaded_in(weights_to_score(config, recipe, overrides), load_in, overrides)
    console.print(f"weights: {scored.text}")
    config = scored.config
    model, tokenizer = load_model(config)
    held_out, data = None, config.data
    if taken:
        held_out, data = data.eval, replace(data, eval=None, eval_rows=taken)
    of_run = replace(config, data=data)
    trainer = Trainer(model, tokenizer, of_run, eval_rows=held_out, keeps_model=False, trains=False)
    if scored.result is not None and config.data.eval_rows:
        _require_same_split(scored.result, trainer)
    for warning in report.held_out_warnings(trainer.train_data, trainer.eval_data):
        console.print(fitted(f"warning: {printable(warning)}", console))
    results: dict[str, Any] = {"weights": scored.text}
    if scored.checkpoints is None:
        results |= trainer.evaluate(trained=bool(config.adapter and config.adapter.path))
    else:
        del model  # so that the checkpoint's weights can take the place of its trained tensors
        values, model = trainer.evaluate_checkpoint(scored.checkpoints, scored.step)
        results |= values
    unit = trainer.objective.unit
    if "eval_loss" in results:
        console.print(f"evaluation loss {results['eval_loss']:.4f} over {results[f'eval_{unit}']:,} {unit}")
    if trainer.answers is not None:
        with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.generate=[]"):
            answered = trainer.answers(model)
        for line in answered.lines():
            console.print(fitted(line, console))
        results |= {key: None if math.isnan(value) else value for key, value in answered.metrics.items()}
        results[SAMPLES] = answered.samples
    if config.evaluation.exact_match_rows:
        results |= answer(model, tokenizer, config, console, sampled_by(trainer))
    return results


def _require_same_split(result: Result, trainer: Trainer) -> None:
    """Raises ValueError if data.eval_rows takes other rows out of data.train than the run did, because some of them
    were then trained on: if the number or share differs from the run's, or the tokens of the remaining rows do. The
    evaluate command calls it for exported weights if data.eval_rows is not 0; a checkpoint is compared when it is
    restored. result: the exported weights of that run, with its record. trainer: has the config and the training rows
    of the evaluation."""
    key, rows = "config.data.eval_rows", trainer.config.data.eval_rows
    held_out, tokens = result.run.get(key), result.run.get("data.tokens_crc32")
    if (held_out, tokens) != (rows, trainer.batches.identity().get("tokens_crc32")):
        of = "data.train" if held_out != rows else "other rows, or by another template"
        raise ValueError(
            f"data.eval_rows = {rows}: the run held out {held_out} rows of {of}, so it was trained on some of these; "
            "set data.eval to a file of held-out rows, and data.eval_rows=0"
        )
