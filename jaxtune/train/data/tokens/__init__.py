"""From text to tokens: worker processes, the cache, and values of a teacher beside tokens."""
