"""The teacher of a distillation: a frozen model in the attribute `teacher` of the one that trains, so that it is
placed, planned and passed to programs like the model's own frozen weights.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.config import Source
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.files.quant import parameters, stored_in
from jaxtune.models.generation.pictures import processor_of
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import copy_structure, freeze
from jaxtune.models.precision import WORDS
from jaxtune.train.config import ConfigError, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.objectives.checkpoints import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BASE = "base"  # objective.teacher: the model itself with its adapter off


def with_teacher(student: Decoder, teacher: Decoder | None) -> Decoder:
    """A new model over the student's arrays with a frozen `teacher`; the student itself for None. Arrays may be
    `jax.ShapeDtypeStruct`s.

    ```python
    student, tokenizer = jaxtune.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
    teacher, _ = jaxtune.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", load_in="nf4")
    trainer = Trainer(with_teacher(jaxtune.get_peft_model(student), teacher), tokenizer, config, objective=Distill())
    ```

    Raises ValueError if vocabularies differ in size, or the teacher gives scores.
    """
    if teacher is None:
        return student
    student_config, teacher_config = student.config, teacher.config
    if not teacher_config.head.is_text:
        raise ValueError("the teacher gives scores and no next-token distributions; take a language model")
    if student_config.vocab_size != teacher_config.vocab_size:
        raise ValueError(
            f"the student's vocabulary has {student_config.vocab_size:,} entries and the teacher's "
            f"{teacher_config.vocab_size:,}; distillation compares distributions over the same tokens: take a teacher "
            "of the student's vocabulary"
        )
    model = copy_structure(student)
    model.teacher = freeze(without_teacher(teacher))
    return model


def without_teacher(model: Decoder) -> Decoder:
    """A model over the same arrays without a teacher; itself if it has none."""
    if model.teacher is None:
        return model
    model = copy_structure(model)
    model.teacher = None
    return model


def _named(path: str | None) -> str | None:
    """A teacher's folder or hub name; None if unset or "base". Raises ConfigError for an adapter."""
    if path is None or path == BASE:
        return None
    if base_of(path) is not None:
        raise ConfigError(f"objective.teacher = {path!r}: it is an adapter; export it merged with its base first")
    return path


def _beside(objective: ObjectiveConfig, dtype: str) -> Checkpoint | None:
    """The checkpoint of a teacher that runs beside the student; None without one. Raises ConfigError for an adapter."""
    path = None if objective.teacher_top_k is not None else _named(objective.teacher)
    return None if path is None else _alone(path, objective.teacher_load_in, WORDS[dtype])


def _alone(path: str, load_in: str | None, computes_in: str) -> Checkpoint:
    """A named teacher: the student's positions, precision map and FP8 products are not its own."""
    return Checkpoint(ModelConfig(path=path, load_in=load_in), Precision(computes_in))


def teacher_shapes(objective: ObjectiveConfig, dtype: str, pictures: bool = False) -> Decoder | None:
    """The teacher with shapes for arrays, from its config.json, with its tower for `pictures`; None without one during
    the run. Raises ConfigError for an adapter.
    """
    teacher = _beside(objective, dtype)
    return None if teacher is None else teacher.shapes(pictures)


def of_pass(name: str | None, load_in: str | None, base: Checkpoint) -> Checkpoint:
    """The teacher whose values are stored before the run. Raises ConfigError for a base with random weights, or an
    adapter.

      name: the objective's `teacher`; None or "base": the trained model's base.
      load_in: the format of a named one.
      base: of the run.
    """
    if (path := _named(name)) is not None:
        return _alone(path, load_in, base.precision.computes_in)
    if base.model.path is None:
        raise ConfigError("objective.teacher = 'base': random weights (model.from_config) teach nothing; name one")
    return base


def open_teacher(objective: ObjectiveConfig, dtype: str, pictures: bool = False) -> Pretrained | None:
    """Opens the teacher's checkpoint, so that a wrong folder shows at once; None without one during the run. Raises
    ConfigError for an adapter, ValueError or OSError for no model, or one without a tower for `pictures`.
    """
    teacher = _beside(objective, dtype)
    return None if teacher is None else teacher.open(pictures)


def load_teacher(
    pretrained: Pretrained | None, cancelled: threading.Event | None = None, mesh: jax.sharding.Mesh | None = None
) -> Decoder | None:
    """Loads a teacher, frozen; None for None. cancelled: ends the loading with CancelledError. mesh: divides the
    weights. Raises ValueError.
    """
    return None if pretrained is None else freeze(pretrained.load(cancelled, mesh))


def require_same_tokens(tokenizer: PreTrainedTokenizerFast, teacher: Pretrained | None) -> None:
    """Raises ConfigError if a token that both tokenizers have has two ids; accepts a missing teacher or tokenizer."""
    teacher_tokenizer = None if teacher is None else load_tokenizer(teacher.folder)
    if teacher is None or teacher_tokenizer is None:
        return
    teacher_ids = teacher_tokenizer.get_vocab()
    for token, student_id in tokenizer.get_vocab().items():
        if teacher_ids.get(token, student_id) != student_id:
            raise ConfigError(
                f"objective.teacher = {str(teacher.folder)!r}: its tokenizer gives {token!r} the id "
                f"{teacher_ids[token]}, and the student's {student_id}; distillation compares distributions over the "
                "same tokens: take a teacher with the student's tokenizer"
            )


def require_same_pictures(tokenizer: PreTrainedTokenizerFast, student: Source | None, teacher: Source | None) -> None:
    """Raises ConfigError unless both models cut pictures alike, so that a row's patches, which are the student's, are
    those of both; the teacher's limits of a picture's size do not count.
    """
    ours, theirs = (processor_of(source, tokenizer) for source in (student, teacher))
    if not ours.reads_like(theirs):
        path = None if teacher is None else teacher.path
        raise ConfigError(
            f"objective.teacher = {path!r}: its image processor cuts pictures otherwise than the student's: take a "
            "teacher of the student's family, with the same patches, rescaling and normalisation"
        )


def described(model: Decoder, objective: object) -> list[str]:
    """The line about an attached teacher, or that it is the model with its adapter off; [] for other objectives. GB are
    1e9 bytes of one copy.
    """
    teacher = model.teacher
    if teacher is None:
        is_base = getattr(objective, "teacher", "") in (None, BASE)  # other objectives have no such attribute
        return ["teacher: the model itself with its adapter off"] if is_base else []
    state = nnx.state(teacher)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    how = stored_in(teacher) or teacher.dtype
    return [
        f"teacher: {teacher.name_or_path or 'as it was given'}, {teacher.config.family}, "
        f"{parameters(state) / 1e9:.2f} B parameters in {how}, {size / 1e9:.2f} GB beside the student"
    ]
