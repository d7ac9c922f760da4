"""Diptych: serve large language models with prefill and decode apart.

Names are imported when first used, so that `import diptych` stays fast and free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.config import KVTransferConfig
    from diptych.engine.async_llm import AsyncLLM
    from diptych.engine.llm import LLM
    from diptych.inputs import TextPrompt, TokensPrompt
    from diptych.outputs import CompletionOutput, RequestOutput
    from diptych.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "KVTransferConfig",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]
__version__ = "0.1.0"

_WHERE = {
    "LLM": "diptych.engine.llm",
    "AsyncLLM": "diptych.engine.async_llm",
    "CompletionOutput": "diptych.outputs",
    "KVTransferConfig": "diptych.config",
    "RequestOutput": "diptych.outputs",
    "SamplingParams": "diptych.sampling_params",
    "TextPrompt": "diptych.inputs",
    "TokensPrompt": "diptych.inputs",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
