"""Operations of sampling: of a step, and attention over key/value caches."""
