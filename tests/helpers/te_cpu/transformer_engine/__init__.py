"""A stand-in for Transformer Engine 2.11 in PyTorch: what megatron-core's layers of that name call, on CPU ranks.

On sys.path only in the worker processes of tests that put its folder there. It has the original's parameters and their
marks, its communication, its accumulation of weight gradients, its packed sequences and its extra state. It has no FP8,
none of its kernels, and none of their rounding: everything is computed as PyTorch computes it.
"""

from types import SimpleNamespace

from . import pytorch as pytorch

__version__ = "2.11.0"

# megatron-core derives a class from it when it is imported.
common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object))
