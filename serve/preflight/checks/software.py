"""Checks of vLLM, of our patches in it and of what could keep them out."""

from __future__ import annotations

import re
from collections.abc import Callable

from patches.install import SWITCHED_OFF_VARIABLE
from patches.ledger import RELEASES
from serve.keys import KEY_VARIABLES
from serve.preflight.check import Check, Finding, Problem, Severity, Unknown
from serve.preflight.facts import PLUGIN, Facts
from serve.preflight.plan import Plan
from serve.preflight.source import Answer
from serve.preflight.upstream import LayerAnswer

_SERVER_WORDS = {"headless", "api_server_count", "model_tag", "grpc"}
"""Options of `vllm serve` that stand in none of its argument classes."""

_TLS = "end TLS in front of the server"
_LOGGING = "choose with --access-log"
DECIDED_HERE = {
    "host": "give --host before the --",
    "port": "give --port before the --",
    "uds": "the server listens on a TCP port: give --port before the --",
    "headless": "give --headless before the --",
    "grpc": "the server speaks HTTP: run 'vllm serve --grpc' for gRPC",
    "api_server_count": "one process serves: run more replicas for more",
    "root_path": "strip the prefix in front of the server",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ca_certs": _TLS,
    "ssl_cert_reqs": _TLS,
    "ssl_ciphers": _TLS,
    "enable_ssl_refresh": _TLS,
    "uvicorn_log_level": _LOGGING,
    "disable_uvicorn_access_log": _LOGGING,
    "disable_access_log_for_endpoints": _LOGGING,
    "h11_max_incomplete_event_size": "leave it out: requests are parsed by httptools",
    "h11_max_header_count": "leave it out: requests are parsed by httptools",
}
"""Arguments of vLLM's own server that this server decides itself, and what to do instead."""


def _release(facts: Facts, _: Plan) -> Finding:
    if facts.release in RELEASES:
        return None
    if facts.release == "none":
        return Problem("vLLM is not installed")
    return Problem(f"vLLM {facts.release} was not validated")


def _patches(facts: Facts, _: Plan) -> Finding:
    if facts.release not in RELEASES:
        return Unknown("which patches this vLLM needs")
    refused = [f"{decision.patch.id} ({decision.reason})" for decision in facts.patches.refused]
    return Problem(f"cannot be applied: {'; '.join(refused)}") if refused else None


def _plugin(facts: Facts, plan: Plan) -> Finding:
    chosen = plan.environment.get("VLLM_PLUGINS")
    if chosen is not None and PLUGIN not in [name.strip() for name in chosen.split(",")]:
        return Problem(
            f"VLLM_PLUGINS='{chosen}' leaves '{PLUGIN}' out, so vLLM would run without our patches",
            f"unset VLLM_PLUGINS, or add '{PLUGIN}' to it",
        )
    if not facts.plugin_installed:
        return Problem(f"no installed distribution has the entry point '{PLUGIN}' in vllm.general_plugins")
    return None


def _development_mode(_: Facts, plan: Plan) -> Finding:
    if plan.environment.get("VLLM_SERVER_DEV_MODE", "0") in ("", "0"):
        return None
    return Problem("VLLM_SERVER_DEV_MODE is set: anyone who reaches the server could run code in its workers")


def _worker_extension(_: Facts, plan: Plan) -> Finding:
    extension = plan.arguments.get("worker_extension_cls")
    return Problem(f"--worker-extension-cls {extension} takes the one place there is, and ours") if extension else None


def _visible_keys(_: Facts, plan: Plan) -> Finding:
    places = ["--api-key"] if "api_key" in plan.arguments else []
    places += [f"environment.{name} in the profile" for name in KEY_VARIABLES if name in plan.profile.environment]
    return (
        Problem(f"{' and '.join(places)} would show a key to whoever lists processes or profiles") if places else None
    )


def _server_options(_: Facts, plan: Plan) -> Finding:
    given = [name for name in DECIDED_HERE if name in plan.arguments]
    if not given:
        return None
    named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    return Problem(f"{named} cannot be given to vLLM here", "; ".join(dict.fromkeys(DECIDED_HERE[n] for n in given)))


def _node(_: Facts, plan: Plan) -> Finding:
    if plan.headless and plan.node_rank == 0 and "data_parallel_start_rank" not in plan.arguments:
        return Problem(
            "--headless is given, and this is node 0, which has the API",
            "give --nnodes, --node-rank and --master-addr after the --, or leave --headless out",
        )
    if not plan.headless and plan.node_rank > 0 and not plan.on("data_parallel_external_lb"):
        return Problem(f"this is node {plan.node_rank} of {plan.nodes}, and only node 0 has the API")
    return None


def _arguments(facts: Facts, plan: Plan) -> Finding:
    if facts.names is None:
        return Unknown("vLLM's arguments")
    unknown = []
    for name in plan.arguments:
        if name not in facts.names.types and name not in _SERVER_WORDS:
            closest = facts.names.closest(name)
            hint = f" (did you mean --{closest.replace('_', '-')}?)" if closest else ""
            unknown.append(f"--{name.replace('_', '-')}{hint}")
    for key, similar in facts.names.unknown_speculative(plan.speculation).items():
        unknown.append(f"speculative_config.{key}{f' (did you mean {similar}?)' if similar else ''}")
    return Problem(f"this vLLM has no {', '.join(unknown)}") if unknown else None


def _consensus(facts: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or plan.tensor_parallel_size == 1 or "tp-consensus" in facts.patches.applied:
        return None
    return Problem(
        f"{plan.tensor_parallel_size} tensor-parallel ranks choose their budgets each by itself (vllm#56831), and the"
        " patch tp-consensus is not applied"
    )


def repaired(facts: Facts, answer: Answer) -> bool:
    """Whether an applied patch touches the code that gave the answer."""
    applied = set(facts.patches.applied)
    symbols = {s for d in facts.patches.decisions if d.patch.id in applied for s in d.patch.symbols}
    return not symbols.isdisjoint(answer.consulted)


def _answers(facts: Facts, plan: Plan, question: Callable[[LayerAnswer], Answer]) -> dict[str, Answer] | Unknown:
    """Each layer kind's answer; none without adaptive verification, or where the attention selector asks by itself."""
    if not plan.adaptive:
        return {}
    if facts.upstream is None or facts.target.config is None:
        return Unknown("which attention backends would serve")
    return {layer.kind: question(layer) for layer in facts.upstream.layers}


def _refusals(facts: Facts, answers: dict[str, Answer], wanted: object, says: str) -> Finding:
    """The layers that do not answer `wanted` and that no applied patch touches; else those that did not answer."""
    refused = [kind for kind, a in answers.items() if a.known and a.value != wanted and not repaired(facts, a)]
    if refused:
        where = f"{facts.target.architecture} in vLLM {facts.release} on {facts.machine.hardware.name}"
        return Problem(f"the {' and '.join(refused)} backend of {where} {says}, and no applied patch changes it")
    silent = [f"{kind} ({answer.reason})" for kind, answer in answers.items() if not answer.known]
    return Unknown(f"what vLLM says of {', '.join(silent)}") if silent else None


def _device_lengths(facts: Facts, plan: Plan) -> Finding:
    answers = _answers(facts, plan, lambda layer: layer.device_lengths)
    if isinstance(answers, Unknown):
        return answers
    return _refusals(facts, answers, True, "needs every query length on the host")


def _varlen_graphs(facts: Facts, plan: Plan) -> Finding:
    answers = _answers(facts, plan, lambda layer: layer.graphs)
    if isinstance(answers, Unknown):
        return answers
    return _refusals(facts, answers, "ALWAYS", "has graphs that replay uniform batches only")


def _mono_decode_release(facts: Facts, plan: Plan) -> Finding:
    if not plan.variable_on("VLLM_ROCM_MONO_DECODE"):
        return None
    if facts.upstream is None:
        return Unknown("vLLM's environment variables")
    if "VLLM_ROCM_MONO_DECODE" in facts.upstream.variables:
        return None
    found = f"VLLM_ROCM_MONO_DECODE is set and vLLM {facts.release} does not know it"
    if facts.names is not None and "monokernel" in facts.names.types:
        return Problem(found, "set environment.VLLM_ROCM_MONO_DECODE=0 and monokernel=true, which replaced it")
    return Problem(f"{found} (0.32.0 is the first)")


def _bounds(facts: Facts, plan: Plan) -> Finding:
    if not plan.adaptive or plan.speculation.get("rejection_sample_method") != "block":
        return None
    if _number(facts.release) >= (0, 32, 0) or "block-rejection-bounds" in facts.patches.applied:
        return None
    return Problem(
        f"block rejection in vLLM {facts.release} reads past the last logit when the last request is trimmed"
        " (vllm#60945, fixed in 0.32.0), and the patch block-rejection-bounds is not applied"
    )


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


_FIXED = "use --verification fixed, or this project's image, whose vLLM has the patch"

CHECKS = (
    Check(
        "vllm-release",
        "This vLLM is one that was validated",
        f"the installed distribution against the ledger ({RELEASES[0]} to {RELEASES[-1]})",
        f"install vLLM {RELEASES[-2]}, or use this project's image",
        _release,
    ),
    Check(
        "patches",
        "Every patch that is needed here can be applied",
        "the ledger, and the fingerprints of the upstream code that it replaces",
        f"use this project's image, and leave correctness patches out of {SWITCHED_OFF_VARIABLE}",
        _patches,
    ),
    Check(
        "plugin",
        "vLLM will load our plugin in every process",
        "VLLM_PLUGINS and the installed entry points",
        "install dspark-serve into vLLM's environment",
        _plugin,
    ),
    Check(
        "development-mode",
        "vLLM's development routes are off",
        "VLLM_SERVER_DEV_MODE",
        "unset VLLM_SERVER_DEV_MODE",
        _development_mode,
    ),
    Check(
        "worker-extension",
        "The worker extension is ours to set",
        "worker_extension_cls",
        "leave --worker-extension-cls out",
        _worker_extension,
    ),
    Check(
        "visible-keys",
        "No key stands where others can read it",
        "api_key in the arguments, and the profile's environment",
        "set DSPARK_API_KEY in the server's environment, or give --api-key-file before the --",
        _visible_keys,
    ),
    Check(
        "server-options",
        "No option of vLLM's own server is given that this server decides",
        "the arguments of profile, --set and command line",
        "give it to dspark-serve, or leave it out",
        _server_options,
    ),
    Check(
        "node",
        "Node 0 has the API, and any other runs headless",
        "--headless and node_rank",
        "give --headless before the --",
        _node,
    ),
    Check(
        "arguments",
        "Every argument is one of this vLLM's",
        "the fields of the argument classes and of SpeculativeConfig in the installed vLLM's source",
        "correct the name, or leave the argument out",
        _arguments,
    ),
    Check(
        "tensor-parallel-consensus",
        "Tensor-parallel ranks cannot choose different budgets",
        "the ledger",
        "use --verification fixed, or an environment where tp-consensus is applied",
        _consensus,
        Severity.WARNING,
    ),
    Check(
        "device-query-lengths",
        "Every attention backend of the model works with query lengths that only the device knows",
        "the backend classes in the installed vLLM's source, run for this hardware, and the ledger",
        _FIXED,
        _device_lengths,
    ),
    Check(
        "varlen-graphs",
        "Every attention backend's graphs replay requests of different lengths",
        "the metadata builders in the installed vLLM's source, run for this hardware, and the ledger",
        _FIXED,
        _varlen_graphs,
    ),
    Check(
        "mono-decode-release",
        "Mono decode is asked of a vLLM that has it",
        "vllm.envs of the installed vLLM",
        "set VLLM_ROCM_MONO_DECODE=0, or install vLLM 0.32.0",
        _mono_decode_release,
    ),
    Check(
        "block-rejection",
        "Block rejection does not read out of bounds",
        "rejection_sample_method, vLLM's release and the ledger",
        "set speculative_config.rejection_sample_method=standard, or install vLLM 0.32.0",
        _bounds,
    ),
)
