"""`dspark-serve`: the command line.

Every error of the user's is one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
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
Arms = Annotated[str | None, typer.Option(help="Of off, fixed and adaptive, separated by commas; all three without.")]
BenchArms = Annotated[
    str | None,
    typer.Option(
        help="What the server's one arm is called (off, fixed or adaptive; without: what the server says, which it "
        "may not contradict); or fixed,adaptive, to switch a dspark-serve between both."
    ),
]
Concurrencies = Annotated[
    str | None,
    typer.Option(
        help="Requests at once, separated by commas; 4,16,32,64,128,256 without, as far as the profile is for."
    ),
]
BenchConcurrencies = Annotated[
    str | None, typer.Option(help="Requests at once, separated by commas; 4,16,32,64,128,256 without.")
]
Rounds = Annotated[int | None, typer.Option(min=1, max=1000, help="How often every cell is measured; 3 without.")]
Prompts = Annotated[
    str | None,
    typer.Option(
        help='built-in (without), speed-bench:FOLDER, sharegpt:FILE, or a JSONL file with {"prompt": "..."} a line.'
    ),
]
CellRequests = Annotated[
    int | None, typer.Option("--requests", min=1, max=10_000_000, help="Requests of a cell; 880 without.")
]
StreamRequests = Annotated[
    int,
    typer.Option("--requests-per-stream", min=1, max=10_000, help="A cell has at least so many times its concurrency."),
]
WarmupRequests = Annotated[
    int | None, typer.Option(min=0, max=10_000_000, help="Requests before an arm's first cell on a server; 64 without.")
]
OutputTokens = Annotated[
    int | None, typer.Option(min=1, max=1_000_000, help="Forced length of every answer; 512 without.")
]
Temperature = Annotated[float, typer.Option(min=0, max=100, help="Of the load.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the load, the tasks and the samples.")]
Tasks = Annotated[
    str | None,
    typer.Option(help="gsm8k and niah-LENGTH, separated by commas; gsm8k,niah-16384,niah-65536 without, '' for none."),
]
Gsm8k = Annotated[
    Path | None,
    typer.Option("--gsm8k", help="GSM8K's questions in a JSONL file, for machines without the hub; 5 are examples."),
]
Questions = Annotated[int | None, typer.Option(min=1, help="Of a task, at most; all of them without.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the run, to go on with as well; named by what is measured and day."),
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


@contextlib.contextmanager
def interrupted_is_partial() -> Iterator[None]:
    """Ctrl-C before the first measurement does not end a run as if it were done."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.PARTIAL) from None


@app.command(cls=ProfileCommand)
def validate(
    profile: ProfileName,
    extra: Extra = None,
    sets: Sets = None,
    out: OutFolder = None,
    arms: Arms = None,
    concurrencies: Concurrencies = None,
    rounds: Rounds = None,
    prompts: Prompts = None,
    requests: CellRequests = None,
    requests_per_stream: StreamRequests = 1,
    warmup_requests: WarmupRequests = None,
    output_tokens: OutputTokens = None,
    temperature: Temperature = 1.0,
    seed: Seed = 42,
    tasks: Tasks = None,
    gsm8k: Gsm8k = None,
    questions: Questions = None,
    exactness: Annotated[bool, typer.Option(help="Compare what the arms say with no speculation.")] = True,
    server_per_arm: Annotated[
        bool,
        typer.Option(
            "--server-per-arm", help="Servers of its own for fixed, to compare what starting takes; more starts."
        ),
    ] = False,
) -> None:
    """Measure a profile without speculation, with fixed and with adaptive verification, and write a report."""
    from serve.commands.validate import validate_command
    from serve.validate.protocol import Options

    options = Options(
        arms=arms,
        concurrencies=concurrencies,
        rounds=rounds,
        prompts=prompts,
        requests=requests,
        requests_per_stream=requests_per_stream,
        warmup_requests=warmup_requests,
        output_tokens=output_tokens,
        temperature=temperature,
        seed=seed,
    )
    with interrupted_is_partial():
        code = validate_command(
            profile,
            sets or [],
            extra or [],
            options,
            out=out,
            tasks=tasks,
            gsm8k=gsm8k,
            questions=questions,
            exactness=exactness,
            server_per_arm=server_per_arm,
        )
    raise typer.Exit(code)


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="The server, as http://HOST:PORT; its key is read from DSPARK_API_KEY.")],
    model: Annotated[str | None, typer.Option(help="One of its models; the first without.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Name or path; what the server says that it loaded without.")
    ] = None,
    out: OutFolder = None,
    arms: BenchArms = None,
    concurrencies: BenchConcurrencies = None,
    rounds: Rounds = None,
    prompts: Prompts = None,
    requests: CellRequests = None,
    requests_per_stream: StreamRequests = 1,
    warmup_requests: WarmupRequests = None,
    output_tokens: OutputTokens = None,
    temperature: Temperature = 1.0,
    seed: Seed = 42,
) -> None:
    """Measure the throughput of any running OpenAI server, and write a report."""
    from serve.commands.bench import bench_command
    from serve.validate.protocol import Options

    options = Options(
        arms=arms,
        concurrencies=concurrencies,
        rounds=rounds,
        prompts=prompts,
        requests=requests,
        requests_per_stream=requests_per_stream,
        warmup_requests=warmup_requests,
        output_tokens=output_tokens,
        temperature=temperature,
        seed=seed,
    )
    with interrupted_is_partial():
        code = bench_command(url, model, tokenizer, options, out=out)
    raise typer.Exit(code)


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


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="What dspark-serve validate wrote, finished or not.")],
    beside: Annotated[
        list[str] | None, typer.Option(help="A bundled reference table to lay beside it. May be repeated.")
    ] = None,
) -> None:
    """Write the report of a validation run anew from its records."""
    from serve.commands.report import report_command

    raise typer.Exit(report_command(directory, beside or []))


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
    from patches.telemetry.trace import FILE_VARIABLE
    from serve.metrics import Identity
    from serve.server import Settings, check_trace_file, make_counter_directory, run

    patches = report.patches
    if patches.refused:
        refused = patches.refused[0]
        raise InputError(f"the patch {refused.patch.id} is refused, and nothing is served without it: {refused.reason}")
    check_trace_file(os.environ.get(FILE_VARIABLE))
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
        context = getattr(error, "ctx", None)
        remedy = f"; see {context.command_path} --help" if context is not None else ""
        code = complain(error.format_message().removesuffix(".") + remedy)
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
