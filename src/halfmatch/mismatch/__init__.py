"""The mismatch of the trainer's policy π and the rollout engine's policy μ: metrics, offline analysis, gradients."""
