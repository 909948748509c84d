"""Megatron-Core as the training engine: one code path for the CPU (gloo) and for GPUs (NCCL).

`parallel` starts the process groups, `model` builds the network, `weights` moves parameters in and out of
Hugging Face's format, `packed_attention` keeps packed sequences apart, `log_probabilities` reads the
vocabulary-parallel logits, `optimizer` updates the parameters, which `flat_parameters` shares out among the copies of
the model. `recompute` saves memory; `lora` adds adapters, `adapter_weights` moves them in and out of PEFT's format.
"""

from services.trainer.engine import cpu_platform

cpu_platform.install()  # before any of the modules below imports Megatron
