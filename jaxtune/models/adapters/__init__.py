"""Adapters as files, and the merge of an adapter into its base."""
