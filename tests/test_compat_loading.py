"""Models that scripts load by transformers' names, or that trainers load by a name."""

from typing import Any

import pytest

from jaxtune.compat import (
    AutoModelForCausalLM,
    AutoPeftModelForCausalLM,
    BitsAndBytesConfig,
    GKDTrainer,
    GRPOTrainer,
    LoraConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    get_peft_model,
)
from jaxtune.models.files.quant import stored_in
from tests.test_compat import folder  # noqa: F401


@pytest.mark.parametrize("kind", [BitsAndBytesConfig, dict])
def test_the_type_of_four_bits_matters_to_four_bits_alone(folder, kind):  # noqa: F811
    """transformers' class says fp4 by default, with eight bits and without bits too (see tests/parity)."""
    for bits, stored in (({"load_in_8bit": True}, "int8"), ({}, None)):
        config = kind(**bits, bnb_4bit_quant_type="fp4")
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        assert stored_in(model.module) == stored
    with pytest.raises(ValueError, match="bnb_4bit_quant_type = 'fp4' is not supported. Instead: 'nf4'"):
        config = kind(load_in_4bit=True, bnb_4bit_quant_type="fp4")
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.full
@pytest.mark.parametrize("flag, stored", [("load_in_8bit", "int8"), ("load_in_4bit", "nf4"), ("load_in_fp8", "fp8")])
def test_formats_may_be_asked_for_as_in_transformers_4(folder, tmp_path, flag, stored):  # noqa: F811
    """Without quantization_config; the model trains nothing before it gets an adapter, as with it."""
    asked: dict[str, Any] = {flag: True}
    model = AutoModelForCausalLM.from_pretrained(folder, **{flag: True})
    assert stored_in(model.module) == stored and not model.full_finetuning
    plain = AutoModelForCausalLM.from_pretrained(folder, **{flag: False})
    assert stored_in(plain.module) is None and plain.full_finetuning
    rows = [{"text": "x"}]
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_length=64, model_init_kwargs={flag: True})
    with pytest.raises(ValueError, match="SFTTrainer: the model has no adapter"):
        SFTTrainer(folder, args, train_dataset=rows)
    trainer = SFTTrainer(folder, args, train_dataset=rows, peft_config=LoraConfig(r=2))
    assert stored_in(trainer.model.module) == stored
    trainer.save_model(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", **asked)
    assert stored_in(again.module) == stored and again.has_adapter


def test_four_bits_are_described_by_more_arguments_as_in_transformers_4(folder):  # noqa: F811
    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float16")
    assert stored_in(model.module) == "nf4" and model.dtype == "float16"
    with pytest.raises(ValueError, match="bnb_4bit_quant_type = 'fp4' is not supported. Instead: 'nf4'"):
        load(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4")


@pytest.mark.parametrize(
    "settings, told",
    [
        (dict(load_in_8bit=True, load_in_4bit=True), "load_in_8bit = True and load_in_4bit = True contradict"),
        (dict(load_in_8bit=True, load_in_fp8=True), "load_in_fp8 = True and load_in_8bit = True contradict"),
        (
            dict(load_in_8bit=True, quantization_config=BitsAndBytesConfig(load_in_8bit=True)),
            "load_in_8bit = True and quantization_config are both given: drop load_in_8bit",
        ),
        (dict(load_in_4bits=True), "load_in_4bits = True is not .* that jaxtune.compat knows; did you mean load_in_4b"),
        # Arguments of Unsloth's function that this one has not.
        (dict(full_finetuning=True), r"full_finetuning = True is not an argument that jaxtune.compat knows$"),
        (dict(load_in_16bit=True), "load_in_16bit = True is not .* that jaxtune.compat knows; did you mean load_in_"),
    ],
)
def test_an_argument_that_is_not_there_is_not_proposed(folder, settings, told):  # noqa: F811
    with pytest.raises(ValueError, match=told):
        AutoModelForCausalLM.from_pretrained(folder, **settings)


@pytest.fixture
def adapter(folder, tmp_path):  # noqa: F811
    """The folder of an adapter over weights in four bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, load_in_4bit=True)
    get_peft_model(model, LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


ROWS = [{"prompt": "Say it.", "completion": "It.", "chosen": "It.", "rejected": "No."}]


@pytest.mark.parametrize("kind", [SFTTrainer, RewardTrainer, GRPOTrainer, GKDTrainer])
@pytest.mark.parametrize("others", [{}, {"peft_config": LoraConfig(r=2)}], ids=["plain", "peft_config"])
def test_a_trainer_loads_no_adapter_by_its_name(adapter, kind, others):
    """TRL does not either ("Unrecognized model"); the error says how the adapter is trained further."""
    for settings in ({}, {"load_in_4bit": True}):
        args = kind.config_type(max_length=64, model_init_kwargs=settings)
        given: dict[str, Any] = dict(others, args=args, train_dataset=ROWS)
        if kind is GRPOTrainer:
            given["reward_funcs"] = len
        with pytest.raises(ValueError, match="is an adapter's folder.*AutoPeftModelForCausalLM.from_pretrained"):
            kind(adapter, **given)


@pytest.mark.full
def test_an_adapter_is_trained_further_as_the_error_says(adapter, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_length=64, max_steps=1, save_strategy="no")
    assert SFTTrainer(AutoPeftModelForCausalLM.from_pretrained(adapter), args, ROWS).train().global_step == 1


@pytest.mark.parametrize("kind", [SFTTrainer, RewardTrainer])
def test_who_got_a_peft_config_that_is_none_is_named(folder, tmp_path, kind):  # noqa: F811
    told = "{}: peft_config is a dict; only LoraConfig is supported"
    with pytest.raises(ValueError, match=f"^{told.format('get_peft_model')}"):
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder), {"r": 3})
    with pytest.raises(ValueError, match=f"^{told.format(kind.__name__)}"):
        kind(folder, kind.config_type(str(tmp_path / "run"), max_length=64), ROWS, peft_config={"r": 3})
