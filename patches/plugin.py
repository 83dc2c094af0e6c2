"""The entry point of `vllm.general_plugins`, run by vLLM in every process of an engine.

vLLM logs and swallows an import failure of a plugin module (`vllm.plugins.load_plugins_by_group`), so this
module imports nothing that could fail. An error raised by `register` itself is not swallowed: it ends the
process, which is what a half-patched engine deserves.
"""


def register() -> None:
    """Apply the patches that this vLLM release on this hardware needs, and answer for stacks. Safe to call again.

    Raises:
        patches.install.PatchError: a patch failed while it was being installed.
    """
    from patches.install import install
    from patches.stacks import answer_with_stacks

    answer_with_stacks()
    install()
