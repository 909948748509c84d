"""Hugging Face's model as the independent reference."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """One model directory in fp32."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[tokens, vocabulary]: row t is the distribution of the token after position t."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits / temperature, dim=-1)

    def of_output(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """[output_tokens] log-probs of `output` after `prompt`."""
        rows = self.logprobs(prompt + output, temperature)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1).tolist()

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        """[<= new_tokens] ids of `generate`, end token included."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        return output[0, len(prompt) :].tolist()

    def in_place_logprobs(self, other: "Reference", prompt: list[int], output: list[int], switch: int) -> list[float]:
        """[output_tokens] log-probs when this model computes up to output token `switch` and `other` goes on with its
        keys and values: what an update in place does."""
        chosen: list[float] = []
        cache: Any = None
        inputs = prompt
        with torch.inference_mode():
            for index, token in enumerate(output):
                model = self._model if index < switch else other._model
                result = model(torch.tensor([inputs]), cache=cache, use_cache=True)
                cache = result.past_key_values
                chosen.append(torch.log_softmax(result.logits[0, -1], dim=-1)[token].item())
                inputs = [token]
        return chosen


def output_logprobs(answer: dict[str, Any]) -> list[float]:
    """[output_tokens] the log-probs of an answer, after a check that they lie beside its ids."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return [entry[0] for entry in entries]
