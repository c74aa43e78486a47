"""The families of models: what a config.json of each means, and what its checkpoints call their tensors."""
