"""Models that scripts load by transformers' names, or that trainers load by a name."""

import pytest

from jaxtune.compat import AutoModelForCausalLM, BitsAndBytesConfig
from jaxtune.models.files.quant import stored_in
from tests.test_compat import folder  # noqa: F401

pytestmark = pytest.mark.usefixtures("compiled_quickly")


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
