"""LoRA adapters in the files of PEFT, Hugging Face's adapter library, records of the base that they were trained over,
and merges into a base.
"""
