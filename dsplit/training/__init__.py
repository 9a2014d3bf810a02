"""Training: rows in batches, counted randomness, the denoiser, LoRA, the loop, checkpoints."""
