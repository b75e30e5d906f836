"""The page in which a model reads and writes: how it is put together, and its scripts."""
