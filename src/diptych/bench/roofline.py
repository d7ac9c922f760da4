"""What the hardware allows: the least time of a step, from a model's shape and two rates.

A decode step reads all weights of the linear layers and all KV once; a prefill multiplies every
token by every weight and attends to all tokens before it. What is smaller than a percent of either
is left out: norms, the embedding's rows, activations, and the head of a prefill's last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diptych.models.config import ModelConfig

# where a line is called flat no more
_RISEN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one device; the defaults are what an H200 was seen to reach."""

    bytes_per_s: float = 4.3e12
    flops_per_s: float = 790e12
    attention_flops_per_s: float = 600e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One model on one device.

    Args:
        weight_bytes: bytes of one weight of the linear layers.
        head_bytes: bytes of one weight of the head, which stays as it is where others are fp8.
        kv_bytes: bytes of one element of the KV cache.
    """

    model: ModelConfig
    hardware: Hardware = Hardware()
    weight_bytes: int = 2
    head_bytes: int = 2
    kv_bytes: int = 2

    @property
    def num_layer_weights(self) -> int:
        """Weights of the linear layers, the head not included."""
        m = self.model
        q_size, kv_size = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        attention = m.hidden_size * (q_size + 2 * kv_size) + q_size * m.hidden_size
        return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)

    @property
    def num_weights(self) -> int:
        """Weights that a decode step multiplies by: the linear layers and the head."""
        return self.num_layer_weights + self.model.vocab_size * self.model.hidden_size

    @property
    def all_weight_bytes(self) -> int:
        """Bytes of those."""
        head = self.num_weights - self.num_layer_weights
        return self.num_layer_weights * self.weight_bytes + head * self.head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        m = self.model
        return 2 * m.num_layers * m.num_kv_heads * m.head_dim * self.kv_bytes

    def kv_s(self, batch: float, context: float) -> float:
        """Seconds to read the KV of `batch` requests of `context` tokens once."""
        return self._kv_read(batch, context) / self.hardware.bytes_per_s

    def decode_s(self, batch: float, context: float) -> float:
        """Least seconds of a step that makes one token for each of `batch` requests."""
        reading = self.all_weight_bytes / self.hardware.bytes_per_s
        computing = 2 * self.num_weights * batch / self.hardware.flops_per_s
        return max(reading, computing) + self.kv_s(batch, context)

    def decode_bytes(self, batch: float, context: float) -> float:
        """Bytes that such a step must read."""
        return self.all_weight_bytes + self._kv_read(batch, context)

    def decode_flops(self, batch: float, context: float) -> float:
        """Operations of such a step; a multiplication with its addition counts as two."""
        m = self.model
        attention = 4 * m.num_layers * m.num_heads * m.head_dim * self._seen(context)
        return batch * (2 * self.num_weights + attention)

    def prefill_s(self, batch: int, length: int) -> float:
        """Least seconds to compute `batch` prompts of `length` tokens."""
        linear = 2 * self.num_layer_weights * batch * length / self.hardware.flops_per_s
        reading = self.num_layer_weights * self.weight_bytes / self.hardware.bytes_per_s
        attention = self._prefill_attention_flops(batch, length)
        return max(linear, reading) + attention / self.hardware.attention_flops_per_s

    def prefill_flops(self, batch: int, length: int) -> float:
        """Operations of such a prefill; masked pairs are not counted."""
        linear = 2 * self.num_layer_weights * batch * length
        return linear + self._prefill_attention_flops(batch, length)

    def batch_s(self, batch: int, input_len: int, output_len: int) -> float:
        """Least seconds from `batch` prompts to the last of their `output_len` tokens."""
        steps = output_len - 1
        # step k reads the prompt and k tokens
        context = input_len + output_len / 2
        return self.prefill_s(batch, input_len) + steps * self.decode_s(batch, context)

    def throughput_s(self, count: int, input_len: int, output_len: int) -> float:
        """Least seconds of `count` such requests in steps so full that reading weights is free."""
        computed = input_len + output_len - 1
        head = self.num_weights - self.num_layer_weights
        flops = 2 * (self.num_layer_weights * computed + head * output_len)
        read = (output_len - 1) * self._kv_read(1, input_len + output_len / 2)
        attention = self._prefill_attention_flops(1, input_len)
        return count * (
            flops / self.hardware.flops_per_s
            + attention / self.hardware.attention_flops_per_s
            + read / self.hardware.bytes_per_s
        )

    def batch_flops(self, batch: int, input_len: int, output_len: int) -> float:
        """Operations of `batch` such requests, from prompt to last token."""
        steps = (output_len - 1) * self.decode_flops(batch, input_len + output_len / 2)
        return self.prefill_flops(batch, input_len) + steps

    def batch_bytes(self, batch: int, input_len: int, output_len: int) -> float:
        """Bytes that such a batch must read, all of it in each step; of its prefill the weights."""
        steps = (output_len - 1) * self.decode_bytes(batch, input_len + output_len / 2)
        return self.num_layer_weights * self.weight_bytes + steps

    @property
    def saturation_batch(self) -> float:
        """The batch from which multiplying takes longer than reading the weights."""
        rates = self.hardware.flops_per_s / self.hardware.bytes_per_s
        return rates * self.all_weight_bytes / self.num_weights / 2

    def measured_saturation(self, step_s: Mapping[int, float], context: float) -> float | None:
        """The same batch from measured steps, all at one context; None where it lies beyond them.

        It is where a line through the origin and the largest batch meets the smallest batch's
        time, KV taken off both at the memory's rate: as in the prediction, time is flat before
        and proportional after.

        Args:
            step_s: batch to seconds of a step.
        """
        rest = {batch: time - self.kv_s(batch, context) for batch, time in step_s.items()}
        if len(rest) < 2:
            return None
        least, most = min(rest), max(rest)
        if rest[most] <= _RISEN * rest[least] or rest[least] <= 0:
            return None
        return most * rest[least] / rest[most]

    def _kv_read(self, batch: float, context: float) -> float:
        return batch * self._seen(context) * self.kv_bytes_per_token

    def _seen(self, context: float) -> float:
        window = self.model.sliding_window
        return min(context, window) if window else context

    def _prefill_attention_flops(self, batch: int, length: int) -> float:
        m = self.model
        window = self._seen(length)
        # pairs of a query and a key: a triangle, less what lies outside the window
        pairs = length * window - window * window / 2
        return 4 * batch * m.num_layers * m.num_heads * m.head_dim * pairs
