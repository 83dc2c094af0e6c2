"""Counting what the worker decides, and handing it to the server without ever waiting.

`counters` is the mapped file between worker and server, `patch` fills it in the worker, `trace` writes every single
decision when asked to.
"""
