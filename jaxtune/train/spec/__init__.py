"""What a run consists of, decided before it starts: programs, the user's own parts, loaded weights."""
