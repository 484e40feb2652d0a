import os
import sys


# The models are tiny and test processes run side by side: more threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The built-in classes take flash-linear-attention whenever it can be imported, also for CPU tensors, where it crashes.
# They are the oracle of these tests, so it is hidden from them; what runs with it visible runs in a subprocess.
import torch


if not torch.cuda.is_available():
    for package in ("fla", "causal_conv1d"):
        sys.modules.setdefault(package, None)
