"""`dspark-serve`: the command line.

Every error of the user's is one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from patches.calibration.mode import CalibrationMode
from serve.errors import ExitCode, InputError
from serve.keys import KEY_VARIABLES, take_keys
from serve.limits import MIB, Limits
from serve.listening import ListenError, listen, url_of
from serve.preflight.report import Report
from serve.profile import Profile, Verification, load

logger = logging.getLogger("dspark-serve")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
profiles_app = typer.Typer(
    invoke_without_command=True, help="List the profiles and which of them this machine can run."
)
app.add_typer(profiles_app, name="profiles")

ProfileName = Annotated[
    str, typer.Argument(envvar="DSPARK_PROFILE", help="A bundled profile's name, or the path of a .yaml file.")
]
Extra = Annotated[list[str] | None, typer.Argument(help="After --: arguments of vllm serve.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="key=value: change the profile. May be repeated.")]
Skips = Annotated[list[str] | None, typer.Option("--skip", help="A preflight check to leave out. May be repeated.")]
Port = Annotated[int, typer.Option(envvar="DSPARK_PORT", min=1, max=65535, help="Port to listen on.")]
Host = Annotated[str, typer.Option(envvar="DSPARK_HOST", help="Address to listen on.")]
Mode = Annotated[Verification, typer.Option(envvar="DSPARK_VERIFICATION", help="How drafts are verified.")]
Calibrating = Annotated[
    CalibrationMode,
    typer.Option(
        envvar="DSPARK_CALIBRATION",
        help="Whether temperatures of the confidences are fitted: not at all, only reported, or used for the budget.",
    ),
]
MONTH = 2_592_000.0
"""Seconds. Longer bounds, or endless ones, are mistakes."""

KeyFile = Annotated[
    Path | None, typer.Option(envvar="DSPARK_API_KEY_FILE", help="File of keys, one a line; clients send one of them.")
]
MetricsKey = Annotated[bool, typer.Option(envvar="DSPARK_METRICS_KEY", help="Ask for a key on /metrics too.")]
BodyMib = Annotated[
    int, typer.Option(envvar="DSPARK_MAX_BODY_MIB", min=1, max=1_048_576, help="Longest body of a request, in MiB.")
]
Requests = Annotated[
    int, typer.Option(envvar="DSPARK_MAX_REQUESTS", min=1, help="Requests at once; one more gets 429 and Retry-After.")
]
RequestSeconds = Annotated[
    float,
    typer.Option(
        envvar="DSPARK_REQUEST_SECONDS", min=1, max=MONTH, help="What one request may take, waiting included."
    ),
]
StallSeconds = Annotated[
    float,
    typer.Option(
        envvar="DSPARK_STALL_SECONDS",
        min=5,
        max=MONTH,
        help="An engine with requests and no step for so long has stalled.",
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(envvar="DSPARK_DRAIN_SECONDS", min=0, max=MONTH, help="What requests under way get to finish in."),
]
Headless = Annotated[
    bool, typer.Option("--headless", help="Run this node's ranks for the server of node 0, without an API.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ProfileCommand(TyperCommand):
    """A command whose words after `--` are vLLM's: none is taken for the profile, which may be in the environment."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the dashes, and keep the rest as it is."""
        before = args.index("--") if "--" in args else len(args)
        words, extra = args[:before], args[before + 1 :]
        rest = super().parse_args(ctx, words)
        ctx.params["extra"] = [*(ctx.params["extra"] or ()), *extra]
        return rest


@app.callback()
def root() -> None:
    """vLLM with DSpark adaptive verification: patched backend, one process, metrics that tell the truth."""


@app.command(cls=ProfileCommand)
def up(
    profile: ProfileName,
    extra: Extra = None,
    sets: Sets = None,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    verification: Mode = Verification.ADAPTIVE,
    calibration: Calibrating = CalibrationMode.SHADOW,
    skip: Skips = None,
    api_key_file: KeyFile = None,
    metrics_key: MetricsKey = False,
    max_body_mib: BodyMib = 32,
    max_requests: Requests = 1024,
    request_seconds: RequestSeconds = 3600.0,
    stall_seconds: StallSeconds = 60.0,
    drain_seconds: DrainSeconds = 30.0,
    access_log: Annotated[bool, typer.Option(envvar="DSPARK_ACCESS_LOG", help="Log each request.")] = False,
    headless: Headless = False,
) -> None:
    """Serve a profile with vLLM's OpenAI endpoints, listening at once."""
    from serve.overrides import override
    from serve.preflight import installed_names, run

    keys = take_keys(os.environ, api_key_file)
    arguments = extra or []
    recipe = override(load(profile), sets or [], installed_names())
    # Bind first, so that nobody takes the port meanwhile; preflight names a taken one with whatever else is wrong.
    try:
        sock, address = listen(host, port), None
    except ListenError:
        sock, address = None, (host, port)
    report = run(
        recipe, verification=verification, extra=arguments, skip=skip or [], address=address, headless=headless
    )
    stop_on_errors(report)
    try:
        sock = sock or listen(host, port)
    except ListenError as error:
        raise InputError(f"{error}; choose another with --port or --host") from error
    prepare_environment(recipe)
    serve_profile(
        recipe,
        arguments,
        sock,
        verification,
        calibration,
        report,
        keys,
        metrics_key,
        Limits(max_body_mib * MIB, max_requests, request_seconds),
        stall_seconds,
        drain_seconds,
        access_log,
        headless,
    )


@app.command(cls=ProfileCommand)
def preflight(
    profile: ProfileName,
    extra: Extra = None,
    sets: Sets = None,
    port: Annotated[int | None, typer.Option(envvar="DSPARK_PORT", min=1, max=65535, help="Port to check.")] = None,
    host: Host = "127.0.0.1",
    verification: Mode = Verification.ADAPTIVE,
    skip: Skips = None,
    headless: Headless = False,
    as_json: Json = False,
) -> None:
    """Say whether a profile would start here, before any weight is read."""
    from serve.commands.preflight import preflight_command

    code = preflight_command(
        profile,
        sets or [],
        extra or [],
        as_json=as_json,
        skip=skip or [],
        verification=verification,
        host=host,
        port=port,
        headless=headless,
    )
    raise typer.Exit(code)


@app.command()
def patches(
    vllm: Annotated[str | None, typer.Option(help="A release to answer for; the installed one without.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Hardware to answer for; this machine's without.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Fail where a needed patch is refused.")] = False,
    as_json: Json = False,
) -> None:
    """Say what becomes of every patch, here or on another release and hardware."""
    from serve.commands.patches import patches_command

    raise typer.Exit(patches_command(vllm, hardware, check, as_json))


@app.command()
def health(port: Port = 8000, host: Host = "127.0.0.1") -> None:
    """Say whether the server on this machine is to be left alone, as its /livez does."""
    from serve.commands.health import health_command

    raise typer.Exit(health_command(host, port))


@profiles_app.callback()
def profiles(context: typer.Context, as_json: Json = False) -> None:
    """List the profiles and which of them this machine can run."""
    from serve.commands.profiles import profiles_command

    if context.invoked_subcommand is None:
        raise typer.Exit(profiles_command(as_json=as_json))


@profiles_app.command(cls=ProfileCommand)
def show(
    profile: ProfileName, extra: Extra = None, sets: Sets = None, verification: Mode = Verification.ADAPTIVE
) -> None:
    """Print the environment and the `vllm serve` line that a profile stands for."""
    from serve.commands.profiles import profiles_show_command

    raise typer.Exit(profiles_show_command(profile, sets or [], extra or [], verification))


def serve_profile(
    recipe: Profile,
    arguments: list[str],
    sock: socket.socket,
    verification: Verification,
    calibration: CalibrationMode,
    report: Report,
    keys: list[str],
    metrics_key: bool,
    limits: Limits,
    stall_seconds: float,
    drain_seconds: float,
    access_log: bool,
    headless: bool,
) -> NoReturn:
    """Run the server for a profile on a bound socket, then end the process with its exit code."""
    from patches.calibration.mode import VARIABLE as CALIBRATION_VARIABLE
    from patches.telemetry.counters import DIRECTORY_VARIABLE
    from serve.metrics import Identity
    from serve.server import Settings, make_counter_directory, run

    patches = report.patches
    if patches.refused:
        refused = patches.refused[0]
        raise InputError(f"the patch {refused.patch.id} is refused, and nothing is served without it: {refused.reason}")
    counters = make_counter_directory(os.environ.get(DIRECTORY_VARIABLE))
    os.environ[DIRECTORY_VARIABLE] = str(counters)
    os.environ[CALIBRATION_VARIABLE] = calibration.value
    code = run(
        Settings(
            profile_name=recipe.name,
            command_line=recipe.command_line(verification, arguments),
            sock=sock,
            url=url_of(sock),
            identity=Identity(
                version=metadata.version("dspark-serve"),
                verification=verification,
                calibration=calibration,
                patches=patches,
            ),
            preflight=report,
            counter_directory=counters,
            keys=keys,
            metrics_key=metrics_key,
            limits=limits,
            stall_seconds=stall_seconds,
            drain_seconds=drain_seconds,
            access_log=access_log,
            headless=headless,
        )
    )
    leave(code)


def leave(code: ExitCode) -> NoReturn:
    """End the process without the interpreter's teardown.

    A start may still be blocked in its thread inside vLLM, and the engine's extension modules report leaks for pages
    while they are unloaded.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # what a full disk did not take stays in the buffer
            stream.flush()
    os._exit(code)


def stop_on_errors(report: Report) -> None:
    """Log what preflight found; with an error, end the command.

    Raises:
        typer.Exit: a check failed that nothing is started with.
    """
    if report.errors:
        for result in report.errors:
            complain(result.line)
        raise typer.Exit(report.exit_code)
    for line in report.lines():
        logger.info("%s", line)


def prepare_environment(recipe: Profile) -> None:
    """Set the profile's environment, the user's own values first, before anything of vLLM is imported.

    Raises:
        InputError: it holds a key.
    """
    for name, value in recipe.environment.items():
        if name in KEY_VARIABLES:
            raise InputError(f"environment.{name} in a profile is read by many: set it in the server's environment")
        os.environ.setdefault(name, value)
    # One process keeps the metrics; a multiprocess directory would split and double them.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


def main() -> None:
    """Entry point of the console script."""
    # Arguments that are not UTF-8 must be printable in a complaint about them.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
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
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def complain(message: str) -> ExitCode:
    """Say what is wrong in one line."""
    print(f"dspark-serve: {' '.join(message.split())}", file=sys.stderr)
    return ExitCode.BAD_INPUT
