"""`dspark-serve`: the command line.

Every error of the user's is one line on standard error and exit code 2.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from serve.errors import ExitCode, InputError
from serve.profile import Profile, Verification, load, resolve_model

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

DECIDED_HERE = {
    "--host": "give --host before the --",
    "--port": "give --port before the --",
    "--uds": "the server listens on a TCP port: give --port before the --",
    "--headless": "run 'vllm serve --headless' for an engine without a server",
    "--grpc": "the server speaks HTTP: run 'vllm serve --grpc' for gRPC",
    "--api-server-count": "one process serves: run more replicas for more",
    "--ssl-keyfile": "end TLS in front of the server",
    "--ssl-certfile": "end TLS in front of the server",
    "--root-path": "strip the prefix in front of the server",
    "--speculative-config": "the profile has it: choose with --verification",
}
"""Options of `vllm serve` that are this server's own decision, and what to do instead."""


@app.callback()
def root() -> None:
    """vLLM with DSpark adaptive verification: patched backend, one process, metrics that tell the truth."""


@app.command()
def up(
    profile: Annotated[str, typer.Argument(help="A bundled profile's name, or the path of a .yaml file.")],
    extra: Annotated[list[str] | None, typer.Argument(help="After --: arguments of vllm serve.")] = None,
    port: Annotated[int, typer.Option(envvar="DSPARK_PORT", min=1, max=65535, help="Port.")] = 8000,
    host: Annotated[str, typer.Option(envvar="DSPARK_HOST", help="Address to listen on.")] = "127.0.0.1",
    verification: Annotated[
        Verification, typer.Option(envvar="DSPARK_VERIFICATION", help="How drafts are verified.")
    ] = Verification.ADAPTIVE,
    drain_seconds: Annotated[
        float, typer.Option(envvar="DSPARK_DRAIN_SECONDS", min=0, help="What requests get to finish in.")
    ] = 30.0,
    access_log: Annotated[bool, typer.Option(envvar="DSPARK_ACCESS_LOG", help="Log each request.")] = False,
) -> None:
    """Serve a profile with vLLM's OpenAI endpoints, listening at once."""
    recipe = load(profile)
    arguments = extra or []
    refuse_decided_here(arguments)
    prepare_environment(recipe)
    sock = listen(host, port)
    serve_profile(recipe, arguments, sock, verification, drain_seconds, access_log)


def serve_profile(
    recipe: Profile,
    arguments: list[str],
    sock: socket.socket,
    verification: Verification,
    drain_seconds: float,
    access_log: bool,
) -> NoReturn:
    """Run the server for a profile on a bound socket, then end the process with its exit code."""
    from patches import hardware
    from patches.install import survey, switched_off_ids, vllm_release, vllm_root
    from patches.telemetry.counters import DIRECTORY_VARIABLE
    from serve.metrics import Identity
    from serve.server import Settings, make_counter_directory, run

    counters = make_counter_directory(os.environ.get(DIRECTORY_VARIABLE))
    os.environ[DIRECTORY_VARIABLE] = str(counters)
    patches = survey(
        release=vllm_release(),
        hardware_name=hardware.detect().name,
        vllm_root=vllm_root(),
        switched_off=switched_off_ids(),
    )
    address, port = sock.getsockname()[:2]
    code = run(
        Settings(
            profile_name=recipe.name,
            command_line=recipe.command_line(verification, arguments),
            sock=sock,
            url=f"http://{'127.0.0.1' if address in ('0.0.0.0', '::') else address}:{port}",
            identity=Identity(
                version=metadata.version("dspark-serve"),
                vllm_version=patches.release,
                hardware=patches.hardware,
                patchset=patches.digest,
                verification=verification,
                patches=patches,
            ),
            counter_directory=counters,
            drain_seconds=drain_seconds,
            access_log=access_log,
        )
    )
    # Leave without the interpreter's teardown: a start may still be blocked in its thread inside vLLM, and the
    # engine's extension modules report leaks for pages while they are unloaded.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_decided_here(arguments: list[str]) -> None:
    """Refuse options after `--` that this server decides itself.

    Raises:
        InputError: naming the option and what to do instead.
    """
    for argument in arguments:
        option = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if option in DECIDED_HERE:
            raise InputError(f"{option} cannot be given to vLLM here: {DECIDED_HERE[option]}")


def prepare_environment(recipe: Profile) -> None:
    """Set the profile's environment, the user's own values first, before anything of vLLM is imported.

    Raises:
        InputError: a variable that would open vLLM's development routes, or a model directory that is missing.
    """
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        raise InputError(
            "VLLM_SERVER_DEV_MODE is set: it opens routes that run code in the workers to anyone; unset it"
        )
    for name, value in recipe.environment.items():
        os.environ.setdefault(name, value)
    # One process keeps the metrics; a multiprocess directory would split and double them.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    draft = (recipe.speculation(Verification.FIXED) or {}).get("model")
    for model in (resolve_model(recipe.model), draft):
        if model and Path(model).is_absolute() and not Path(model).is_dir():
            raise InputError(f"the model directory {model} does not exist: check the profile's model path")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
        InputError: the port is taken or the address is not this machine's.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], info[1])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port or --host"
        ) from error
    return sock


def main() -> None:
    """Entry point of the console script."""
    log_to_stderr()
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        code = complain(str(error))
    except TyperException as error:
        code = complain(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        code = ExitCode.OK
    raise SystemExit(code or 0)


def log_to_stderr() -> None:
    """Give our logger a handler of its own: vLLM and its libraries set the root logger up as they please."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [dspark-serve] %(message)s", "%m-%d %H:%M:%S"))
    logger = logging.getLogger("dspark-serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def complain(message: str) -> ExitCode:
    """Say what is wrong in one line."""
    print(f"dspark-serve: {' '.join(message.split())}", file=sys.stderr)
    return ExitCode.BAD_INPUT
