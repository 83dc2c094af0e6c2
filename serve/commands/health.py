"""`dspark-serve health`: the health check of a container, which need not have curl."""

from __future__ import annotations

import http.client
import sys

from serve.errors import ExitCode

TIMEOUT_SECONDS = 5
"""A live server answers `/livez` in milliseconds, also while it loads."""

_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def health_command(host: str, port: int) -> int:
    """Ask the server's `/livez`, and print what it says.

    Args:
        host: The address that the server listens on; where that is every address, this machine's own is asked.
        port: Its port.

    Returns:
        `ExitCode.OK` where the process is to be left alone, else `ExitCode.START_FAILED`.
    """
    connection = http.client.HTTPConnection(_EVERY_ADDRESS.get(host, host), port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/livez")
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"dspark-serve: no server answers on {host}:{port}: {error}", file=sys.stderr)
        return ExitCode.START_FAILED
    finally:
        connection.close()
    print(body)
    return ExitCode.OK if response.status == http.client.OK else ExitCode.START_FAILED
