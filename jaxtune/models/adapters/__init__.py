"""Saves and loads LoRA adapters in PEFT's files (adapter_files.py, adapter_config.py), records which form of the
base's weights they were trained over (trained_over.py), and merges an adapter into its base (merge.py)."""
