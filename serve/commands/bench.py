"""`dspark-serve bench`: the sweep alone, against a server that runs already."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from serve.commands.validate import carry_out
from serve.errors import InputError
from serve.validate.children import tool_environment
from serve.validate.endpoint import Endpoint, EndpointError, NoSuchModelError, key_in
from serve.validate.here import check_extra, modules_of, run_there
from serve.validate.load import Target
from serve.validate.plan import plan, works_of
from serve.validate.prompts import prompt_set
from serve.validate.protocol import Options, arms_of, url_protocol
from serve.validate.results import Arm
from serve.validate.servers import RunningServer
from serve.validate.store import opened


def bench_command(url: str, model: str | None, tokenizer: str | None, options: Options, *, out: Path | None) -> int:
    """Measure, or go on measuring, and write the report; returns the exit code.

    Args:
        url: The server's, with no path.
        model: One of its models; None for the first.
        tokenizer: Name or path; None for what the server says that it loaded.
        options: Of the sweep.
        out: The run's directory; None for one that is named after the server and the day.

    Raises:
        InputError: anything that cannot be measured as it was asked for.
    """
    # Before the server is asked anything; which arms it has makes no difference.
    check_extra(modules_of(url_protocol(url, (Arm.FIXED,), options)))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise InputError(f"--url {url}: write it as http://HOST:PORT, without a path")
    if parts.username is not None or parts.password is not None:
        raise InputError("--url holds a password, which the report would show: give a key in DSPARK_API_KEY")
    prompts = None if options.prompts is None else prompt_set(options.prompts)
    # The server may be anybody's: it gets the key that is meant for it and no other.
    key = key_in(os.environ, ("DSPARK_API_KEY",))
    with contextlib.closing(Endpoint(url, key, model)) as endpoint:
        try:
            arms = _arms(endpoint, options.arms)
            words = ("--tokenizer", tokenizer or endpoint.model.root)
            target = Target(endpoint, endpoint.chats(), words, tool_environment(os.environ, key))
            version = endpoint.version()
        except NoSuchModelError as error:
            raise InputError(f"--model: {error}") from error
        except EndpointError as error:
            raise InputError(f"{error}; is the server ready, and is its key in DSPARK_API_KEY?") from error
        protocol = url_protocol(endpoint.url, arms, options)
        place = re.sub(r"[^A-Za-z0-9.-]+", "-", parts.netloc)
        directory = (out or Path(f"bench-{place}-{datetime.now(UTC):%Y-%m-%d}")).absolute()
        with opened(directory, run_there(sys.argv, protocol, version)) as store:
            server = RunningServer(target, protocol, prompts or prompt_set(protocol.prompts), directory)
            servings = plan(protocol)
            store.check_foreign(works_of(servings))
            return carry_out(servings, server, store)


def _arms(endpoint: Endpoint, given: str | None) -> tuple[Arm, ...]:
    """One arm labels what the server does; two are switched.

    Raises:
        InputError: one that the server does not run, or several that it does not switch between.
    """
    if given is None:
        return (endpoint.likely_arm(),)
    arms = arms_of(given)
    if len(arms) == 1:
        likely = endpoint.likely_arm()
        # Others do not tell which way they verify; of a plain vLLM it is seen that it speculates.
        if arms[0] is not likely and (endpoint.mode() is not None or arms[0] is Arm.OFF):
            raise InputError(f"--arms {given}: {endpoint.url} runs {likely}; leave --arms out, or have it run {given}")
        return arms
    if Arm.OFF in arms:
        raise InputError("--arms: a running server cannot stop speculating; bench it once more, started without")
    if not endpoint.switches():
        raise InputError(f"--arms {given}: {endpoint.url} does not switch its mode; give the one arm that it runs")
    return arms
