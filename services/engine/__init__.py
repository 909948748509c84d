"""The CPU engine: an inference server with the part of SGLang's HTTP surface that clawstream uses.

Reads: a Hugging Face Llama, Qwen2 or Qwen3 directory. Writes: nothing.
It touches no topic; the gateway, judge and teacher call it.
"""
