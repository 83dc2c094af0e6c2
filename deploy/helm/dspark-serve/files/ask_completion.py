"""Ask a server for a completion: `ask_completion.py URL`, with the key in API_KEY. Exits with 0 once it answered."""

import json
import os
import sys
import urllib.request


def ask(url: str, body: object = None) -> dict:
    """The JSON that a URL answers, to a POST where there is a body."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return json.load(answer)


def main(server: str) -> None:
    """Ask for the model's name, then for sixteen tokens of it."""
    model = ask(f"{server}/v1/models")["data"][0]["id"]
    answer = ask(f"{server}/v1/completions", {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 16})
    if answer["usage"]["completion_tokens"] < 1:
        sys.exit(f"{model} completed nothing: {answer}")
    print(f"{model} completed: {answer['choices'][0]['text']!r}")


if __name__ == "__main__":
    main(sys.argv[1])
