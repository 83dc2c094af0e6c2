"""What a scrape and traces add up to, and that a count which differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from patches.telemetry.trace import trace_file
from tests.bench import two_engines


def step(plan: str, proposed: int, verified: int, accepted: list[int]) -> str:
    record = {"plan": plan, "proposed": proposed, "verified": verified, "accepted": accepted}
    return json.dumps({"kind": "verification", **record}) + "\n"


def scrape(engine: int, proposed: int) -> str:
    return (
        f'dspark_proposed_draft_tokens_total{{engine="{engine}",position="0"}} {proposed - 1}\n'
        f'dspark_proposed_draft_tokens_total{{engine="{engine}",position="1"}} 1\n'
        f'dspark_verified_draft_tokens_total{{engine="{engine}",position="0"}} 3\n'
        f'dspark_accepted_draft_tokens_total{{engine="{engine}",position="0"}} 2\n'
        f'dspark_verification_steps_total{{engine="{engine}",plan="trimmed"}} 1\n'
        f'dspark_verification_steps_total{{engine="{engine}",plan="fixed"}} 0\n'
    )


def server(folder: Path, text: str) -> Any:
    client = SimpleNamespace(get=lambda _path: SimpleNamespace(text=text))
    return SimpleNamespace(client=client, trace=folder / "trace")


def test_counts_that_agree_and_one_that_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(two_engines, "SETTLED_S", 0.0)
    for engine, proposed in enumerate((5, 7)):
        path = Path(trace_file(str(tmp_path / "trace"), engine))
        path.write_text('{"kind": "ranking"}\n' + step("trimmed", proposed, 3, [2, 0]))
    found = two_engines.compared(server(tmp_path, scrape(0, 5) + scrape(1, 7)))
    assert found["wrong"] == []
    assert found["engines"][1] == {"proposed": 7, "verified": 3, "accepted": 2, "steps": 1}
    assert found["sum"]["proposed"] == 12
    (wrong,) = two_engines.compared(server(tmp_path, scrape(0, 5) + scrape(1, 8)))["wrong"]
    assert wrong.startswith("engine 1: scrape ")
    (missing,) = two_engines.compared(server(tmp_path, scrape(0, 5)))["wrong"]
    assert missing.startswith("engine 1: scrape None")
