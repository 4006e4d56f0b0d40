"""Operations of sampling: of a step, in which each sequence gets one token, and attention over key/value caches."""
