"""Training steps and sampled batches as CUDA graphs."""
