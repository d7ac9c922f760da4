"""What a ladder measured, with its derived figures, to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from diptych.bench import peer_vllm
from diptych.bench.points import Point
from diptych.bench.roofline import Hardware, Roofline
from diptych.bench.startup import StartUp
from diptych.models.config import ModelConfig

_KINDS = ("prefill", "latency", "throughput", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Seconds of a prefill (one output token), a whole batch, or many requests at once."""

    batch: int
    input_len: int
    output_len: int
    time_s: float
    runs_s: list[float]
    floor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Seconds per output token of a batch at one context."""

    batch: int
    context: int
    tpot_s: float
    short_s: list[float]
    long_s: list[float]
    floor_s: float
    mean_context: float


@dataclass(slots=True, kw_only=True)
class Ladder:
    """All that was measured of one model on one device. `peer`: the peer's figures belong here."""

    roofline: Roofline
    start_up: StartUp
    device: str
    device_name: str
    peer: bool
    prefill: list[TimeRow] = field(default_factory=list)
    latency: list[TimeRow] = field(default_factory=list)
    throughput: list[TimeRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, kind: str, row: TimeRow | DecodeRow) -> None:
        """A row of `prefill`, `latency`, `throughput` or `decode`."""
        getattr(self, kind).append(row)

    def points(self, kind: str) -> set[Point]:
        """What the rows of a kind have measured."""
        if kind == "decode":
            return {Point(row.batch, row.context) for row in self.decode}
        rows: list[TimeRow] = getattr(self, kind)
        return {Point(row.batch, row.input_len, row.output_len) for row in rows}

    def take_rows(self, earlier: Ladder) -> None:
        """Begin with the rows of an earlier record."""
        for kind in _KINDS:
            getattr(self, kind).extend(getattr(earlier, kind))

    def saturation(self) -> float | None:
        """The measured saturation batch, at the context with the most batches."""
        contexts = [row.context for row in self.decode]
        if not contexts:
            return None
        context = max(contexts, key=contexts.count)
        rows = [row for row in self.decode if row.context == context]
        steps = {row.batch: row.tpot_s for row in rows}
        return self.roofline.measured_saturation(steps, rows[0].mean_context)

    def to_json(self) -> dict[str, Any]:
        """All of it, with the derived figures."""
        model = asdict(self.roofline.model)
        del model["path"]
        return {
            "model": {"name": self.roofline.model.path.name, **model},
            "roofline": {
                **asdict(self.roofline.hardware),
                "weight_bytes": self.roofline.weight_bytes,
                "head_bytes": self.roofline.head_bytes,
                "kv_bytes": self.roofline.kv_bytes,
            },
            "torch_device": self.device,
            "device_name": self.device_name,
            "start_up": {**asdict(self.start_up), "ready_s": self.start_up.ready_s},
            "prefill": [{**asdict(r), **self.prefill_rates(r)} for r in self.prefill],
            "latency": [{**asdict(r), **self.batch_rates(r)} for r in self.latency],
            "throughput": [{**asdict(r), **self.request_rates(r)} for r in self.throughput],
            "decode": [{**asdict(r), **self.decode_rates(r)} for r in self.decode],
            "saturation_batch": {
                "measured": self.saturation(),
                "predicted": self.roofline.saturation_batch,
            },
            "skipped": self.skipped,
            "peer": peer_vllm.NAME if self.peer else None,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Ladder:
        """What `to_json` gave."""
        model = dict(record["model"])
        model["path"] = Path(model.pop("name"))
        rates = dict(record["roofline"])
        weight_bytes, kv_bytes = rates.pop("weight_bytes"), rates.pop("kv_bytes")
        head_bytes = rates.pop("head_bytes", weight_bytes)  # older records have one for all
        start = {k: v for k, v in record["start_up"].items() if k != "ready_s"}
        return cls(
            roofline=Roofline(
                model=ModelConfig(**model),
                hardware=Hardware(**rates),
                weight_bytes=weight_bytes,
                head_bytes=head_bytes,
                kv_bytes=kv_bytes,
            ),
            start_up=StartUp(**start),
            device=record["torch_device"],
            device_name=record["device_name"],
            peer=record["peer"] is not None,
            prefill=[TimeRow(**_fields(TimeRow, row)) for row in record["prefill"]],
            latency=[TimeRow(**_fields(TimeRow, row)) for row in record["latency"]],
            throughput=[TimeRow(**_fields(TimeRow, row)) for row in record.get("throughput", [])],
            decode=[DecodeRow(**_fields(DecodeRow, row)) for row in record["decode"]],
            skipped=list(record["skipped"]),
        )

    def prefill_rates(self, row: TimeRow) -> dict[str, float]:
        flops = self.roofline.prefill_flops(row.batch, row.input_len)
        return {
            **_ratio(row.time_s, row.floor_s),
            "tokens_per_s": row.batch * row.input_len / row.time_s,
            "tflop_per_s": flops / row.time_s / 1e12,
        }

    def request_rates(self, row: TimeRow) -> dict[str, float]:
        """Requests, tokens and operations per second."""
        num_input, num_output = row.batch * row.input_len, row.batch * row.output_len
        flops = self.roofline.batch_flops(row.batch, row.input_len, row.output_len)
        return {
            **_ratio(row.time_s, row.floor_s),
            "requests_per_s": row.batch / row.time_s,
            "input_tokens_per_s": num_input / row.time_s,
            "output_tokens_per_s": num_output / row.time_s,
            "total_tokens_per_s": (num_input + num_output) / row.time_s,
            "tflop_per_s": flops / row.time_s / 1e12,
        }

    def batch_rates(self, row: TimeRow) -> dict[str, float]:
        """The same and bytes, of a batch whose requests are in every step."""
        bytes_read = self.roofline.batch_bytes(row.batch, row.input_len, row.output_len)
        return {**self.request_rates(row), "tb_per_s": bytes_read / row.time_s / 1e12}

    def decode_rates(self, row: DecodeRow) -> dict[str, float]:
        bytes_read = self.roofline.decode_bytes(row.batch, row.mean_context)
        flops = self.roofline.decode_flops(row.batch, row.mean_context)
        return {
            **_ratio(row.tpot_s, row.floor_s),
            "tokens_per_s": row.batch / row.tpot_s,
            "tb_per_s": bytes_read / row.tpot_s / 1e12,
            "tflop_per_s": flops / row.tpot_s / 1e12,
        }


def _ratio(time_s: float, floor_s: float) -> dict[str, float]:
    return {"times_floor": time_s / floor_s}


def _fields(kind: type[TimeRow] | type[DecodeRow], row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row in JSON, what was measured; the rest is derived again."""
    return {item.name: row[item.name] for item in fields(kind)}
