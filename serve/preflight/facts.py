"""Everything the checks look at, gathered once. A check never looks anywhere else, so that it runs on made-up facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from patches import install
from patches.install import Installed
from serve.arguments import ArgumentNames
from serve.errors import InputError
from serve.listening import port_problem
from serve.preflight.checkpoint import Checkpoint, read_checkpoints
from serve.preflight.machine import Machine, survey_machine
from serve.preflight.plan import Plan
from serve.preflight.upstream import Upstream, ask
from serve.profile import resolve_model

PLUGIN = "dspark"
"""The name of our entry point in `vllm.general_plugins`."""


@dataclass(frozen=True)
class Facts:
    """What is so, apart from the plan.

    Attributes:
        machine: Hardware and process.
        release: vLLM's release, or `none`.
        patches: What the ledger decides for this release on this hardware.
        plugin_installed: Whether vLLM would find our plugin.
        names: The release's argument names; None without vLLM.
        upstream: The release's own answers; None without vLLM.
        target: The model's small files.
        draft: The draft's; the target's own where the draft is part of it, None without speculation.
        hub_token: Whether a token for the model hub is there.
        port: Why the port cannot be listened on; None where it can, or none was given.
    """

    machine: Machine
    release: str
    patches: Installed
    plugin_installed: bool
    names: ArgumentNames | None
    upstream: Upstream | None
    target: Checkpoint
    draft: Checkpoint | None
    hub_token: bool
    port: str | None

    @property
    def confidence_head(self) -> bool | None:
        """Whether the draft has one; None without a draft, or where its config could not be read.

        DeepSeek's checkpoints carry the head without saying so in the config; a separate draft says so.
        """
        if self.draft is None or self.draft.config is None:
            return None
        declared = self.draft.config.get("enable_confidence_head", self.draft.name == self.target.name)
        return declared is not False and self.draft.confidence_head is not False


def gather(plan: Plan, *, names: ArgumentNames | None, address: tuple[str, int] | None) -> Facts:
    """All facts for `plan`, in at most a few seconds.

    Args:
        plan: What would be started.
        names: The release's argument names, as the plan was read with.
        address: Host and port that the server would listen on; None where it is not asked for.

    Raises:
        InputError: `DSPARK_PATCHES_OFF` names no patch.
    """
    machine = survey_machine(plan.environment)
    root = install.vllm_root()
    release = install.vllm_release()
    wanted = [(plan.model, plan.revision)]
    if plan.draft_model is not None:
        wanted.append((resolve_model(plan.draft_model), plan.draft_revision))
    checkpoints = read_checkpoints(wanted, plan.environment)
    target = checkpoints[wanted[0]]
    return Facts(
        machine=machine,
        release=release,
        patches=_survey(release, machine, root),
        plugin_installed=_plugin_installed(),
        names=names,
        upstream=None if root is None else _ask(root, machine, target, plan),
        target=target,
        draft=checkpoints[wanted[-1]] if plan.speculation else None,
        hub_token=_hub_token(plan.environment),
        port=None if address is None else port_problem(*address),
    )


def _survey(release: str, machine: Machine, root: Path | None) -> Installed:
    try:
        switched_off = install.switched_off_ids()
    except install.PatchError as error:
        raise InputError(str(error)) from error
    return install.survey(
        release=release, hardware_name=machine.hardware.name, vllm_root=root, switched_off=switched_off
    )


def _ask(root: Path, machine: Machine, target: Checkpoint, plan: Plan) -> Upstream:
    return ask(
        root,
        hardware=machine.hardware.name,
        architecture=target.architecture,
        num_speculative_tokens=plan.num_speculative_tokens or 1,
    )


def _plugin_installed() -> bool:
    return any(point.name == PLUGIN for point in metadata.entry_points(group="vllm.general_plugins"))


def _hub_token(environment: Mapping[str, str]) -> bool:
    from huggingface_hub import get_token

    return bool(environment.get("HF_TOKEN") or get_token())
