"""What flattened decode metadata costs on a GPU, by 0.28.0's own code and by the patch. See RESULTS.md.

usage: python -m tests.bench.flattened_metadata   (from the repository, with 0.28.0 in the releases cache)
"""

from __future__ import annotations

from tests.patches.release_process import answer

COMPILED = (("TRITON_INTERPRET", "0"),)


def main() -> None:
    print("requests tokens variant shape   wall_us enqueue_us")
    for requests, tokens in ((2, 8), (16, 8), (128, 4), (128, 8)):
        for variant in ("stock", "patched"):
            arguments = (variant, "90", "time", str(requests), str(tokens))
            for shape, cost in answer("hopper_indexer", "0.28.0", *arguments, settings=COMPILED).items():
                print(
                    f"{requests:8} {tokens:6} {variant:7} {shape:7} {cost['wall_us']:7} {cost['enqueue_us']:10}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
