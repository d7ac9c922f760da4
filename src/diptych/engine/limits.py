"""What an engine refuses at once; shared by the engine and by whoever submits to it."""

from __future__ import annotations

from diptych.engine.request import EngineCoreRequest
from diptych.errors import ContextLengthError, InvalidRequestError


def check_request(request: EngineCoreRequest, max_model_len: int) -> None:
    """Check that the request can ever run.

    Raises:
        InvalidRequestError: it has no prompt, or leaves no room for a token of output.
    """
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    known = len(request.prompt_token_ids) + len(request.output_token_ids)
    if known >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {known} tokens, but the context length is {max_model_len} tokens, "
            "output included; shorten the prompt",
            param="prompt",
        )
