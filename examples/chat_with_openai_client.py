"""Stream a chat from a running cluster with OpenAI's own client, unmodified.

Run `twostroke up` first, then: python examples/chat_with_openai_client.py "Why is the sky blue?"
"""

import sys

from openai import OpenAI


def main(question: str) -> None:
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="not-needed")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=96,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Why is the sky blue?")
