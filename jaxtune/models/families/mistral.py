"""Mistral 7B and similar models: Llama with a sliding window in every layer, or in none if the file has null for it."""

from jaxtune.models.families.common import Family, OneWindow

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    (OneWindow(),),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    text_of=("mistral3",),
)
