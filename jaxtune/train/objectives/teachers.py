"""The teacher of a distillation: a frozen model in the attribute `teacher` of the one that trains, so that it is
placed, planned and passed to programs like the model's own frozen weights.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.components import stored_as
from jaxtune.models.config import Source
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.files.model_folder import find_config, load_tokenizer
from jaxtune.models.files.quant import parameters, require_stated, stored_in
from jaxtune.models.generation.pictures import processor_of
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import copy_structure, freeze
from jaxtune.models.registry import config_from_hf, tower_config, weights_stored_in
from jaxtune.train.config import ConfigError, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig

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


def _checkpoint(path: str | None) -> str | None:
    """A teacher's folder or hub name; None if unset or "base". Raises ConfigError for an adapter."""
    if path is None or path == BASE:
        return None
    if base_of(path) is not None:
        raise ConfigError(f"objective.teacher = {path!r}: it is an adapter; export it merged with its base first")
    return path


def _beside(objective: ObjectiveConfig) -> str | None:
    """The checkpoint of a teacher that runs beside the student; None without one. Raises ConfigError for an adapter."""
    return None if objective.teacher_top_k is not None else _checkpoint(objective.teacher)


def teacher_shapes(objective: ObjectiveConfig, dtype: str, pictures: bool = False) -> Decoder | None:
    """The teacher with shapes for arrays, from its config.json, with its tower for `pictures`; None without one during
    the run. Raises ConfigError for an adapter.
    """
    path = _beside(objective)
    return None if path is None else shapes_of(path, dtype, objective.teacher_load_in, pictures)


def of_pass(name: str | None, load_in: str | None, base: ModelConfig) -> tuple[str, str | None]:
    """(Folder or hub name, weight format or None) of a teacher whose values are stored before the run. Raises
    ConfigError for a base with random weights, or an adapter.

      name: the objective's `teacher`; None or "base": the trained model's base.
      load_in: the format of a named one.
    """
    if (path := _checkpoint(name)) is not None:
        return path, load_in
    if base.path is None:
        raise ConfigError("objective.teacher = 'base': random weights (model.from_config) teach nothing; name one")
    return base.path, base.load_in


@functools.lru_cache(4)
def shapes_of(path: str, dtype: str, load_in: str | None, pictures: bool = False) -> Decoder:
    """The frozen teacher with shapes for arrays, from config.json; shared and cached, so do not change it. Raises
    ValueError.

      load_in: None: the checkpoint's own format.
      pictures: whether it has its tower.
    """
    hf = find_config(path, published=not pictures)
    require_stated(path, hf, load_in)
    shape, load_in = config_from_hf(hf), load_in or weights_stored_in(hf)
    tower = tower_config(hf) if pictures else None

    with initial.as_shapes():
        return freeze(stored_as(abstract_decoder(shape, dtype, tower), {}, load_in))


def open_teacher(objective: ObjectiveConfig, dtype: str, pictures: bool = False) -> Pretrained | None:
    """Opens the teacher's checkpoint, so that a wrong folder shows at once; None without one during the run. Raises
    ConfigError for an adapter, ValueError or OSError for no model, or one without a tower for `pictures`.
    """
    path = _beside(objective)
    return None if path is None else Pretrained(path, dtype, objective.teacher_load_in, pictures=pictures)


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
