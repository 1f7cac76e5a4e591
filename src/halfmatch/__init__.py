"""Reproduce, measure and remove the training-inference mismatch in RL fine-tuning."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("halfmatch")
except PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    __version__ = "0+source"
