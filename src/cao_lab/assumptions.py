"""What the paper leaves open and this reproduction assumes: the one place where such numbers stand.

The paper states batch size, budgets, seeds, ranks and refresh interval, and none of the following. These were chosen
before any result was seen.
"""

BASE_LR = 0.01
"""SGD's and CAO's α, shared as the paper says.

SGD with momentum 0.9 moves like a rate of 0.1, and so does CAO on the complement, where its rate is α/η.
"""

DAMPING = 0.1
"""η: the largest of the paper's sweep, because it says that smaller ones destabilise the estimate."""

ADAM_LR = 1e-3
"""Adam's "standard base rate"."""

WEIGHT_DECAY = 5e-4
"""λ, shared by SGD, Adam and CAO: usual for ResNets on CIFAR. AdamW keeps torch's 0.01."""

CLIP_GRADIENT = 5.0
"""Gradient norm at which SGD and Adam are clipped: rare after the first steps."""

CLIP_UPDATE = CLIP_GRADIENT / DAMPING
"""CAO's c. On the complement d = g/η, so that this clips at the same gradient norm as SGD."""

POWER_ITERATIONS = 10
"""T_pow.

The paper's epoch with k = 1 costs 18.5 % of 400 gradients more than SGD's: 11 products of 6.7 gradients each. That
lies inside the 2.25 (compiled) to 7.9 (eager) gradients that the benchmarks of curvlinops give for a Hessian product of
ResNet-18 on CIFAR on a GPU.
"""

WARM_START = False
"""Algorithm 2 starts each refresh from random vectors."""

WARMUP_STEPS = 0
"""Algorithm 1 refreshes at its first step; the "brief SGD phase" of the text has no length."""
