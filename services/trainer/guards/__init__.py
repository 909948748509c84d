"""Guards of the four invariants of learning: measurement -> verdict -> action, each step. Pure; no torch.

exploration        token entropy and the diversity of answers
signal             share of samples that teach something, variance of their advantages
shift              age, |l_prox - mu|, effective sample size, clip share
effective_samples  samples in a batch that teach something
"""
