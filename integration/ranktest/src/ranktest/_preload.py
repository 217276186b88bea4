"""Imported once, in the process that ranks are forked from: the environment, and torch.

Torch's import starts no thread, so a fork of that process is as good as a fresh interpreter, and
takes milliseconds instead of seconds.
"""

import gc
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve

import torch._dynamo
import torch.distributed  # noqa: F401 - after the environment is set, and for its effect

gc.freeze()  # torch's objects stay out of each later collection, and shared with the ranks
