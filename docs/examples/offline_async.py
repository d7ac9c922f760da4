"""Offline and concurrent: two answers stream at once from one engine process.

Run: python docs/examples/offline_async.py [MODEL]
"""

import asyncio
import sys

from diptych import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, prompt: str) -> str:
    shown = 0
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)):
        text = output.outputs[0].text
        print(f"{prompt!r} + {text[shown:]!r}")
        shown = len(text)
    return text


async def main(model: str) -> None:
    async with AsyncLLM(model) as llm:
        await asyncio.gather(stream(llm, "The capital of France is"), stream(llm, "2, 4, 6, 8,"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
