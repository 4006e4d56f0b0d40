"""The teacher of a distillation: a second, frozen model that is attached to the one that trains.

A `Decoder` with a teacher has it as its attribute `teacher`. So its weights are placed on the devices, counted by the
planner and given to the step's programs as the frozen weights of the model itself are. `with_teacher` attaches one, and
`without_teacher` gives the model without it. `teacher_of` says which teacher a config names. A run opens and loads the
teacher that its config names (`open_teacher`, `load_teacher`), and `teacher_shapes` gives the planner its shapes before
that. `of_pass` and `pass_shapes` take their place for a teacher whose log-probabilities are stored before the run
(stored_teachers.py; `_stored_before`). `_shapes` makes the shapes of both. `require_same_tokens` compares a teacher's
tokenizer with the student's. `described` makes the line about the teacher that a run prints."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import find_config, load_tokenizer
from jaxtune.models.files.quant import parameters, require_stated, stored_in
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import copy_structure, freeze
from jaxtune.models.registry import config_from_hf, weights_stored_in
from jaxtune.train.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BASE = "base"  # objective.teacher: the model itself with its adapter off


def with_teacher(student: Decoder, teacher: Decoder | None) -> Decoder:
    """Attaches a teacher to a model that is to be distilled: returns a new model over the arrays of `student`, whose
    attribute `teacher` is a frozen model over the arrays of `teacher`, without a teacher of its own; `student` itself
    if `teacher` is None. A run calls it for the teacher that its config names, the planner calls it with shapes, and a
    Python script may call it before it makes a Trainer. The arrays may be `jax.ShapeDtypeStruct`s.

    ```python
    student, tokenizer = jaxtune.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
    teacher, _ = jaxtune.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", load_in="nf4")
    trainer = Trainer(with_teacher(jaxtune.get_peft_model(student), teacher), tokenizer, config, objective=Distill())
    ```

    Raises:
      ValueError: the vocabularies differ in size, or the teacher gives scores and does not predict tokens.
    """
    if teacher is None:
        return student
    own, others = student.config, teacher.config
    if not others.head.is_text:
        raise ValueError("the teacher gives scores and no next-token distributions; take a language model")
    if own.vocab_size != others.vocab_size:
        raise ValueError(
            f"the student's vocabulary has {own.vocab_size:,} entries and the teacher's {others.vocab_size:,}; "
            "distillation compares distributions over the same tokens: take a teacher of the student's vocabulary"
        )
    model = copy_structure(student)
    model.teacher = freeze(without_teacher(teacher))
    return model


def without_teacher(model: Decoder) -> Decoder:
    """Returns a model over the same arrays whose attribute `teacher` is None; `model` itself if it has no teacher. The
    model that a run exports, and the student of stored log-probabilities, must not contain the teacher."""
    if model.teacher is None:
        return model
    model = copy_structure(model)
    model.teacher = None
    return model


def teacher_of(config: TrainConfig) -> str | None:
    """The folder or hub name of the teacher that a config asks for (objective.teacher); None if that is not set or
    "base": there is then no teacher to load by a name, as with the trained model itself with its adapter off.
    `teacher_shapes`, `of_pass` and `open_teacher` ask it.

    Raises:
      ConfigError: the folder is that of an adapter, which must be merged with its base first.
    """
    path = config.objective.teacher
    if path is None or path == BASE:
        return None
    if base_of(path) is not None:
        raise ConfigError(f"objective.teacher = {path!r}: it is an adapter; export it merged with its base first")
    return path


def _stored_before(config: TrainConfig) -> bool:
    """Whether `config` asks for the teacher's log-probabilities before the run (objective.teacher_top_k is set). The
    teacher is then not in memory during the run, so `teacher_shapes` and `open_teacher` return None."""
    return config.objective.teacher_top_k is not None


def teacher_shapes(config: TrainConfig) -> Decoder | None:
    """The teacher that a config asks for, with shapes (jax.ShapeDtypeStruct) in place of its arrays, from its
    config.json alone; None if the config asks for none, or for one that runs only before the training. With it the
    planner counts the teacher's memory before weights are loaded. Raises ConfigError if the teacher's folder is that of
    an adapter."""
    path = None if _stored_before(config) else teacher_of(config)
    return None if path is None else _shapes(path, config.dtype, config.objective.teacher_load_in)


def of_pass(config: TrainConfig, name: str | None) -> tuple[str, str | None]:
    """(folder or hub name; the format in which its weights are loaded, such as "nf4", or None for that of its files) of
    a teacher whose log-probabilities are stored before the run, by which StoredTeacher opens it and `pass_shapes` makes
    its shapes. config: the run's. name: the objective's `teacher`.

    If `name` is None or "base", the teacher is the model that trains, without its adapter, and ConfigError is raised if
    that has random weights (no model.path). With any other name, the teacher is the one that objective.teacher of the
    config names, or `name` itself if the config names none; ConfigError is then raised if the config's is an adapter's
    folder."""
    if name not in (None, BASE):
        return teacher_of(config) or name, config.objective.teacher_load_in
    if config.model.path is None:
        raise ConfigError("objective.teacher = 'base': random weights (model.from_config) teach nothing; name one")
    return config.model.path, config.model.load_in


def pass_shapes(config: TrainConfig, name: str | None, load_in: str | None = None) -> Decoder:
    """The teacher of `of_pass`, with shapes (jax.ShapeDtypeStruct) in place of its arrays, from its config.json alone.
    The pass in which its log-probabilities are stored is planned by it. config, name: as for `of_pass`. load_in: a
    format for its weights, such as "nf4", in place of the one that the config asks for; None: that one. Raises
    ConfigError as `of_pass` does."""
    path, asked = of_pass(config, name)
    return _shapes(path, config.dtype, load_in or asked)


@functools.lru_cache(4)
def _shapes(path: str, dtype: str, load_in: str | None) -> Decoder:
    """Builds the teacher with shapes (jax.ShapeDtypeStruct) in place of its arrays, from its config.json alone; no
    weights are read. The latest four results are cached, because the planner asks often.

    Args:
      path: the teacher's folder or hub name.
      dtype: the dtype of the weights that are not quantised.
      load_in: the format in which the weights are quantised, such as "nf4"; None means the format that the checkpoint
        itself stores, and no quantisation if it stores plain floats.
    Returns:
      the frozen teacher; callers share it and must not change it.
    Raises:
      ValueError: config.json cannot be used, or it states no weights in a format in which weights only stay.
    """
    hf = find_config(path)
    require_stated(path, hf, load_in)
    shape, load_in = config_from_hf(hf), load_in or weights_stored_in(hf)

    def make() -> Decoder:
        """Builds the frozen teacher, with quantised weights if a format is asked for. It is only traced for the shapes,
        so that no array is made."""
        model = Decoder(shape, jax.random.key(0), dtype)
        return freeze(stored_as(model, {}, load_in))

    return nnx.eval_shape(make)


def open_teacher(config: TrainConfig) -> Pretrained | None:
    """Opens the checkpoint of the teacher that a config asks for, from which load_teacher reads the weights later: a
    wrong folder is found at once. None if the config asks for no teacher, or for one that runs only before the training
    (stored_teachers.py). Raises ConfigError if the folder is that of an adapter, and another ValueError or OSError if
    it is no model."""
    path = None if _stored_before(config) else teacher_of(config)
    if path is None:
        return None
    return Pretrained(path, config.dtype, config.objective.teacher_load_in)


def load_teacher(
    pretrained: Pretrained | None, cancelled: threading.Event | None = None, mesh: jax.sharding.Mesh | None = None
) -> Decoder | None:
    """Loads the weights of the teacher `pretrained` (opened by open_teacher, or by StoredTeacher for its pass) and
    returns it frozen, as a Decoder with its arrays; None if `pretrained` is None. Only the weights are loaded here:
    `with_teacher` attaches them to the student. cancelled: an event that ends the loading with a CancelledError when
    another thread sets it; None: nothing ends it. mesh: the devices over which its weights are divided, or None for one
    device. Raises ValueError as `Pretrained.load` does."""
    return None if pretrained is None else freeze(pretrained.load(cancelled, mesh))


def require_same_tokens(tokenizer: PreTrainedTokenizerFast, teacher: Pretrained | None) -> None:
    """Checks that the teacher's tokenizer gives each token that both tokenizers have the same id as the student's,
    because distillation compares distributions over the same tokens. Nothing is checked if there is no teacher, or its
    folder has no tokenizer. Runs call it before weights are loaded or while they load.

    Args:
      tokenizer: the student's.
      teacher: the teacher's opened checkpoint, in whose folder its tokenizer is; None if there is no teacher.
    Raises:
      ConfigError: a token that both have has two ids; the message names it.
    """
    found = None if teacher is None else load_tokenizer(teacher.folder)
    if teacher is None or found is None:
        return
    other = found.get_vocab()
    for token, own in tokenizer.get_vocab().items():
        if other.get(token, own) != own:
            raise ConfigError(
                f"objective.teacher = {str(teacher.folder)!r}: its tokenizer gives {token!r} the id {other[token]}, "
                f"and the student's {own}; distillation compares distributions over the same tokens: take a teacher "
                "with the student's tokenizer"
            )


def described(model: Decoder, objective: object) -> list[str]:
    """The lines that a run prints about a teacher whose log-probabilities are not stored before the run
    (`StoredTeacher.described` calls it): one with the name, the family, the dtype or format, and the size of
    `model.teacher`, in parameters and in memory (that of one whole copy, in GB of 1e9 bytes); or, if none is attached
    and objective.teacher is "base" or None, one that says that the model itself with its adapter off is the teacher; []
    for an objective without a teacher. objective: the run's, of any kind."""
    teacher = model.teacher
    if teacher is None:
        own = getattr(objective, "teacher", "") in (None, BASE)  # other objectives have no such attribute
        return ["teacher: the model itself with its adapter off"] if own else []
    state = nnx.state(teacher)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    how = stored_in(teacher) or teacher.dtype
    return [
        f"teacher: {teacher.name_or_path or 'as it was given'}, {teacher.config.family}, "
        f"{parameters(state) / 1e9:.2f} B parameters in {how}, {size / 1e9:.2f} GB beside the student"
    ]
