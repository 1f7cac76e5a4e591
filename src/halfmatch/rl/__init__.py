"""Reinforcement learning: objectives, advantages, batching, trainer, checkpoints."""
