"""`transformers.generate` as the peer of a benchmark; needs the extra `compare`."""

from __future__ import annotations

from pathlib import Path

from diptych.errors import ConfigError


class TransformersPeer:
    """The same model directory in float32, in this process."""

    def __init__(self, path: Path, device: str, num_threads: int | None) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "--compare transformers needs the package: pip install 'diptych[compare]'"
            ) from None
        import torch

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = device
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.to(device).eval()

    @property
    def num_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Exactly `num_tokens` greedy tokens for prompts of one length."""
        import torch

        ids = torch.tensor(prompts, device=self._device)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        assert output.shape[1] == ids.shape[1] + num_tokens
