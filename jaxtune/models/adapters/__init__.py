"""Saves and loads LoRA adapters in the files of PEFT, Hugging Face's adapter library (adapter_files.py,
adapter_config.py), records which form of the base's weights they were trained over (trained_over.py), and merges an
adapter into its base (merge.py, merged_logits.py). A base is the model to which an adapter is added."""
