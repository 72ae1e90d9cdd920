"""rlkit: notebook-first reinforcement learning of language models on a Ray cluster."""
