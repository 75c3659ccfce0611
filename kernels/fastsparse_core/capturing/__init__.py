"""Steps and models as CUDA graphs."""
