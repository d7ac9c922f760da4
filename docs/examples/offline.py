"""Offline: answers to a list of prompts and to a conversation, without a server.

Run: python docs/examples/offline.py [MODEL]
"""

import sys

from diptych import LLM, SamplingParams


def main(model: str) -> None:
    prompts = ["The capital of France is", "Once upon a time", "2, 4, 6, 8,"]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=1)
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(model) as llm:
        for output in llm.generate(prompts, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        answer = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=32))[0]
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
