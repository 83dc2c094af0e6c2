"""A Triton backend that compiles nothing, so that vLLM finds Triton usable on a CPU.

vLLM's `triton_utils.importing` turns Triton off unless a backend named `cpu` exists; under `TRITON_INTERPRET=1`
nothing asks it for code. Its entry point belongs to the metadata-only `vllm` distribution of the CPU engine, so
Triton on a GPU host never sees it.
"""
