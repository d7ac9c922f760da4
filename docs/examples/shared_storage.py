"""Prefill in one process, decode in another; the KV cache travels through a shared folder.

    python docs/examples/shared_storage.py [MODEL]

The producer samples one token, which computes the prompt's KV; the consumer finds it by the hash of
the prompt, computes the last prompt token alone, and goes on.
"""

import subprocess
import sys
import tempfile

from diptych import LLM, KVTransferConfig, SamplingParams

PROMPTS = [
    "The capital of France is",
    "A long story about a lighthouse keeper begins on a winter evening, when the lamp goes out "
    "and the sea is loud. He climbs the stairs with a candle in his hand, counts the steps as he "
    "has done for thirty years, and finds at the top",
]


def run(role: str, folder: str, model: str, max_tokens: int) -> None:
    """Complete the prompts with an engine that plays one part."""
    transfer = KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    with LLM(model=model, kv_transfer_config=transfer) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(
                f"{role}: {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt "
                f"tokens came from elsewhere -> {output.outputs[0].text!r}",
                flush=True,
            )


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with tempfile.TemporaryDirectory() as folder:
        for role, max_tokens in (("kv_producer", 1), ("kv_consumer", 16)):
            command = [sys.executable, __file__, model, role, folder, str(max_tokens)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        run(sys.argv[2], sys.argv[3], sys.argv[1], int(sys.argv[4]))
    else:
        main()
