"""The patched backend: a vLLM plugin that repairs adaptive verification, release by release.

`plugin` is what vLLM loads in every process; `ledger` says which patch exists and why; `install` applies the
ones this release on this hardware needs. Everything else is one patch a module.
"""
